"""The most likely tokens after the sampled one, for draft trees."""

import jax.numpy as jnp
from jax import Array

from ...sharding.device_axes import UNSPLIT, Axis
from . import local_token_ids
from .xla import argmax


def runners_up(logits_RV: Array, tokens_R: Array, count: int, axis: Axis = UNSPLIT) -> Array:
    """The most likely tokens of each row other than the sampled one, best first: [R, count]."""
    R, V = logits_RV.shape
    logits_RV = logits_RV.astype(jnp.float32)
    token_lists = []
    for _ in range(count):
        logits_RV = logits_RV.at[jnp.arange(R), local_token_ids(tokens_R, V, axis)].set(
            -jnp.inf, mode="drop"
        )
        tokens_R, _ = argmax(logits_RV, axis)
        token_lists.append(tokens_R)
    return jnp.stack(token_lists, axis=1)
