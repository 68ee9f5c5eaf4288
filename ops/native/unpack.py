"""The arrays that lie one after the other in a buffer of words."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from . import has, target
from .kernel_names import UNPACK


def unpack(words_N: jax.Array, like: Sequence[np.ndarray]) -> list[jax.Array]:
    """Arrays like these, of 32-bit numbers or truth values, that the words hold.

    As a kernel on CPUs: XLA compiles a loop for each, which is half of what it takes to compile a
    step.
    """
    if has(UNPACK):
        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in like]
        return jax.ffi.ffi_call(target(UNPACK), shapes)(words_N)
    ends = np.cumsum([array.size for array in like]).tolist()

    def part(array: np.ndarray, first: int, last: int) -> jax.Array:
        own = words_N[first:last].reshape(array.shape)
        return (
            own != 0
            if array.dtype == bool
            else jax.lax.bitcast_convert_type(own, jnp.dtype(array.dtype))
        )

    return [part(array, *ends) for array, *ends in zip(like, [0, *ends], ends, strict=False)]
