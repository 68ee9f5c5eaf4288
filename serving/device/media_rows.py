"""Rows that stand in for the embeddings of placeholder tokens, and how the device holds them."""

import jax
import jax.numpy as jnp

from ...ops.attention import page_dtype


def bits_of(x):
    """x as an array that is updated in place holds it: bfloat16 as its bits on CPUs, see
    `page_dtype`.
    """
    stored_dtype = page_dtype(x.dtype)
    return x if stored_dtype == x.dtype else jax.lax.bitcast_convert_type(x, stored_dtype)


def from_bits(bits, dtype):
    """The inverse of `bits_of`."""
    return bits if bits.dtype == dtype else jax.lax.bitcast_convert_type(bits, dtype)


def stored_rows(store_RED, media_T, column: int, dtype):
    """The rows [T, D] of a column that stand in for tokens; any row where `media_T` is -1."""
    return from_bits(store_RED[jnp.maximum(media_T, 0), column], dtype)
