"""Root-mean-square norm, computed in float32 whatever the input's dtype."""

import jax
import jax.numpy as jnp

from ..sharding.device_axes import UNSPLIT, Axis
from .ordered_sum import sum_pairs


def rms_norm(x, scale=None, eps: float = 1e-6, axis: Axis = UNSPLIT):
    """x / rms(x) over the last axis, times `scale` if there is one; the result has x's dtype.

    Where that axis is split over the devices of `axis`, the norm is over all of it.
    """
    wide = x.astype(jnp.float32)
    with jax.named_scope(__name__):
        squares = mean(wide * wide)
    if axis.size > 1:
        squares = axis.sum(squares) / axis.size
    wide = wide * jax.lax.rsqrt(squares[..., None] + eps)
    return (wide if scale is None else wide * scale).astype(x.dtype)


def layer_norm(x, scale, bias, eps: float):
    """(x - mean) / deviation over the last axis, times `scale`, and `bias` added; the result has x's dtype."""
    wide = x.astype(jnp.float32)
    with jax.named_scope(__name__):
        wide = wide - mean(wide)[..., None]
        variance = mean(wide * wide)
    return (wide * jax.lax.rsqrt(variance[..., None] + eps) * scale + bias).astype(x.dtype)


def mean(x):
    """The mean over the last axis. On a CPU XLA's own sums give other bits for 4 rows than for 64."""
    return sum_pairs(x) / x.shape[-1] if jax.default_backend() == "cpu" else jnp.mean(x, axis=-1)


def varies() -> str | None:
    """Why a row's bits may depend on its company, as of an op's implementations."""
    if jax.default_backend() == "cpu":
        return None
    return f"norms by XLA on a {jax.default_backend()} may be summed in an order that depends on the number of rows"
