"""Splitting of a buffer of 32-bit words into arrays."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from . import has, target
from .kernel_names import UNPACK


def unpack(words_N: jax.Array, templates: Sequence[np.ndarray]) -> list[jax.Array]:
    """Split the words into consecutive arrays with the shapes and dtypes of `templates`: 32-bit
    numbers, or booleans with a word for each.

    On CPUs it is a kernel, because XLA would compile a loop for each array, which takes half of the
    compile time of a step.
    """
    if has(UNPACK):
        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in templates]
        return list(jax.ffi.ffi_call(target(UNPACK), shapes)(words_N))
    end_offsets = np.cumsum([array.size for array in templates]).tolist()

    def slice_array(array: np.ndarray, start: int, end: int) -> jax.Array:
        words = words_N[start:end].reshape(array.shape)
        return (
            words != 0
            if array.dtype == bool
            else jax.lax.bitcast_convert_type(words, jnp.dtype(array.dtype))
        )

    return [
        slice_array(array, start, end)
        for array, start, end in zip(templates, [0, *end_offsets], end_offsets, strict=False)
    ]
