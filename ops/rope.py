"""Rotary position embedding: the first half of the rotary dimensions is paired with the second
half.
"""

import jax.numpy as jnp
import numpy as np


def angles(positions_T, inv_freq, factor: float = 1.0):
    """Cosine and sine, each [T, pairs] in float32."""
    phase = positions_T[:, None].astype(jnp.float32) * np.asarray(inv_freq, np.float32)
    return jnp.cos(phase) * factor, jnp.sin(phase) * factor


def rotate(x_TNH, cos_sin):
    """Rotate the first 2 * pairs dimensions of each head; the others stay."""
    cos, sin = (part[:, None, :] for part in cos_sin)
    pairs = cos.shape[-1]
    wide = x_TNH.astype(jnp.float32)
    a = wide[..., :pairs]
    b = wide[..., pairs : 2 * pairs]
    rest = x_TNH[..., 2 * pairs :]
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_TNH.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned
