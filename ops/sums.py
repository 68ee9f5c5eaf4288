"""Sums in an order that the shape of the rest does not change: a row's result must not depend on its company."""

import jax.numpy as jnp


def softmax(x):
    """Over the last axis."""
    weight = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return weight / sum_pairs(weight)[..., None]


def sum_pairs(x):
    """The sum over the last axis, halves added to halves: XLA picks the order of its own sums by the array's size."""
    while x.shape[-1] % 2 == 0:
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    total = x[..., 0]
    for i in range(1, x.shape[-1]):
        total = total + x[..., i]
    return total
