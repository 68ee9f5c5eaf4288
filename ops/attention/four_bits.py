"""Keys and values as codes of four bits, two a byte, with a float32 scale for each head and
position.

A scale depends on its own position alone, so that the bits do not depend on where a prompt was cut
or on what came after. The number that is farthest from 0 becomes -8, whatever its sign, and the
scale has the sign that this takes: of the sixteen codes none is wasted. A byte holds a code plus 8
in its low four bits, and the next one's in its high ones.

A few dimensions of keys are much larger than the others in most models, and would leave the others
no codes. So keys are kept rotated by a Hadamard matrix, which spreads each dimension over all;
queries rotated alike give the same products.
"""

import jax.numpy as jnp
import numpy as np

# a head of smaller numbers than this is kept as zeros: 8 divided by them could be infinite
SMALLEST = 2.0**-100


def packed(pages_PSKH) -> bool:
    """Whether pages hold such codes."""
    return pages_PSKH is not None and pages_PSKH.dtype == jnp.uint8


def rotate(x_X):
    """The last axis in float32, in blocks of the largest power of two that divides it, each
    rotated.

    The matrix is symmetric and its own inverse. Numbers are added two at a time, in an order that
    does not depend on the number of rows, and that the CPU kernel has too.
    """
    shape, size = x_X.shape, x_X.shape[-1]
    block = size & -size
    step = 1
    y_X = x_X.astype(jnp.float32)
    while step < block:
        y_X = y_X.reshape(*shape[:-1], size // (2 * step), 2, step)
        y_X = jnp.stack((y_X[..., 0, :] + y_X[..., 1, :], y_X[..., 0, :] - y_X[..., 1, :]), axis=-2)
        step *= 2
    return y_X.reshape(shape) * np.float32(block**-0.5)


def quantise(x_X):
    """(bytes, scales): codes of the last axis. The CPU kernel rounds in the same way."""
    x_X = x_X.astype(jnp.float32)
    most = jnp.max(jnp.abs(x_X), axis=-1)
    fits = (most > SMALLEST) & (most < jnp.inf)
    signed = jnp.where(jnp.min(x_X, axis=-1) == -most, most, -most)
    inverse = 8 / jnp.where(fits, signed, 1)
    codes_X = jnp.clip(jnp.round(x_X * inverse[..., None]), -8, 7)
    codes_X = jnp.where(fits[..., None], codes_X, 0).astype(jnp.int32) + 8
    pairs_X = codes_X.reshape(*codes_X.shape[:-1], -1, 2)
    bytes_X = (pairs_X[..., 0] | pairs_X[..., 1] << 4).astype(jnp.uint8)
    return bytes_X, jnp.where(fits, signed * 0.125, most * 0)  # what is no number stays none


def codes(bytes_X):
    """The codes of bytes, as float32."""
    pairs_X = jnp.stack((bytes_X & 15, bytes_X >> 4), axis=-1).astype(jnp.float32) - 8
    return pairs_X.reshape(*bytes_X.shape[:-1], -1)
