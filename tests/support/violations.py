"""Checks of many files in one test: every violation is reported, with its file and line, after the
remedy.
"""

from collections.abc import Iterable


def require_none(violations: Iterable[str], remedy: str) -> None:
    """Fail with every violation on a line of its own.

    Args:
        violations: Each with its place, as in `ops/norm.py:12 imports torch`.
        remedy: What to do about any of them; the first line of the failure.
    """
    lines = list(violations)
    assert not lines, "\n".join((remedy, *lines))
