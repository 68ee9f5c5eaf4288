"""Packing of 4-bit values, two per byte, in the order in which GPU kernels decode them.

Inputs are packed in blocks of 128. The low four bits of a byte hold an input of the block's first
half, the high four bits the input 64 further. So the low bits of a block are neighbouring inputs,
and so are the high bits.

    byte        0   1 ...  63 |  64  65 ... 127
    low four    0   1 ...  63 | 128 129 ... 191
    high four  64  65 ... 127 | 192 193 ... 255

The last block ends at the last input. If the number of inputs is no multiple of 128, the last block
starts earlier and repeats some inputs. Fewer than 128 inputs are one block; their number is even.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 128  # inputs of a block


def block_of(inputs: int) -> int:
    """The number of inputs of a block."""
    return min(inputs, BLOCK)


def count(inputs: int) -> int:
    """The number of bytes for `inputs` values."""
    return -(-inputs // block_of(inputs)) * (block_of(inputs) // 2)


def join(codes_K: np.ndarray) -> np.ndarray:
    """Pack values [K, ...] into bytes [count(K), ...]."""
    K = len(codes_K)
    block = block_of(len(codes_K))
    first = np.minimum(np.arange(0, K, block), K - block)
    low = (first[:, None] + np.arange(block // 2)).reshape(-1)
    return codes_K[low] | codes_K[low + block // 2] << 4


def split(data, inputs: int) -> Any:
    """Unpack NumPy or JAX bytes [count(inputs), ...] to values [inputs, ...]."""
    block = block_of(inputs)
    trailing = data.shape[1:]
    # One broadcast shift for both halves; concatenating two arrays takes ten times as long on CPUs.
    shift = np.array([0, 4], np.uint8).reshape(1, 2, 1, *[1] * len(trailing))
    codes = (data.reshape(-1, 1, block // 2, *trailing) >> shift & 15).reshape(-1, *trailing)
    if not (last := inputs % block):
        return codes
    xp = jnp if isinstance(data, jax.Array) else np
    return xp.concatenate([codes[: inputs - last], codes[-last:]])
