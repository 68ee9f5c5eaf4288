"""Decoder layers that draft autoregressively from the target's features: EAGLE, EAGLE-3 and MTP."""

import jax.numpy as jnp

from ...ops.linear import einsum, project
from ...ops.residual import Residual, add, norm_alone
from ...ops.rope import angles
from ...sharding.device_axes import ONE_DEVICE, DeviceAxes
from .. import decoder
from ..config import Attention
from ..mixers import LayerHooks, attention
from ..weights import ModelWeights
from .heads import DraftHeads
from .weights import DraftHeadsWeights


def take_features(heads: DraftHeads, weights: DraftHeadsWeights, raw_TF):
    """The features for `run`: the target's hidden states, or those of several layers projected."""
    return einsum("TF,FD->TD", raw_TF, weights.join_FD) if heads.features else raw_TF


def run(
    heads: DraftHeads,
    weights: DraftHeadsWeights,
    target_weights: ModelWeights,
    tokens_T,
    features_TD,
    positions_T,
    cache,
    hooks: LayerHooks,
    axes: DeviceAxes = ONE_DEVICE,
):
    """(features, hidden states, cache): the features go with the tokens drafted from hidden states.

    A row holds the feature of its position and the token after it; -1 is padding. `hooks` and
    `cache` are as in `decoder.run_layers`, with the layers of `heads.model` from 0. On several
    devices the layers are sharded and the heads' other weights are replicated.
    """
    config = heads.model
    eps = heads.model.norm_eps
    live_T1 = positions_T[:, None] >= 0
    tables = ModelWeights(weights.embed_VD, (), weights.final_norm_D)  # as `decoder` takes them
    has_embedding = weights.embed_VD is not None
    embedding_weights, embedding_axes = (
        (tables, ONE_DEVICE) if has_embedding else (target_weights, axes)
    )
    embed_TD, _ = decoder.embed(embedding_weights, tokens_T, positions_T, config, embedding_axes)
    features_TD = jnp.where(live_T1, features_TD, 0).astype(embed_TD.dtype)
    normed_TD = features_TD
    if weights.embed_norm_D is not None:
        embed_TD = norm_alone(embed_TD, weights.embed_norm_D, eps)
        normed_TD = norm_alone(features_TD, weights.feature_norm_D, eps)
    joined_TF = jnp.concatenate([embed_TD, normed_TD], axis=-1)
    layers = weights.layers
    first = 0
    if heads.kind == "eagle3":
        x_TD = normed_TD if heads.normed_residual else features_TD
        x_TD, cache = wide_layer(heads, layers[0], x_TD, joined_TF, positions_T, cache, hooks, axes)
        layers = layers[1:]
        first = 1
    else:
        x_TD = jnp.where(
            live_T1, project("TF,FD->TD", joined_TF, weights.join_FD, weights.join_bias_D), 0
        )
    (x_TD, _), cache = decoder.run_layers(
        layers, first, (x_TD, None), cache, positions_T, config, hooks, axes
    )
    hidden_TD = x_TD if weights.final_norm_D is None else decoder.final_norm(tables, x_TD, config)
    return hidden_TD if heads.normed else x_TD, hidden_TD, cache


def wide_layer(
    heads: DraftHeads, w, x_TD, joined_TF, positions_T, cache, hooks: LayerHooks, axes: DeviceAxes
):
    """(rows, cache) after EAGLE-3's first layer, whose attention input is (embedding, feature)."""
    config = heads.model
    layer = config.layers[0]
    a = layer.attention
    assert isinstance(a, Attention)
    eps = config.norm_eps
    rope = a.rope and angles(positions_T, a.rope.inv_freq, a.rope.factor)
    y_TD, cache = attention.mix(
        a, w.attention, joined_TF, rope, cache, hooks.of_layer(0), eps, axes
    )
    rows, _ = decoder.feed_forward_block(
        layer, w, Residual(x_TD, y_TD), positions_T >= 0, config, axes
    )
    return add(rows, eps), cache


def logits(
    heads: DraftHeads,
    weights: DraftHeadsWeights,
    target_weights: ModelWeights,
    hidden_TD,
    axes: DeviceAxes = ONE_DEVICE,
):
    """Float32 logits over the target's vocabulary (or its local shard); -inf if not draftable."""
    return table_logits(heads, weights.head_VD, weights.tokens_U, target_weights, hidden_TD, axes)


def table_logits(
    heads: DraftHeads, head_VD, tokens_U, target_weights: ModelWeights, hidden_RD, axes: DeviceAxes
):
    """Logits by the heads' own output table, or by the target's."""
    if head_VD is None:
        return decoder.logits(target_weights, hidden_RD, heads.model, axes)
    logits_RV = einsum("RD,VD->RV", hidden_RD, head_VD, jnp.float32)
    if tokens_U is not None:
        full_RV = jnp.full((len(logits_RV), heads.model.vocab_size), -jnp.inf)
        logits_RV = full_RV.at[:, tokens_U].set(logits_RV)
    padding = -logits_RV.shape[1] % axes.tensor.size
    return axes.tensor.local_slice(
        jnp.pad(logits_RV, ((0, 0), (0, padding)), constant_values=-jnp.inf).T
    ).T
