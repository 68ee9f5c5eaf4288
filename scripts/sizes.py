"""Sizes on the command line."""

import typer

from ..serving.api.sizes import FORM, parse_size


def size(text: str) -> int:
    """Parse a size such as `32K`; `-1` is accepted where a command gives it a meaning."""
    if isinstance(text, int):  # a default goes through the same parser
        return text
    value = parse_size(text)
    if value is None:
        raise typer.BadParameter(f"{text!r} is not a size: write {FORM}")
    return value
