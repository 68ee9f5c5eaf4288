"""Inputs mixed so that none is large by itself: signs, then Walsh-Hadamard transforms of
neighbours.

Inputs come in blocks, each the largest power of two that divides their number: 4096 are one block,
192 three of 64. The transform is symmetric and its own inverse, so that W x = rotated(W) rotated(x)
for rows of W and of x alike.
"""

import jax
import jax.numpy as jnp
import numpy as np


def signs(count: int) -> np.ndarray:
    """1 or -1 for each input by its number: the lowest bit of what murmur3 makes of it in the
    end.
    """
    bits = np.arange(count, dtype=np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ bits >> np.uint32(shift)) * np.uint32(factor)
    bits ^= bits >> np.uint32(16)
    return np.where(bits & 1, -1, 1).astype(np.float32)


def rotated(x):
    """Rows [..., K] of numpy or JAX in float32."""
    return transformed(x * signs(x.shape[-1]))


def restored(x):
    """The rows of which these are `rotated`."""
    return transformed(x) * signs(x.shape[-1])


def transformed(x):
    """Sums of two at a time in one order: a row's bits do not depend on its company."""
    xp = jnp if isinstance(x, jax.Array) else np
    K = x.shape[-1]
    lead = x.shape[:-1]
    block = K & -K
    half = 1
    x = x.astype(np.float32)
    while half < block:
        pairs = x.reshape(*lead, -1, 2, half)
        first = pairs[..., 0, :]
        second = pairs[..., 1, :]
        x = xp.stack([first + second, first - second], axis=-2)
        half = 2 * half
    return x.reshape(*lead, K) * np.float32(block**-0.5)
