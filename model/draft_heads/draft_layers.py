"""Decoder layers that draft token by token from the target's features: EAGLE's, EAGLE-3's and DeepSeek's."""

import jax.numpy as jnp

from ...ops.linear import einsum, project
from ...ops.residual import Residual, add, norm_alone
from ...ops.rope import angles
from ...sharding.device_axes import ONE_DEVICE, DeviceAxes
from .. import decoder
from ..mixers import LayerHooks, attention
from ..weights import ModelWeights
from .heads import DraftHeads
from .weights import DraftHeadsWeights


def take_features(heads: DraftHeads, weights: DraftHeadsWeights, raw_TF):
    """The features that `run` takes: the target's hidden states, or what some of its layers give, joined to one row."""
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
    """(features, hidden states, cache): the features go in with the tokens that are drafted from the hidden states.

    A row holds the feature of its position and the token after that position; -1 is padding. `hooks` and `cache` are
    those of `decoder.run_layers`, with the layers of `heads.model` from 0. On several devices each has its
    part of the layers, and the whole of what is the heads' own beside them.
    """
    config, eps, live_T1 = heads.model, heads.model.norm_eps, positions_T[:, None] >= 0
    own = weights.embed_VD is not None
    owner, over = (weights, ONE_DEVICE) if own else (target_weights, axes)
    embed_TD, _ = decoder.embed(owner, tokens_T, positions_T, config, over)
    features_TD = jnp.where(live_T1, features_TD, 0).astype(embed_TD.dtype)
    given_TD = features_TD
    if weights.embed_norm_D is not None:
        embed_TD = norm_alone(embed_TD, weights.embed_norm_D, eps)
        given_TD = norm_alone(features_TD, weights.feature_norm_D, eps)
    both_TF = jnp.concatenate([embed_TD, given_TD], axis=-1)
    layers, first = weights.layers, 0
    if heads.kind == "eagle3":
        x_TD = given_TD if heads.normed_residual else features_TD
        x_TD, cache = wide_layer(heads, layers[0], x_TD, both_TF, positions_T, cache, hooks, axes)
        layers, first = layers[1:], 1
    else:
        x_TD = jnp.where(live_T1, project("TF,FD->TD", both_TF, weights.join_FD, weights.join_bias_D), 0)
    (x_TD, _), cache = decoder.run_layers(layers, first, (x_TD, None), cache, positions_T, config, hooks, axes)
    hidden_TD = x_TD if weights.final_norm_D is None else decoder.final_norm(weights, x_TD, config)
    return hidden_TD if heads.normed else x_TD, hidden_TD, cache


def wide_layer(heads: DraftHeads, w, x_TD, both_TF, positions_T, cache, hooks: LayerHooks, axes: DeviceAxes):
    """(rows, cache) after EAGLE-3's first layer, which attends with embedding and feature side by side."""
    config = heads.model
    layer, eps = config.layers[0], config.norm_eps
    rope = layer.attention.rope and angles(positions_T, layer.attention.rope.inv_freq, layer.attention.rope.factor)
    y_TD, cache = attention.mix(layer.attention, w.attention, both_TF, rope, cache, hooks.of_layer(0), eps, axes)
    rows, _ = decoder.feed_forward_block(layer, w, Residual(x_TD, y_TD), positions_T >= 0, config, axes)
    return add(rows, eps), cache


def logits(
    heads: DraftHeads,
    weights: DraftHeadsWeights,
    target_weights: ModelWeights,
    hidden_TD,
    axes: DeviceAxes = ONE_DEVICE,
):
    """Float32 logits over the target's vocabulary, or this device's part of it; -inf for what cannot be drafted."""
    return table_logits(heads, weights.head_VD, weights.tokens_U, target_weights, hidden_TD, axes)


def table_logits(heads: DraftHeads, head_VD, tokens_U, target_weights: ModelWeights, hidden_RD, axes: DeviceAxes):
    """Logits by a head of the heads' own, or by the target's."""
    if head_VD is None:
        return decoder.logits(target_weights, hidden_RD, heads.model, axes)
    logits_RV = einsum("RD,VD->RV", hidden_RD, head_VD, jnp.float32)
    if tokens_U is not None:
        whole_RV = jnp.full((len(logits_RV), heads.model.vocab_size), -jnp.inf)
        logits_RV = whole_RV.at[:, tokens_U].set(logits_RV)
    spare = -logits_RV.shape[1] % axes.tensor.size
    return axes.tensor.part(jnp.pad(logits_RV, ((0, 0), (0, spare)), constant_values=-jnp.inf).T).T
