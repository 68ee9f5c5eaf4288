"""What tests leave out in `make test`: cases, and random ones in number.

It draws a tenth (but a few at least), `make test-all` every one; QUIRE_CASES=10 looks ten times as long.
"""

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

FACTOR = float(os.environ.get("QUIRE_CASES", "1"))


def cases(number: int, least: int = 10) -> int:
    return max(round(number * FACTOR), min(number, least))


def thinned(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """The parameters of a test, of which `make test` has those that are kept."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]
