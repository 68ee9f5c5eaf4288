"""What tests leave out for each change: cases, and random ones in number.

`make test` and `make check` draw a tenth (but a few at least), `make test-all` all; QUIRE_CASES=10
looks ten times as long.
"""

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

FACTOR = float(os.environ.get("QUIRE_CASES", "1"))


def cases(number: int, least: int = 5) -> int:
    return max(round(number * FACTOR), min(number, least))


def thinned(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """The values of a parameter, of which `make test` and `make check` have those that are kept."""
    return [
        value if value in kept else pytest.param(value, marks=pytest.mark.nightly)
        for value in values
    ]


def nightly_from(number: int, cases: Sequence[tuple]) -> list[Any]:
    """The cases of a test, of which `make test` and `make check` have the first ones."""
    return [
        *cases[:number],
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in cases[number:]),
    ]
