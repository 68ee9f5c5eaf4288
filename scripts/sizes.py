"""Sizes as people write them."""

import re

import typer

UNITS = {
    "": 1,
    **{letter: 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{letter: 1024**power for power, letter in enumerate("KMGT", start=1)},
}


def size(text: str) -> int:
    """`4096`, `32K` (1024 each), `2.5k` (1000 each), `1.5G`; `-1` where a command gives it a meaning."""
    if isinstance(text, int):  # a default goes through the same parser
        return text
    match = re.fullmatch(r"(-?[0-9]+(?:\.[0-9]+)?)([kmgtKMGT]?)", text.strip())
    value = float(match[1]) * UNITS[match[2]] if match else 0.5
    if value != int(value):
        raise typer.BadParameter(
            f"{text!r} is not a size: write a whole number, with K, M, G, T for powers of 1024 or k, m, g, t for powers"
            " of 1000, as in 32K"
        )
    return int(value)
