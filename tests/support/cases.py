"""Test cases that `make test` and `make check` leave out.

They draw a tenth of the random cases (but a few at least), `make test-all` draws all;
QUIRE_CASES=10 draws ten times as many.
"""

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

FACTOR = float(os.environ.get("QUIRE_CASES", "1"))


def cases(number: int, least: int = 5) -> int:
    """The number of random cases to draw, of `number` in a full run."""
    return max(round(number * FACTOR), min(number, least))


def thinned(values: Iterable[Any], quick_values: Collection[Any]) -> list[Any]:
    """Values of a parameter; `make test` and `make check` run only the `quick_values`."""
    return [
        value if value in quick_values else pytest.param(value, marks=pytest.mark.nightly)
        for value in values
    ]


def nightly_from(number: int, cases: Sequence[tuple]) -> list[Any]:
    """Cases of a test; `make test` and `make check` run only the first `number`."""
    return [
        *cases[:number],
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in cases[number:]),
    ]
