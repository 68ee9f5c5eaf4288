"""Layer norm and RMS norm, computed in float32 for inputs of any dtype."""

from typing import Any

import jax
import jax.numpy as jnp

from ..sharding import struct
from ..sharding.device_axes import UNSPLIT, Axis
from .ordered_sum import sum_pairs


class LayerNorm(struct.PyTreeNode):
    """The weights of a layer norm. (The weights of an RMS norm are a single array, its scale.)"""

    scale_D: Any
    bias_D: Any = None


def scale_and_bias(weights) -> tuple[Any, Any]:
    """The scale and the bias of a layer norm or RMS norm; None for a missing one."""
    return (weights.scale_D, weights.bias_D) if isinstance(weights, LayerNorm) else (weights, None)


def norm(x, weights, eps: float):
    """Layer norm or RMS norm, by the type of the weights; x itself if `weights` is None."""
    if weights is None:
        return x
    return (
        layer_norm(x, weights, eps) if isinstance(weights, LayerNorm) else rms_norm(x, weights, eps)
    )


def layer_norm(x, weights: LayerNorm, eps: float):
    """(x - mean) / deviation * scale + bias over the last axis; the result has x's dtype."""
    x_f32 = x.astype(jnp.float32)
    x_f32 = x_f32 - mean(x_f32)[..., None]
    mean_square = mean(x_f32 * x_f32)
    x_f32 = x_f32 * jax.lax.rsqrt(mean_square[..., None] + eps) * weights.scale_D
    return (x_f32 if weights.bias_D is None else x_f32 + weights.bias_D).astype(x.dtype)


def rms_norm(x, scale=None, eps: float = 1e-6, axis: Axis = UNSPLIT):
    """x / rms(x) over the last axis, times `scale` if there is one; the result has x's dtype.

    If the last axis is split over the devices of `axis`, the norm covers all their slices.
    """
    x_f32 = x.astype(jnp.float32)
    mean_square = mean(x_f32 * x_f32)
    if axis.size > 1:
        mean_square = axis.sum(mean_square) / axis.size
    x_f32 = x_f32 * jax.lax.rsqrt(mean_square[..., None] + eps)
    return (x_f32 if scale is None else x_f32 * scale).astype(x.dtype)


def mean(x):
    """The mean over the last axis, batch-invariant on CPUs, where `jnp.mean` is not."""
    with jax.named_scope(__name__):
        return (
            sum_pairs(x) / x.shape[-1] if jax.default_backend() == "cpu" else jnp.mean(x, axis=-1)
        )


def varies() -> str | None:
    """See `quire.ops.implementations`."""
    if jax.default_backend() == "cpu":
        return None
    return (
        f"norms by XLA on a {jax.default_backend()} may be summed in an order that depends on "
        "the number of rows"
    )
