"""Rows of the device's media store, which stand in for the embeddings of placeholder tokens."""

import jax
import jax.numpy as jnp

from ...ops.attention import page_dtype


def bits_of(x):
    """x as the store holds it: bfloat16 as its bits on CPUs, see `page_dtype`."""
    stored_dtype = page_dtype(x.dtype)
    return x if stored_dtype == x.dtype else jax.lax.bitcast_convert_type(x, stored_dtype)


def stored_rows(store_RED, media_T, column: int, dtype):
    """The rows [T, D] of a column that stand in for tokens; any row where `media_T` is -1."""
    rows_TD = store_RED[jnp.maximum(media_T, 0), column]
    return rows_TD if rows_TD.dtype == dtype else jax.lax.bitcast_convert_type(rows_TD, dtype)
