"""A layer's residual: what a block gives is added to the rows, and the next block gets the norm of
the sum.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from ...sharding.device_axes import UNSPLIT, Axis
from ..implementations import choose
from ..norm import rms_norm

# Tried in order; one that cannot serve a case declines by raising NotImplementedError with its
# reasons.
IMPLEMENTATIONS = {"mosaic_gpu": ".hopper", "native": ".cpu", "xla": ".xla"}


class Residual(NamedTuple):
    """Rows, and what the block before gave, which is not added yet: x + y, or x + norm(y) where
    there is a scale.

    A scale is an array, or a `LayerNorm`.
    """

    x_TD: Any
    y_TD: Any = None  # None: nothing
    scale_D: Any = None


def add_and_norm(
    rows: Residual,
    scale_D,
    eps: float,
    rounds: str | None = None,
    implementation: str | None = None,
):
    """(the sum, its norm); without a scale there is no norm. `implementation` forces one of
    IMPLEMENTATIONS.

    `rounds`: the codes that products will make of the norm (`Weight.rounds`), which then may be
    `RoundedRows`.
    """
    if scale_D is None:
        sum_TD = add(rows, eps)
        return sum_TD, sum_TD

    def run(module):
        return module.add_and_norm(rows, scale_D, eps, rounds)

    return choose(IMPLEMENTATIONS, __name__, run, implementation)


def add(rows: Residual, eps: float):
    """The sum alone."""
    if rows.y_TD is None:
        return rows.x_TD
    return rows.x_TD + (
        rows.y_TD if rows.scale_D is None else norm_alone(rows.y_TD, rows.scale_D, eps)
    )


def norm_alone(x, scale_D, eps: float, rounds: str | None = None, axis: Axis = UNSPLIT):
    """The norm over the last axis, where there is nothing to add; a scale of None is one of ones.

    In contrast to `quire.ops.norm` a row's bits do not depend on its company on a GPU either, where
    a kernel serves; it does not where the devices of `axis` split a row.
    """
    if axis.size > 1:
        return rms_norm(x, scale_D, eps, axis)
    D = x.shape[-1]
    scale_D = jnp.ones(D, jnp.float32) if scale_D is None else scale_D
    if x.ndim == 2:
        return add_and_norm(Residual(x), scale_D, eps, rounds)[1]
    return add_and_norm(Residual(x.reshape(-1, D)), scale_D, eps)[1].reshape(x.shape)
