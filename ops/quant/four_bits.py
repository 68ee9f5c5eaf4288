"""Codes of four bits, two a byte, in the order in which a GPU's product decodes them.

Inputs come in blocks of 128: a byte has one of a block's first half in its low four bits, and the
one 64 places on in its high ones. So a block's low halves are neighbouring inputs, and so are its
high ones.

    byte        0   1 ...  63 |  64  65 ... 127
    low four    0   1 ...  63 | 128 129 ... 191
    high four  64  65 ... 127 | 192 193 ... 255

The last block ends with the last input: where inputs do not divide by 128 it begins earlier and has
some of them again. Fewer than 128 are one block, of an even number.
"""

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 128  # inputs


def block_of(inputs: int) -> int:
    """Inputs of a block."""
    return min(inputs, BLOCK)


def count(inputs: int) -> int:
    """Bytes of so many inputs."""
    return -(-inputs // block_of(inputs)) * (block_of(inputs) // 2)


def join(codes_K: np.ndarray) -> np.ndarray:
    """Bytes [count(K), ...] of codes [K, ...]."""
    K = len(codes_K)
    block = block_of(len(codes_K))
    first = np.minimum(np.arange(0, K, block), K - block)
    low = (first[:, None] + np.arange(block // 2)).reshape(-1)
    return codes_K[low] | codes_K[low + block // 2] << 4


def split(data, inputs: int):
    """The codes [inputs, ...] of bytes [count(inputs), ...], of numpy or JAX."""
    block = block_of(inputs)
    rest = data.shape[1:]
    # Both halves by one broadcast shift: joined from two arrays they would cost ten times as much
    # on a CPU.
    shift = np.array([0, 4], np.uint8).reshape(1, 2, 1, *[1] * len(rest))
    codes = (data.reshape(-1, 1, block // 2, *rest) >> shift & 15).reshape(-1, *rest)
    if not (last := inputs % block):
        return codes
    xp = jnp if isinstance(data, jax.Array) else np
    return xp.concatenate([codes[: inputs - last], codes[-last:]])
