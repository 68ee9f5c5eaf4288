"""Rotary position embedding that pairs the first half of the rotary dimensions with the second."""

import jax.numpy as jnp
import numpy as np


def angles(positions_T, inv_freq, factor: float = 1.0):
    """Cosines and sines of the rotation angles, each [T, pairs] in float32, times `factor`.

    Args:
        positions_T: Positions, or [T, pairs] where pairs turn by different ones (`axis_positions`).
        inv_freq: The frequency of each pair.
        factor: Multiplies the results.
    """
    positions_TP = positions_T if positions_T.ndim == 2 else positions_T[:, None]
    phase = positions_TP.astype(jnp.float32) * np.asarray(inv_freq, np.float32)
    return jnp.cos(phase) * factor, jnp.sin(phase) * factor


def axis_positions(positions_AT, axes: tuple[int, ...]):
    """The position [T, pairs] that turns each pair, which is that of its axis."""
    return positions_AT[np.asarray(axes)].T


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
