"""Quill's training forward pass: initialisation, bfloat16 products in both directions, the loss."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quire.model import decoder
from quire.model.config import Attention, ModelConfig
from quire.model.mixers import LayerHooks
from quire.ops.linear.weight import Weight
from quire.scripts.train_heads.attention import attention


def init_lookback_heads(weights, config: ModelConfig):
    """Initialise the first layer such that head h attends h tokens back.

    Lookup tasks need the token before each token, which takes training longer to learn than
    everything else. One embedding dimension is set to a constant for all tokens. Through it, keys
    get a constant vector in the fastest rotary pairs, and the queries of head h the same vector
    rotated by h positions.
    """
    first = weights.layers[0]
    constant = 0.3
    gain = 2.0
    sharp = 2.0
    pairs = 4
    a = config.layers[0].attention
    assert isinstance(a, Attention) and a.rope is not None
    w = first.attention
    half = a.head_dim // 2
    inv_freq = np.asarray(a.rope.inv_freq)
    qkv_DGH = np.array(w.qkv_DGH)
    for head in range(a.heads + 1):  # the last one is the key's
        turn = -head * inv_freq[:pairs] if head < a.heads else np.zeros(pairs)
        vector_H = np.zeros(a.head_dim)
        vector_H[:pairs] = np.cos(turn)
        vector_H[half : half + pairs] = np.sin(turn)
        qkv_DGH[:, head] *= 0.3  # damp the content-dependent part, so that position dominates
        qkv_DGH[0, head] = gain * vector_H
    attention = w.replace(qkv_DGH=jnp.asarray(qkv_DGH), q_norm=w.q_norm * sharp)
    layers = (first.replace(attention=attention), *weights.layers[1:])
    return weights.replace(
        embed_VD=jnp.asarray(weights.embed_VD).at[:, 0].set(constant), layers=layers
    )


@jax.custom_vjp
def bfloat16_dot(x, w):
    """x @ w in bfloat16 with float32 accumulation, also in the gradients."""
    return _dot(x, w)


def _dot(x, w):
    return jnp.dot(
        x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=jnp.float32
    )


bfloat16_dot.defvjp(
    lambda x, w: (_dot(x, w), (x, w)),
    lambda saved, g: (
        _dot(g, saved[1].T).astype(saved[0].dtype),
        _dot(saved[0].T, g).astype(saved[1].dtype),
    ),
)


class Narrow(Weight):
    """A weight whose products run in bfloat16."""

    array: Any

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        if bias is not None:
            raise NotImplementedError("training has no biases")
        into, out = subscripts.split("->")[0].split(",")
        shared = sum(letter in into for letter in out)
        shape = self.array.shape
        rows = x.shape[: x.ndim - shared]
        if subscripts == "RD,VD->RV":
            return bfloat16_dot(x, self.array.T)
        inner = 1
        for size in shape[:shared]:
            inner *= size
        return bfloat16_dot(x.reshape(-1, inner), self.array.reshape(inner, -1)).reshape(
            *rows, *shape[shared:]
        )


def with_bfloat16_products(weights):
    """Replace every matrix by a `Narrow` node; embedding lookups keep the float32 table."""
    embed = weights.embed_VD
    nodes = jax.tree.map(lambda leaf: Narrow(leaf) if leaf.ndim > 1 else leaf, weights)
    return nodes.replace(embed_VD=embed, head_VD=Narrow(embed))


def logits_of(weights, tokens_BT, documents_BT, config: ModelConfig):
    """Float32 logits [B * T, V]."""
    B, T = tokens_BT.shape
    weights = with_bfloat16_products(weights)
    positions = jnp.tile(jnp.arange(T), B)
    hooks = LayerHooks(attention(config, documents_BT))
    hidden, _ = decoder.forward(weights, {}, tokens_BT.reshape(-1), positions, config, hooks)
    return decoder.logits(weights, hidden, config)


def loss_of(weights, batch, config: ModelConfig):
    """Weighted mean cross entropy of a batch (tokens, targets, weights, documents)."""
    tokens, targets, weight, documents = batch
    logits_RV = logits_of(weights, tokens, documents, config)
    # A mask instead of a gather, whose gradient is slow.
    is_target_RV = jnp.arange(config.vocab_size) == targets.reshape(-1, 1)
    target_logit_R = jnp.where(is_target_RV, logits_RV, 0).sum(axis=-1)
    loss_R = (jax.nn.logsumexp(logits_RV, axis=-1) - target_logit_R) * weight.reshape(-1)
    return loss_R.sum() / jnp.maximum(weight.sum(), 1)


def predictions(weights, tokens_BT, documents_BT, config: ModelConfig):
    """The most likely next token at every position."""
    return jnp.argmax(logits_of(weights, tokens_BT, documents_BT, config), axis=-1).reshape(
        tokens_BT.shape
    )
