"""The residual stream: adding the output of a block, fused with the norm before the next block."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from ...sharding.device_axes import UNSPLIT, Axis
from ..implementations import choose
from ..norm import rms_norm

# Tried in order; one that does not support a case raises NotImplementedError with its reasons.
IMPLEMENTATIONS = {"mosaic_gpu": ".hopper", "native": ".cpu", "xla": ".xla"}


class Residual(NamedTuple):
    """The residual stream with a pending addition: x + y, or x + norm(y) if there is a scale."""

    x_TD: Any  # the residual stream
    y_TD: Any = None  # the output of the previous block; None: nothing to add
    scale_D: Any = None  # the weights of the norm of y: an array or a `LayerNorm`


def add_and_norm(
    rows: Residual,
    scale_D,
    eps: float,
    rounds: str | None = None,
    implementation: str | None = None,
):
    """Add the pending output and normalise the sum.

    Args:
        rows: the residual stream with the pending addition.
        scale_D: the weights of the norm of the sum: an array or a `LayerNorm`; None: no norm.
        eps: the epsilon of both norms.
        rounds: the format to which the following products round their inputs (`Weight.rounds`).
            With one, the norm may be `RoundedRows`.
        implementation: the name in IMPLEMENTATIONS of the only one to try.

    Returns:
        (the sum, its norm).
    """
    if scale_D is None:
        sum_TD = add(rows, eps)
        return sum_TD, sum_TD

    def run(module):
        return module.add_and_norm(rows, scale_D, eps, rounds)

    return choose(IMPLEMENTATIONS, __name__, run, implementation)


def add(rows: Residual, eps: float):
    """Add the pending output, without a norm."""
    if rows.y_TD is None:
        return rows.x_TD
    return rows.x_TD + (
        rows.y_TD if rows.scale_D is None else norm_alone(rows.y_TD, rows.scale_D, eps)
    )


def norm_alone(x, scale_D, eps: float, rounds: str | None = None, axis: Axis = UNSPLIT):
    """The norm over the last axis, with nothing to add; without a scale it is one.

    In contrast to `quire.ops.norm` it is batch-invariant on GPUs too, if a kernel supports it. The
    kernels do not support a last axis that is split over the devices of `axis`.
    """
    if axis.size > 1:
        return rms_norm(x, scale_D, eps, axis)
    D = x.shape[-1]
    scale_D = jnp.ones(D, jnp.float32) if scale_D is None else scale_D
    if x.ndim == 2:
        return add_and_norm(Residual(x), scale_D, eps, rounds)[1]
    return add_and_norm(Residual(x.reshape(-1, D)), scale_D, eps)[1].reshape(x.shape)
