"""Four-bit KV cache: codes, two a byte, with a float32 scale for each head and position.

A scale depends on its own position only, so results do not depend on how a prompt was cut into
chunks. The number farthest from 0 becomes the code -8, whatever its sign, and the scale gets the
sign that this needs, so that all sixteen codes are used. A byte holds a code plus 8 in its low
nibble, and the next code plus 8 in its high nibble.

In most models a few dimensions of the keys are much larger than the others, for which too few codes
would be left. So keys are rotated by a Hadamard matrix before quantisation, which spreads each
dimension over all. Queries are rotated in the same way, which leaves scores unchanged.
"""

import jax.numpy as jnp
import numpy as np

# a head whose numbers are all smaller is stored as zeros: 8 divided by them could be infinite
SMALLEST = 2.0**-100


def is_packed(pages_PSKH) -> bool:
    """Whether pages hold four-bit codes."""
    return pages_PSKH is not None and pages_PSKH.dtype == jnp.uint8


def rotate(x_X):
    """Multiply blocks of the last axis by a Hadamard matrix, in float32.

    The blocks' size is the largest power of two that divides the axis. The matrix is symmetric and
    its own inverse. The order of additions is that of the CPU kernel, and independent of the number
    of rows.
    """
    shape, width = x_X.shape, x_X.shape[-1]
    block = width & -width
    step = 1
    y_X = x_X.astype(jnp.float32)
    while step < block:
        y_X = y_X.reshape(*shape[:-1], width // (2 * step), 2, step)
        y_X = jnp.stack((y_X[..., 0, :] + y_X[..., 1, :], y_X[..., 0, :] - y_X[..., 1, :]), axis=-2)
        step *= 2
    return y_X.reshape(shape) * np.float32(block**-0.5)


def quantise(x_X):
    """Quantise the last axis, with the same bits as the CPU kernel.

    Returns:
        (bytes, scales).
    """
    x_X = x_X.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x_X), axis=-1)
    has_scale = (largest > SMALLEST) & (largest < jnp.inf)
    negated_extreme = jnp.where(jnp.min(x_X, axis=-1) == -largest, largest, -largest)
    inverse_scale = 8 / jnp.where(has_scale, negated_extreme, 1)
    codes_X = jnp.clip(jnp.round(x_X * inverse_scale[..., None]), -8, 7)
    codes_X = jnp.where(has_scale[..., None], codes_X, 0).astype(jnp.int32) + 8
    pairs_X = codes_X.reshape(*codes_X.shape[:-1], -1, 2)
    bytes_X = (pairs_X[..., 0] | pairs_X[..., 1] << 4).astype(jnp.uint8)
    # largest * 0 is NaN for NaN and infinity, which must stay visible
    return bytes_X, jnp.where(has_scale, negated_extreme * 0.125, largest * 0)


def unpack(bytes_X):
    """The codes that bytes hold, as float32."""
    pairs_X = jnp.stack((bytes_X & 15, bytes_X >> 4), axis=-1).astype(jnp.float32) - 8
    return pairs_X.reshape(*bytes_X.shape[:-1], -1)
