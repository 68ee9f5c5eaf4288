"""Rows as codes of eight bits, each with a scale, for products on a GPU whose weights are codes
too.
"""

from ..implementations import choose

# Tried in order; one that cannot serve a case declines by raising NotImplementedError with its
# reasons.
IMPLEMENTATIONS = {"mosaic_gpu": ".hopper", "xla": ".xla"}


def round_rows(x_RK, codes: str = "int8", implementation: str | None = None):
    """(codes in x's dtype, float32 scale of each row), such that its largest code is 127, or 448 of
    `float8`.

    A row that is not finite has a scale of NaN. `implementation` forces one of IMPLEMENTATIONS.
    """
    return choose(
        IMPLEMENTATIONS, __name__, lambda module: module.round_rows(x_RK, codes), implementation
    )
