"""Pooling and head of encoders: one vector for each sequence."""

import jax
import jax.numpy as jnp

from ..ops.activation import ACTIVATIONS
from ..ops.linear import einsum
from ..ops.residual import norm_alone
from .config import ModelConfig
from .weights import ModelWeights


def pool(hidden_TD, starts_B1, kind: str):
    """A float32 vector for each sequence: of its first or last token, or the mean of all."""
    first_B = starts_B1[:-1]
    count_B = starts_B1[1:] - starts_B1[:-1]
    last = hidden_TD.shape[0] - 1
    with jax.named_scope("pool"):
        if kind != "mean":
            row_B = first_B if kind == "cls" else first_B + count_B - 1
            return hidden_TD[jnp.clip(row_B, 0, last)].astype(jnp.float32)

        def add(i, sum_BD):  # token by token, so that the sum is batch-invariant
            row_BD = hidden_TD[jnp.minimum(first_B + i, last)].astype(jnp.float32)
            return sum_BD + jnp.where((i < count_B)[:, None], row_BD, 0)

        zeros_BD = jnp.zeros((len(first_B), hidden_TD.shape[1]))
        sum_BD = jax.lax.fori_loop(0, jnp.max(count_B), add, zeros_BD)
        return sum_BD / jnp.maximum(count_B, 1)[:, None]


def head(weights: ModelWeights, x_BD, config: ModelConfig):
    """Apply the head's dense layers to pooled vectors, in float32."""
    for dense, w in zip(config.head, weights.head, strict=True):
        x_BD = einsum("BD,DF->BF", x_BD, w.matrix_DF)
        if w.bias_F is not None:
            x_BD = x_BD + w.bias_F
        if dense.activation is not None:
            x_BD = ACTIVATIONS[dense.activation](x_BD)
        if w.norm_F is not None:
            x_BD = norm_alone(x_BD, w.norm_F, config.norm_eps)
    return x_BD
