"""Zeros that take memory only as it is written."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import has, target
from .kernel_names import BLANK

SMALL = 1 << 20  # bytes that are not worth a call


def blank(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Zeros.

    On a CPU the system maps a page of them when it is first touched, so that a large cache starts
    at once.
    """
    bits = jax.dtypes.itemsize_bits(np.dtype(dtype))  # the kernel takes none of less than a byte
    if math.prod(shape) * bits < SMALL * 8 or bits < 8 or not has(BLANK):
        return jnp.zeros(shape, dtype)
    # Two calls are never one: each must have memory of its own.
    return jax.ffi.ffi_call(
        target(BLANK), jax.ShapeDtypeStruct(shape, dtype), has_side_effect=True
    )()
