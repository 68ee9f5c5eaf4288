"""Norms of rows, computed in float32 whatever the input's dtype."""

from typing import Any

import jax
import jax.numpy as jnp

from ..sharding import struct
from ..sharding.device_axes import UNSPLIT, Axis
from .ordered_sum import sum_pairs


@struct.dataclass
class LayerNorm:
    """The weights of a norm that takes the mean off first, in place of the scale of one that
    does not.
    """

    scale_D: Any
    bias_D: Any = None


def scale_and_bias(weights) -> tuple[Any, Any]:
    """The arrays of a norm, None where it has none."""
    return (weights.scale_D, weights.bias_D) if isinstance(weights, LayerNorm) else (weights, None)


def norm(x, weights, eps: float):
    """The norm that the weights are for; x itself where there are none."""
    if weights is None:
        return x
    return (
        layer_norm(x, weights, eps) if isinstance(weights, LayerNorm) else rms_norm(x, weights, eps)
    )


def layer_norm(x, weights: LayerNorm, eps: float):
    """(x less its mean) / its deviation, times the scale; and the bias, if there is one.

    The result has x's dtype.
    """
    wide = x.astype(jnp.float32)
    wide = wide - mean(wide)[..., None]
    squares = mean(wide * wide)
    wide = wide * jax.lax.rsqrt(squares[..., None] + eps) * weights.scale_D
    return (wide if weights.bias_D is None else wide + weights.bias_D).astype(x.dtype)


def rms_norm(x, scale=None, eps: float = 1e-6, axis: Axis = UNSPLIT):
    """x / rms(x) over the last axis, times `scale` if there is one; the result has x's dtype.

    Where that axis is split over the devices of `axis`, the norm is over all of it.
    """
    wide = x.astype(jnp.float32)
    squares = mean(wide * wide)
    if axis.size > 1:
        squares = axis.sum(squares) / axis.size
    wide = wide * jax.lax.rsqrt(squares[..., None] + eps)
    return (wide if scale is None else wide * scale).astype(x.dtype)


def mean(x):
    """The mean over the last axis.

    On a CPU XLA's own sums give other bits for 4 rows than for 64.
    """
    with jax.named_scope(__name__):
        return (
            sum_pairs(x) / x.shape[-1] if jax.default_backend() == "cpu" else jnp.mean(x, axis=-1)
        )


def varies() -> str | None:
    """Why a row's bits may depend on its company, as of an op's implementations."""
    if jax.default_backend() == "cpu":
        return None
    return (
        f"norms by XLA on a {jax.default_backend()} may be summed in an order that depends on "
        "the number of rows"
    )
