"""Rotary position embedding that pairs the first half of the rotary dimensions with the second."""

import jax.numpy as jnp
import numpy as np


def angles(positions_T, inv_freq, factor: float = 1.0):
    """Cosines and sines of the rotation angles, each [T, pairs] in float32, times `factor`."""
    phase = positions_T[:, None].astype(jnp.float32) * np.asarray(inv_freq, np.float32)
    return jnp.cos(phase) * factor, jnp.sin(phase) * factor


def rotate(x_TNH, cos_sin):
    """Rotate the first 2 * pairs dimensions of each head; the others stay."""
    cos, sin = (table[:, None, :] for table in cos_sin)
    pairs = cos.shape[-1]
    x_f32 = x_TNH.astype(jnp.float32)
    first_half = x_f32[..., :pairs]
    second_half = x_f32[..., pairs : 2 * pairs]
    unrotated = x_TNH[..., 2 * pairs :]
    rotated = jnp.concatenate(
        [first_half * cos - second_half * sin, second_half * cos + first_half * sin], axis=-1
    ).astype(x_TNH.dtype)
    return jnp.concatenate([rotated, unrotated], axis=-1) if unrotated.shape[-1] else rotated
