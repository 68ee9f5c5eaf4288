"""A layer's residual: what a block gives is added to the rows, and the next block gets the norm of the sum."""

from typing import Any, NamedTuple

from ..implementations import choose

# Tried in order; one that cannot serve a case declines by raising NotImplementedError with its reasons.
IMPLEMENTATIONS = {"mosaic_gpu": ".mosaic_gpu", "native": ".native", "xla": ".xla"}


class Residual(NamedTuple):
    """Rows, and what the block before gave, which is not added yet: x + y, or x + norm(y) where there is a scale.

    A scale is an array, or a `LayerNorm`.
    """

    x_TD: Any
    y_TD: Any = None  # None: nothing
    scale_D: Any = None


def add_and_norm(rows: Residual, scale_D, eps: float, rounds: str | None = None, implementation: str | None = None):
    """(the sum, its norm); without a scale there is no norm. `implementation` forces one of IMPLEMENTATIONS.

    `rounds`: the codes that products will make of the norm (`Weight.rounds`), which then may be `RoundedRows`.
    """

    def run(module):
        return module.add_and_norm(rows, scale_D, eps, rounds)

    return choose(IMPLEMENTATIONS, __name__, run, implementation)
