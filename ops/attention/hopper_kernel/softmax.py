"""Partial softmaxes: (largest score, sum of weights, weighted sum of values) of each row.

For heads of 256 columns a warpgroup's registers cannot hold the weighted sums of two spans. So
where spans are merged, a sum is a function of (first column, number of columns), and is loaded and
saved in chunks of columns.
"""

import jax.numpy as jnp
from jax import lax

from ...gpu.tile import along_rows
from .task import ROWS, KernelShape

CHUNK = 64  # columns that are merged at once


def column_chunks(shape: KernelShape):
    """(first column, number of columns) of each chunk."""
    return [(start, min(CHUNK, shape.columns)) for start in range(0, shape.columns, CHUNK)]


def with_sum_slices(best_M, total_M, sum_MH):
    """Turn the sum of a partial softmax from an array into a function of the columns."""
    return best_M, total_M, lambda start, size: lax.slice(sum_MH, (0, start), (ROWS, start + size))


def with_full_sum(shape: KernelShape, best_M, total_M, sum_slice):
    """Turn the sum of a partial softmax from a function of the columns into an array."""
    return best_M, total_M, sum_slice(0, shape.columns)


def select(predicate, if_true, if_false):
    """The partial softmax of `if_true()` or `if_false()`; reads only the requested columns."""
    best_M, total_M = lax.cond(predicate, lambda: if_true()[:2], lambda: if_false()[:2])
    return (
        best_M,
        total_M,
        lambda *bounds: lax.cond(
            predicate, lambda: if_true()[2](*bounds), lambda: if_false()[2](*bounds)
        ),
    )


def merge(earlier, later):
    """Merge the partial softmaxes of two spans, whose sums are functions of the columns.

    Largest scores are integers: see `WarpgroupTask.block`.
    """
    best_M = jnp.maximum(earlier[0], later[0])
    finite_M = jnp.where(best_M == -jnp.inf, 0.0, best_M)
    shrinks = [jnp.exp2(softmax[0] - finite_M) for softmax in (earlier, later)]
    total_M = earlier[1] * shrinks[0] + later[1] * shrinks[1]

    def sum_slice(start, size):
        old_MC, new_MC = (
            broadcast_rows(shrink_M, sum_MC) * sum_MC
            for shrink_M, sum_MC in zip(
                shrinks, (softmax[2](start, size) for softmax in (earlier, later)), strict=True
            )
        )
        return old_MC + new_MC

    return best_M, total_M, sum_slice


def divisor(best_M, total_M, sink_M):
    """The divisor of the weighted sums: the sum of all weights, or 1 if that is zero."""
    if sink_M is not None:
        total_M = total_M + jnp.exp2(sink_M - jnp.where(best_M == -jnp.inf, 0.0, best_M))
    return jnp.where(total_M == 0, 1.0, total_M)


def broadcast_rows(x_M, target):
    """Broadcast a number for each row to a tile; of a vector nothing is to be done."""
    return x_M if target.ndim == 1 else along_rows(x_M, target.shape)
