"""The likeliest tokens, where more than one draft is wanted for the same place."""

import jax.numpy as jnp
from jax import Array

from ...sharding.device_axes import UNSPLIT, Axis
from . import own_tokens
from .xla import argmax


def runners_up(logits_RV: Array, tokens_R: Array, count: int, axis: Axis = UNSPLIT) -> Array:
    """The likeliest tokens of each row but for the one that was drawn, in their order: [R,
    count].
    """
    R, V = logits_RV.shape
    logits_RV = logits_RV.astype(jnp.float32)
    found = []
    for _ in range(count):
        logits_RV = logits_RV.at[jnp.arange(R), own_tokens(tokens_R, V, axis)].set(
            -jnp.inf, mode="drop"
        )
        tokens_R, _ = argmax(logits_RV, axis)
        found.append(tokens_R)
    return jnp.stack(found, axis=1)
