"""Sizes with units."""

import re

UNITS = {
    "": 1,
    **{letter: 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{letter: 1024**power for power, letter in enumerate("KMGT", start=1)},
}
FORM = (
    "a whole number, with K, M, G, T for powers of 1024 or k, m, g, t for powers of 1000, as in 32K"
)


def parse_size(text: str) -> int | None:
    """Parse `4096`, `32K` (units of 1024), `2.5k` (units of 1000), `1.5G` or `-1`; None if
    invalid.
    """
    match = re.fullmatch(r"(-?[0-9]+(?:\.[0-9]+)?)([kmgtKMGT]?)", text.strip())
    value = float(match[1]) * UNITS[match[2]] if match else 0.5
    return int(value) if value == int(value) else None


def amount(count: float) -> str:
    """Format bytes in the largest unit of which there is at least one."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:,.4g} {unit}"
    return f"{count:,.0f} B"
