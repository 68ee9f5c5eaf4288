"""The softmax of some keys: (largest score, sum of weights, weighted sum of values) of each row.

At a width of 256 a warpgroup's registers cannot hold the sums of two spans. So where spans are
merged, sums are functions of (first column, number of columns), and are loaded and saved part by
part.
"""

import jax.numpy as jnp
from jax import lax

from ...gpu.tile import along_rows
from .task import ROWS, KernelShape

PART = 64  # columns that are merged at once


def parts(shape: KernelShape):
    """(first column, number of columns) of each part."""
    return [(start, min(PART, shape.columns)) for start in range(0, shape.columns, PART)]


def by_part(best_M, total_M, sum_MH):
    """A softmax with its sum as a function of the part."""
    return best_M, total_M, lambda start, size: lax.slice(sum_MH, (0, start), (ROWS, start + size))


def whole(shape: KernelShape, best_M, total_M, sum_of):
    """A softmax with its whole sum."""
    return best_M, total_M, sum_of(0, shape.columns)


def either(first, one, other):
    """The softmax of `one()` or `other()`; of the sums only the parts that are asked for."""
    best_M, total_M = lax.cond(first, lambda: one()[:2], lambda: other()[:2])
    return (
        best_M,
        total_M,
        lambda *part: lax.cond(first, lambda: one()[2](*part), lambda: other()[2](*part)),
    )


def merge(before, after):
    """The softmax of two spans: (largest score, sum of weights, weighted sum of values) of each
    row.

    Largest scores are whole numbers: see `WarpgroupTask.block`.
    """
    best_M = jnp.maximum(before[0], after[0])
    finite_M = jnp.where(best_M == -jnp.inf, 0.0, best_M)
    shrinks = [jnp.exp2(part[0] - finite_M) for part in (before, after)]
    total_M = before[1] * shrinks[0] + after[1] * shrinks[1]

    def sum_of(start, size):
        old_MC, new_MC = (
            spread(shrink_M, found_MC) * found_MC
            for shrink_M, found_MC in zip(
                shrinks, (part[2](start, size) for part in (before, after)), strict=True
            )
        )
        return old_MC + new_MC

    return best_M, total_M, sum_of


def divisor(best_M, total_M, sink_M):
    """What sums of values are divided by: the sum of all weights; where there is none the sums are
    zero.
    """
    if sink_M is not None:
        total_M = total_M + jnp.exp2(sink_M - jnp.where(best_M == -jnp.inf, 0.0, best_M))
    return jnp.where(total_M == 0, 1.0, total_M)


def spread(x_M, like):
    """One number for each row, or for each number."""
    return x_M if like.ndim == 1 else along_rows(x_M, like.shape)
