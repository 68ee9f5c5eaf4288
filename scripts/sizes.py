"""Sizes on the command line."""

import typer

from ..serving.api.sizes import FORM, parse_size


def size(text: str) -> int:
    """The number that a text such as `32K` stands for; `-1` where a command gives it a meaning."""
    if isinstance(text, int):  # a default goes through the same parser
        return text
    value = parse_size(text)
    if value is None:
        raise typer.BadParameter(f"{text!r} is not a size: write {FORM}")
    return value
