"""Root-mean-square norm, computed in float32 whatever comes in."""

import jax
import jax.numpy as jnp


def rms_norm(x, scale=None, eps: float = 1e-6):
    """x / rms(x) over the last axis, times `scale` if there is one; the result has x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide if scale is None else wide * scale).astype(x.dtype)
