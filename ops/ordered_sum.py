"""Sums in an order that the sizes of other axes do not change: a row's bits must not depend on the
number of rows.
"""

from functools import reduce

import jax.numpy as jnp
from jax import lax


def softmax(x):
    """Over the last axis."""
    weight = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return weight / sum_pairs(weight)[..., None]


def sum_pairs(x, axis: int = -1):
    """The sum over an axis, halves added to halves: XLA picks the order of its own sums by the
    array's size.
    """
    last = axis % x.ndim
    while (size := x.shape[last]) % 2 == 0:
        # indexing takes three times as long to trace
        x = lax.add(*lax.split(x, (size // 2, size // 2), last))
    return lax.squeeze(reduce(lax.add, lax.split(x, (1,) * size, last)), (last,))
