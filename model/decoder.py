"""The decoder: one pure forward function for all model families, driven by `ModelConfig`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from ..ops import moe as experts
from ..ops.activation import ACTIVATIONS, glu, soft_cap
from ..ops.linear import add_up, einsum, exact, gated, project, rounds, rows
from ..ops.linear.weight import plain
from ..ops.moe.dispatch import mix_over
from ..ops.moe.routing import RoutingRule, route
from ..ops.norm import mean
from ..ops.residual import Residual, add, add_and_norm, norm_alone
from ..ops.rope import angles, axis_positions
from ..sharding.device_axes import ONE_DEVICE, DeviceAxes
from .config import Layer, Mlp, ModelConfig, Moe, Temperature
from .mixers import LayerHooks, module_of
from .weights import (
    LayerWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
    PerLayerWeights,
)


def forward(
    weights: ModelWeights,
    cache,
    tokens_T,
    positions_T,
    config: ModelConfig,
    hooks: LayerHooks,
    axes: DeviceAxes = ONE_DEVICE,
):
    """Run the whole model. Returns (hidden_TD after the final norm, cache).

    Rows at position -1 are padding. They are zeros in all layers, so that matrix products may skip
    them.

    With several devices, each of them runs this function: `weights` are its local shards, `config`
    has its local heads and columns, and the rows are replicated.
    """
    x = embed(weights, tokens_T, positions_T, config, axes)
    (x_TD, _), cache = run_layers(weights.layers, 0, x, cache, positions_T, config, hooks, axes)
    return final_norm(weights, x_TD, config), cache


def embed(
    weights: ModelWeights,
    tokens_T,
    positions_T,
    config: ModelConfig,
    axes: DeviceAxes = ONE_DEVICE,
    types_T=None,
    media=None,
):
    """Embed tokens. Returns the first layer's input: (x_TD, per-layer embeddings TLA or None).

    Args:
        weights: The model's weights.
        tokens_T: Token ids.
        positions_T: Positions; -1 for padding.
        config: The model's config.
        axes: The device axes.
        types_T: Token type ids (BERT's segment ids); all 0 if omitted.
        media: (which tokens stand for rows of images, those rows), if the model reads images.
    """
    dtype = jnp.dtype(config.dtype)
    x_TD = embedding_lookup(weights.embed_VD, tokens_T, axes).astype(dtype) * jnp.asarray(
        config.embed_scale, dtype
    )
    if config.types:
        x_TD = (
            x_TD
            + weights.type_embed_ID[jnp.zeros_like(positions_T) if types_T is None else types_T]
        )
    if config.positions:
        x_TD = x_TD + weights.position_embed_PD[jnp.maximum(positions_T, 0)]
    if config.embed_norm:
        x_TD = norm_alone(x_TD, weights.embed_norm_D, config.norm_eps)
    x_TD = centred(jnp.where(positions_T[:, None] >= 0, x_TD, 0), config)
    if media is not None:
        is_media_T, rows_TD = media
        x_TD = jnp.where(is_media_T[:, None], rows_TD, x_TD)
        tokens_T = jnp.where(is_media_T, config.media_token, tokens_T)
    return x_TD, per_layer_inputs(
        weights, tokens_T, x_TD, config, axes
    ) if config.per_layer_dim else None


def run_layers(
    layers: Sequence[LayerWeights],
    first: int,
    x,
    cache,
    positions_T,
    config: ModelConfig,
    hooks: LayerHooks,
    axes: DeviceAxes = ONE_DEVICE,
    axis_positions_AT=None,
):
    """Run consecutive layers. Returns (x, cache).

    Args:
        layers: The weights of the layers.
        first: Index in the model of the first of them.
        x: (x_TD, per-layer embeddings), as returned by `embed`.
        cache: The KV cache and recurrent states, passed through the hooks.
        positions_T: Positions; -1 for padding.
        config: The config of the whole model.
        hooks: How layers attend, recur and are observed.
        axes: The device axes.
        axis_positions_AT: The positions of each axis, for rotary embeddings with several; None: all
            axes have the positions of the sequence, as in drafters.
    """
    x_TD, per_layer_TLA = x
    rows = Residual(x_TD)
    eps = config.norm_eps
    layers = list(layers)
    if hooks.fetch_weights is not None:
        layers[0], rows = hooks.fetch_weights(0, layers[0], rows)
    live_T = positions_T >= 0
    # Computed once per step and shared by the layers.
    ropes = {
        rope: angles(
            positions_T
            if axis_positions_AT is None or not rope.axes
            else axis_positions(axis_positions_AT, rope.axes),
            rope.inv_freq,
            rope.factor,
        )
        for rope in distinct_ropes(config)
    }
    factors = {
        temperature: query_scale(positions_T, temperature)
        for temperature in {layer.attention.temperature for layer in config.layers}
        if temperature is not None
    }

    def run_layer(index: int, w: LayerWeights, rows: Residual, per_layer_TA, cache):
        """Run one layer. Returns (rows, chosen experts, cache)."""
        layer = config.layers[index]
        with jax.named_scope("attention"):
            rope = ropes.get(layer.attention.rope)
            layer_hooks = hooks.of_layer(index)
            if (temperature := layer.attention.temperature) is not None:
                layer_hooks = replace(
                    layer_hooks,
                    attend=partial(attend_scaled, layer_hooks.attend, factors[temperature]),
                )
            rows, normed_TD, cache = attention_block(
                layer, w, rows, rope, live_T, cache, layer_hooks, config, axes
            )
        with jax.named_scope("mlp"):
            rows, experts_TX = feed_forward_block(layer, w, rows, live_T, config, axes, normed_TD)
        if w.per_layer is not None:
            with jax.named_scope("per_layer"):
                rows = per_layer_block(layer, w.per_layer, add(rows, eps), per_layer_TA, config)
        if w.scale is not None:
            x_TD = add(rows, eps)
            rows = Residual(x_TD * w.scale.astype(x_TD.dtype))
        return rows, experts_TX, cache

    run = run_layer if hooks.share_trace is None else hooks.share_trace(run_layer)
    for number, w in enumerate(layers):
        index = first + number
        if hooks.fetch_weights is not None and number + 1 < len(layers):
            layers[number + 1], rows = hooks.fetch_weights(number + 1, layers[number + 1], rows)
        with jax.named_scope(f"layer{index}"):
            per_layer_TA = None if per_layer_TLA is None else per_layer_TLA[:, index]
            rows, experts_TX, cache = run(index, w, rows, per_layer_TA, cache)
            if experts_TX is not None and hooks.record_experts is not None:
                with jax.named_scope("mlp"):
                    cache = hooks.record_experts(index, experts_TX, cache)
            added_TD = None if hooks.add_after is None else hooks.add_after(index)
            if added_TD is not None:
                rows = Residual(add(rows, eps) + added_TD)
            if hooks.observe is not None:
                hooks.observe(index, add(rows, eps))
    return (add(rows, eps), per_layer_TLA), cache


def final_norm(weights: ModelWeights, x_TD, config: ModelConfig):
    # Models without a final norm have no scale: the residual is only summed.
    return add_and_norm(Residual(x_TD), weights.final_norm_D, config.norm_eps)[1]


def logits(weights: ModelWeights, hidden_RD, config: ModelConfig, axes: DeviceAxes = ONE_DEVICE):
    """Float32 logits [R, V]; with tensor parallelism, V is this device's shard of the
    vocabulary.
    """
    head_VD = weights.embed_VD if weights.head_VD is None else weights.head_VD
    if not config.writes:  # an encoder: zeros, or NaN in rows with NaN, which the caller checks
        nothing_R1 = 0 * hidden_RD.astype(jnp.float32).sum(axis=1, keepdims=True)
        return jnp.broadcast_to(
            nothing_R1, (len(hidden_RD), -(-config.vocab_size // axes.tensor.size))
        )
    with jax.named_scope("logits"):
        logits_RV = einsum("RD,VD->RV", hidden_RD, head_VD, jnp.float32)
        if weights.head_bias_V is not None:
            logits_RV = logits_RV + weights.head_bias_V
        if config.logit_scale != 1:
            logits_RV = logits_RV * config.logit_scale
        logits_RV = soft_cap(logits_RV, config.final_soft_cap)
    V = logits_RV.shape[1]
    if V * axes.tensor.size == config.vocab_size:
        return logits_RV
    token_V = axes.tensor.index() * V + jnp.arange(V)
    # Mask the vocabulary padding that makes the table divisible.
    return jnp.where(token_V < config.vocab_size, logits_RV, -jnp.inf)


def classes(weights: ModelWeights, hidden_RD):
    """Float32 classification logits [R, C]."""
    with jax.named_scope("classes"):
        x_RD = hidden_RD.astype(jnp.float32)
        if weights.classes_up_DF is not None:
            x_RD = jax.nn.relu(
                einsum("RD,DF->RF", x_RD, weights.classes_up_DF) + weights.classes_up_bias_F
            )
        logits_RC = einsum("RD,DC->RC", x_RD, weights.classes_DC)
        return logits_RC if weights.classes_bias_C is None else logits_RC + weights.classes_bias_C


def distinct_ropes(config: ModelConfig):
    return {layer.attention.rope for layer in config.layers if layer.attention.rope is not None}


def query_scale(positions_T, temperature: Temperature):
    """The factor that scales the queries at each position (long-context temperature scaling)."""
    steps_T = jnp.floor(
        (jnp.maximum(positions_T, 0) + temperature.ahead) / jnp.float32(temperature.floor)
    )
    return 1 + temperature.scale * jnp.log1p(steps_T)


def attend_scaled(attend, factor_T, q_TNH, *arguments, **options):
    """Call `attend` with queries scaled by `factor_T`."""
    scaled_TNH = (q_TNH.astype(jnp.float32) * factor_T[:, None, None]).astype(q_TNH.dtype)
    return attend(scaled_TNH, *arguments, **options)


def centred(x_TD, config: ModelConfig):
    """Subtract the mean of each row, if the model's norms are mean-subtracting layer norms."""
    if not config.centred:
        return x_TD
    x_f32_TD = x_TD.astype(jnp.float32)
    return (x_f32_TD - mean(x_f32_TD)[:, None]).astype(x_TD.dtype)


def residual_update(y_TD, config: ModelConfig):
    """A block's output as it is added to the residual stream: scaled and centred."""
    return centred(y_TD if config.residual_scale == 1 else y_TD * config.residual_scale, config)


def attention_block(
    layer: Layer,
    w: LayerWeights,
    rows: Residual,
    rope,
    live_T,
    cache,
    hooks: LayerHooks,
    config: ModelConfig,
    axes: DeviceAxes,
):
    """Run the layer's mixer (attention or recurrent) with its norms; `hooks` are for this layer.

    Returns (rows, normed input of the mixer, cache).
    """
    mixer = module_of(layer.attention)
    eps = config.norm_eps
    x_TD, normed_TD = add_and_norm(
        rows, w.pre_attention_norm_D, eps, rounds(mixer.reads(w.attention))
    )
    y_TD, cache = mixer.mix(layer.attention, w.attention, normed_TD, rope, cache, hooks, eps, axes)
    update_TD = residual_update(y_TD, config)
    rows = add_block(layer, x_TD, update_TD, w.post_attention_norm_D, live_T, eps)
    return rows, normed_TD, cache


def add_block(layer: Layer, x_TD, y_TD, norm_D, live_T, eps: float) -> Residual:
    """The residual stream after a block with input x and output y; norms the sum for post-norm
    layers.
    """
    if not layer.sum_norm:
        return Residual(x_TD, y_TD, norm_D)
    _, normed_TD = add_and_norm(Residual(x_TD, y_TD), norm_D, eps)
    # Zeroes the padding rows again, which the norm's bias changes.
    return Residual(jnp.where(live_T[:, None], plain(normed_TD), 0))


def feed_forward_block(
    layer: Layer,
    w: LayerWeights,
    rows: Residual,
    live_T,
    config: ModelConfig,
    axes: DeviceAxes,
    read_TD=None,
):
    """Run the layer's MLP and experts with their norms. Returns (rows, chosen experts).

    `read_TD` is the normed input of the mixer, which a parallel MLP shares.
    """
    if not layer.feeds_forward:
        return rows, None
    if layer.parallel:
        y_TD, experts_TX = feed_forward(layer, w, rows.x_TD, read_TD, live_T, config, axes)
        return Residual(rows.x_TD, rows.y_TD + residual_update(y_TD, config)), experts_TX
    first = None if w.mlp is None else w.mlp.up_DGF
    x_TD, normed_TD = add_and_norm(rows, w.pre_mlp_norm_D, config.norm_eps, rounds(first))
    y_TD, experts_TX = feed_forward(layer, w, x_TD, normed_TD, live_T, config, axes)
    update_TD = residual_update(y_TD, config)
    rows = add_block(layer, x_TD, update_TD, w.post_mlp_norm_D, live_T, config.norm_eps)
    return rows, experts_TX


def per_layer_block(layer: Layer, w: PerLayerWeights, x_TD, per_layer_TA, config: ModelConfig):
    """Gemma 4: add this layer's per-layer embedding of the token, gated by the hidden state."""
    assert layer.mlp is not None
    activation = ACTIVATIONS[layer.mlp.activation]
    gate_TA = activation(einsum("TD,DA->TA", x_TD, w.gate_DA)) * per_layer_TA
    return Residual(x_TD, einsum("TA,AD->TD", gate_TA, w.up_AD), w.norm_D)


def feed_forward(
    layer: Layer, w: LayerWeights, residual_TD, x_TD, live_T, config: ModelConfig, axes: DeviceAxes
):
    """Returns (sum of the MLP's and the experts' outputs, chosen experts).

    `residual_TD` is x before its norm, for experts with norms of their own.
    """
    out_TD = 0
    if layer.mlp is not None:
        out_TD = mlp(layer.mlp, w.mlp, x_TD, axes, live_T)
    if layer.moe is None:
        return out_TD, None
    if not layer.moe.own_norms:
        rows_TD = plain(x_TD)
        routed_TD, experts_TX = mix(layer.moe, w.moe, rows_TD, rows_TD, live_T, axes)
        return out_TD + routed_TD, experts_TX
    eps = config.norm_eps
    scale_D = (w.moe.router_scale_D * config.dim**-0.5).astype(residual_TD.dtype)
    router_TD = norm_alone(residual_TD, None, eps) * scale_D
    rows_TD = norm_alone(residual_TD, w.moe.pre_norm_D, eps)
    routed_TD, experts_TX = mix(layer.moe, w.moe, router_TD, rows_TD, live_T, axes)
    out_TD = norm_alone(out_TD, w.moe.mlp_post_norm_D, eps) + norm_alone(
        routed_TD, w.moe.post_norm_D, eps
    )
    return out_TD, experts_TX


def mlp(block: Mlp, w: MlpWeights, x_TD, axes: DeviceAxes, live_T=None):
    if block.multipliers is not None:
        up_TGF = project("TD,DGF->TGF", x_TD, w.up_DGF, w.up_bias_GF)
        scaled_TGF = up_TGF.astype(jnp.float32) * jnp.array(
            [[block.multipliers[0]], [1]], jnp.float32
        )
        up_TF = glu(scaled_TGF, block.activation).astype(up_TGF.dtype)
    elif w.up_bias_GF is None:
        up_TF = gated("TD,DGF->TGF", x_TD, w.up_DGF, block.activation)
    else:
        up_TF = glu(project("TD,DGF->TGF", x_TD, w.up_DGF, w.up_bias_GF), block.activation)
        if live_T is not None:  # zeroes the padding rows again, which the bias changes
            up_TF = jnp.where(live_T[:, None], up_TF, 0)
    out_TD = add_up("TF,FD->TD", up_TF, w.down_FD, w.down_bias_D, axes.tensor)
    if block.multipliers is not None:
        out_TD = out_TD * block.multipliers[1]
    if w.gate_D1 is None:
        return out_TD
    gate_T1 = jax.nn.sigmoid(exact("TD,DE->TE", plain(x_TD), w.gate_D1))
    return (out_TD * gate_T1).astype(out_TD.dtype)


def embedding_lookup(table_V, tokens_T, axes: DeviceAxes):
    """Look up tokens in an embedding table that is sharded over the vocabulary."""
    if axes.tensor.size == 1:
        return table_V[tokens_T]
    V = rows(table_V)
    index_T = tokens_T - axes.tensor.index() * V
    is_local_T = (index_T >= 0) & (index_T < V)
    local_T = table_V[jnp.where(is_local_T, index_T, 0)]
    mask_T = is_local_T.reshape(-1, *[1] * (local_T.ndim - 1))
    return axes.tensor.sum(jnp.where(mask_T, local_T, 0))


def mix(moe: Moe, w: MoeWeights, router_TD, x_TD, live_T, axes: DeviceAxes = ONE_DEVICE):
    """Mixture of experts: route by `router_TD`, compute on `x_TD`. Returns (output, chosen
    experts).

    Padding rows choose no expert. Each device computes its local experts, and its local columns of
    them.
    """
    logits_TE = exact("TD,DE->TE", router_TD, w.router_DE)
    if w.router_bias_E is not None:
        logits_TE = logits_TE + w.router_bias_E
    groups = moe.groups, moe.top_groups, moe.group_score
    rule = RoutingRule(moe.top_k, moe.score, moe.normalize, moe.scaling, *groups, moe.jitter)
    weights_TX, experts_TX = route(logits_TE, live_T, rule, w.choice_bias_E)
    if w.expert_scale_E is not None:
        weights_TX = weights_TX * w.expert_scale_E[experts_TX]
    if moe.weigh_rows:
        x_TD = (x_TD * weights_TX).astype(x_TD.dtype)
        weights_TX = jnp.ones_like(weights_TX)
    num_local = moe.slots // axes.experts.size
    down_bias_ED = w.down_bias_ED
    # With columns split over devices, only the first device adds the bias.
    if down_bias_ED is not None and axes.tensor.size > 1:
        down_bias_ED = jnp.where(axes.tensor.index() == 0, down_bias_ED, 0)
    expert = experts.Experts(
        w.up_EDGF, w.down_EFD, moe.activation, w.up_bias_EGF, down_bias_ED, moe.clamp, moe.alpha
    )
    if axes.same_rows.size < axes.experts.size or moe.spare:
        slots_TX = expert_slots(moe, w, experts_TX)
        return mix_over(axes, x_TD, weights_TX, slots_TX, num_local, expert), experts_TX
    local_TX = experts_TX
    if axes.experts.size > 1:
        local_TX = experts_TX - axes.experts.index() * num_local
        local_TX = jnp.where((local_TX >= 0) & (local_TX < num_local), local_TX, num_local)
    return axes.sum(experts.mix(x_TD, weights_TX, local_TX, num_local, expert)), experts_TX


def expert_slots(moe: Moe, w: MoeWeights, experts_TX):
    """The physical slot of each chosen expert.

    Tokens alternate between the redundant copies of an expert, whose results are bit-identical.
    """
    if w.copies_E is None:
        return experts_TX
    copy_TX = jnp.arange(len(experts_TX))[:, None] % w.copies_E[experts_TX]
    return jnp.where(experts_TX < moe.experts, w.slots_EC[experts_TX, copy_TX], moe.slots)


def per_layer_inputs(weights: ModelWeights, tokens_T, x_TD, config: ModelConfig, axes: DeviceAxes):
    """Gemma 4's per-layer embeddings [T, L, A]: a lookup plus a projection of the main
    embedding.
    """
    A = config.per_layer_dim
    context_TLA = (
        einsum("TD,DLA->TLA", x_TD, weights.per_layer_proj_DLA, jnp.float32) * config.dim**-0.5
    )
    context_TLA = norm_alone(
        context_TLA.astype(x_TD.dtype), weights.per_layer_norm_A, config.norm_eps
    )
    token_TLA = embedding_lookup(weights.per_layer_embed_VLA, tokens_T, axes).astype(x_TD.dtype)
    token_TLA = token_TLA * jnp.asarray(A**0.5, x_TD.dtype)
    return (context_TLA + token_TLA) * jnp.asarray(2**-0.5, x_TD.dtype)
