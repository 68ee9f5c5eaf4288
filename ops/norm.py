"""Root-mean-square norm, computed in float32 whatever comes in."""

import jax
import jax.numpy as jnp

from .sums import sum_pairs


def rms_norm(x, scale=None, eps: float = 1e-6):
    """x / rms(x) over the last axis, times `scale` if there is one; the result has x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(mean(wide * wide)[..., None] + eps)
    return (wide if scale is None else wide * scale).astype(x.dtype)


def mean(x):
    """Over the last axis. On a CPU XLA's own sums give other bits for four rows than for sixty-four."""
    return sum_pairs(x) / x.shape[-1] if jax.default_backend() == "cpu" else jnp.mean(x, axis=-1)
