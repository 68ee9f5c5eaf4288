"""Randomised Hadamard transform of a weight's inputs, which spreads outliers over many inputs:
random signs, then Walsh-Hadamard transforms of blocks.

The size of a block is the largest power of two that divides the number of inputs: 4096 inputs are
one block, 192 are three of 64. The Hadamard transform is symmetric and its own inverse, so the
product of a row of W and a row of x does not change if both are rotated.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def signs(count: int) -> np.ndarray:
    """A pseudo-random sign, 1 or -1, for each input: the lowest bit of murmur3's finaliser of its
    index.
    """
    bits = np.arange(count, dtype=np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ bits >> np.uint32(shift)) * np.uint32(factor)
    bits ^= bits >> np.uint32(16)
    return np.where(bits & 1, -1, 1).astype(np.float32)


def rotated(x) -> Any:
    """Transform rows [..., K] of NumPy or JAX, in float32."""
    return transformed(x * signs(x.shape[-1]))


def restored(x) -> Any:
    """The inverse of `rotated`."""
    return transformed(x) * signs(x.shape[-1])


def transformed(x):
    """The Walsh-Hadamard transform, by pairwise sums in a fixed order, so that it is
    batch-invariant.
    """
    xp = jnp if isinstance(x, jax.Array) else np
    K = x.shape[-1]
    lead = x.shape[:-1]
    block = K & -K
    half = 1
    x = x.astype(np.float32)
    while half < block:
        pairs = x.reshape(*lead, -1, 2, half)
        first_half = pairs[..., 0, :]
        second_half = pairs[..., 1, :]
        x = xp.stack([first_half + second_half, first_half - second_half], axis=-2)
        half = 2 * half
    return x.reshape(*lead, K) * np.float32(block**-0.5)
