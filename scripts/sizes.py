"""Parsing of sizes on the command line."""

import typer

from ..serving.api.sizes import FORM, parse_size


def size(text: str) -> int:
    """Parse a size such as `32K`. `-1` is valid too: some options give it a meaning."""
    if isinstance(text, int):  # a default value goes through the same parser
        return text
    value = parse_size(text)
    if value is None:
        raise typer.BadParameter(f"{text!r} is not a size: write {FORM}")
    return value
