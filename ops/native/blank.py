"""Arrays of zeros that take up memory only when they are written."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import has, target
from .kernel_names import BLANK

SMALL = 1 << 20  # bytes; below, `jnp.zeros` is faster


def blank(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """An array of zeros, like `jnp.zeros`.

    On CPUs the system maps its memory when it is first touched, so that large caches are allocated
    at once.
    """
    bits = jax.dtypes.itemsize_bits(np.dtype(dtype))  # the kernel supports no dtypes below a byte
    if math.prod(shape) * bits < SMALL * 8 or bits < 8 or not has(BLANK):
        return jnp.zeros(shape, dtype)
    # The side effect keeps XLA from merging two calls: each array needs its own memory.
    return jax.ffi.ffi_call(
        target(BLANK), jax.ShapeDtypeStruct(shape, dtype), has_side_effect=True
    )()
