"""The decoder: one pure function for every family, driven by `ModelConfig`."""

from typing import Any

import jax
import jax.numpy as jnp

from ..ops import moe as experts
from ..ops.activation import ACTIVATIONS, glu, soft_cap
from ..ops.expert_dispatch import mix_over
from ..ops.linear import einsum, gated, project, rows
from ..ops.norm import rms_norm
from ..ops.rope import angles, rotate
from ..sharding.device_axes import ALONE, Axis, Team
from .config import Attention, LatentAttention, Layer, ModelConfig, Moe
from .weights import AttentionWeights, LatentWeights, LayerWeights, MlpWeights, ModelWeights, MoeWeights


def forward(weights: ModelWeights, cache, tokens_T, positions_T, config, attend, team: Team = ALONE, note=None):
    """(hidden_TD after the final norm, cache).

    `attend(index, q_TNH, k_TKH, v_TKH, cache, **options) -> (out_TNH, cache)` is the only place where rows
    meet: the serving step passes paged attention, training and the tests pass a dense one. A row at position -1 is
    padding: it begins as zeros and stays zeros, which the products need not multiply. In a team each device has its
    part of the weights, a configuration that says so, and the same rows.
    """
    x = enter(weights, tokens_T, positions_T, config, team)
    (x_TD, _), cache = pass_through(weights.layers, 0, x, cache, positions_T, config, attend, team, note)
    return leave(weights, x_TD, config), cache


def enter(weights: ModelWeights, tokens_T, positions_T, config: ModelConfig, team: Team = ALONE):
    """What the first layer gets: the rows, and where layers have embeddings of their own, those of all of them."""
    dtype = jnp.dtype(config.dtype)
    x_TD = look_up(weights.embed_VD, tokens_T, team).astype(dtype) * jnp.asarray(config.embed_scale, dtype)
    x_TD = jnp.where(positions_T[:, None] >= 0, x_TD, 0)
    return x_TD, per_layer_inputs(weights, tokens_T, x_TD, config, team) if config.per_layer_dim else None


def pass_through(layers, first: int, x, cache, positions_T, config, attend, team=ALONE, note=None, fetch=None):
    """What layers make of the rows, from layer `first` of the configuration on.

    `note(index, experts_TX, cache) -> cache` hears which experts each row chose; those of padding are past the last.
    `fetch(number, weights, x) -> (weights, x)` brings those of a layer that do not lie ready: one layer ahead.
    """
    x_TD, per_layer_TLA = x
    layers = list(layers)
    if fetch is not None:
        layers[0], x_TD = fetch(0, layers[0], x_TD)
    live_T = positions_T >= 0
    ropes = {rope: angles(positions_T, rope.inv_freq, rope.factor) for rope in distinct_ropes(config)}
    for number, w in enumerate(layers):
        index = first + number
        if fetch is not None and number + 1 < len(layers):
            layers[number + 1], x_TD = fetch(number + 1, layers[number + 1], x_TD)
        with jax.named_scope(f"layer{index}"):
            per_layer_TA = None if per_layer_TLA is None else per_layer_TLA[:, index]
            layer = config.layers[index]
            x_TD, cache = block(index, layer, w, x_TD, live_T, per_layer_TA, ropes, cache, config, attend, team, note)
    return (x_TD, per_layer_TLA), cache


def leave(weights: ModelWeights, x_TD, config: ModelConfig):
    """The final norm."""
    return rms_norm(x_TD, weights.final_norm_D, config.norm_eps)


def logits(weights: ModelWeights, hidden_RD, config: ModelConfig, team: Team = ALONE):
    """Float32 logits of the rows given; of a team each device has those of its own words."""
    head_VD = weights.embed_VD if weights.head_VD is None else weights.head_VD
    with jax.named_scope("logits"):
        logits_RV = soft_cap(einsum("RD,VD->RV", hidden_RD, head_VD, jnp.float32), config.final_soft_cap)
    words = logits_RV.shape[1]
    if words * team.tensor.size == config.vocab_size:
        return logits_RV
    word_V = team.tensor.index() * words + jnp.arange(words)
    return jnp.where(word_V < config.vocab_size, logits_RV, -jnp.inf)  # the table was made longer to divide


def distinct_ropes(config: ModelConfig):
    """Each rotary table is computed once a step, not once a layer."""
    return {layer.attention.rope for layer in config.layers if layer.attention.rope is not None}


def block(
    index, layer: Layer, w: LayerWeights, x_TD, live_T, per_layer_TA, ropes, cache, config: ModelConfig, attend, team,
    note,
):  # fmt: skip
    def norm(x, scale):
        return x if scale is None else rms_norm(x, scale, config.norm_eps)

    with jax.named_scope("attention"):
        run: Any = latent_attention if isinstance(layer.attention, LatentAttention) else attention
        rope = ropes.get(layer.attention.rope)
        y_TD, cache = run(
            index, layer.attention, w.attention, norm(x_TD, w.pre_attention_norm_D), rope, cache, config, attend, team
        )
        x_TD = x_TD + norm(y_TD, w.post_attention_norm_D)
    with jax.named_scope("mlp"):
        y_TD, experts_TX = feed_forward(layer, w, x_TD, norm(x_TD, w.pre_mlp_norm_D), live_T, config, team)
        if experts_TX is not None and note is not None:
            cache = note(index, experts_TX, cache)
        x_TD = x_TD + norm(y_TD, w.post_mlp_norm_D)
    if w.per_layer is not None:
        with jax.named_scope("per_layer"):
            activation = ACTIVATIONS[layer.mlp.activation]
            gate_TA = activation(einsum("TD,DA->TA", x_TD, w.per_layer.gate_DA)) * per_layer_TA
            x_TD = x_TD + norm(einsum("TA,AD->TD", gate_TA, w.per_layer.up_AD), w.per_layer.norm_D)
    if w.scale is not None:
        x_TD = x_TD * w.scale.astype(x_TD.dtype)
    return x_TD, cache


def attention(index, a: Attention, w: AttentionWeights, x_TD, rope, cache, config: ModelConfig, attend, team: Team):
    N, K = a.heads, a.kv_heads
    qkv_TGH = project("TD,DGH->TGH", x_TD, w.qkv_DGH, w.qkv_bias_GH)
    q_TNH, k_TKH, v_TKH = qkv_TGH[:, :N], None, None
    q_TNH = head_norm(a, q_TNH, w.q_norm, config.norm_eps, team)
    if rope is not None:
        q_TNH = rotate(q_TNH, rope)
    if a.kv_source is None:
        k_TKH = qkv_TGH[:, N : N + K]
        v_TKH = k_TKH if a.tied_kv else qkv_TGH[:, N + K :]
        k_TKH = head_norm(a, k_TKH, w.k_norm, config.norm_eps, team)
        if rope is not None:
            k_TKH = rotate(k_TKH, rope)
        if a.v_norm:
            v_TKH = rms_norm(v_TKH, None, config.norm_eps)
    out_TNH, cache = attend(
        index, q_TNH, k_TKH, v_TKH, cache,
        scale=a.scale, window=a.window, soft_cap=a.soft_cap, sinks_N=w.sinks_N,
    )  # fmt: skip
    return add_up("TNH,NHD->TD", out_TNH, w.out_NHD, w.out_bias_D, team.tensor), cache


def head_norm(a: Attention, x_TNH, scale, eps: float, team: Team):
    """RMS norm of queries or keys, head by head or across all heads."""
    if a.qk_norm is None:
        return x_TNH
    if a.qk_norm == "head":
        return rms_norm(x_TNH, scale, eps)
    return rms_norm(x_TNH.reshape(x_TNH.shape[0], -1), scale, eps, team.tensor).reshape(x_TNH.shape)


def latent_attention(
    index, a: LatentAttention, w: LatentWeights, x_TD, rope, cache, config: ModelConfig, attend, team: Team
):
    """MLA with the up-projections absorbed: queries meet the latents themselves, as one shared KV head."""
    if w.q_down_DA is None:
        q_TA = x_TD
    else:
        q_TA = rms_norm(project("TD,DA->TA", x_TD, w.q_down_DA, w.q_down_bias_A), w.q_norm_A, a.norm_eps)
    q_TNH = einsum("TA,ANH->TNH", q_TA, w.q_up_ANH)
    kv_TA = project("TD,DA->TA", x_TD, w.kv_down_DA, w.kv_down_bias_A)
    latent_TA = rms_norm(kv_TA[:, : a.kv_rank], w.kv_norm_A, a.norm_eps)
    k_rope_T1H = rotate(kv_TA[:, None, a.kv_rank :], rope)
    q_latent_TNA = einsum("TNH,NAH->TNA", q_TNH[..., : a.nope_dim], w.k_up_NAH)
    q_TNA = jnp.concatenate([q_latent_TNA, rotate(q_TNH[..., a.nope_dim :], rope)], axis=-1)
    k_T1A = jnp.concatenate([latent_TA[:, None], k_rope_T1H], axis=-1)
    out_TNA, cache = attend(index, q_TNA, k_T1A, None, cache, scale=a.scale, value_dim=a.kv_rank)
    out_TNH = einsum("TNA,NHA->TNH", out_TNA, w.v_up_NHA)
    return add_up("TNH,NHD->TD", out_TNH, w.out_NHD, w.out_bias_D, team.tensor), cache


def feed_forward(layer: Layer, w: LayerWeights, residual_TD, x_TD, live_T, config: ModelConfig, team: Team):
    """The dense block and the experts side by side, and who chose which; `residual_TD` is x before its norm."""
    out_TD = 0
    if layer.mlp is not None:
        out_TD = mlp(layer.mlp.activation, w.mlp, x_TD, team)
    if layer.moe is None:
        return out_TD, None
    if not layer.moe.own_norms:
        routed_TD, experts_TX = mix(layer.moe, w.moe, x_TD, x_TD, live_T, team)
        return out_TD + routed_TD, experts_TX
    eps = config.norm_eps
    router_TD = rms_norm(residual_TD, None, eps) * (w.moe.router_scale_D * config.dim**-0.5).astype(x_TD.dtype)
    routed_TD, experts_TX = mix(layer.moe, w.moe, router_TD, rms_norm(residual_TD, w.moe.pre_norm_D, eps), live_T, team)
    out_TD = rms_norm(out_TD, w.moe.mlp_post_norm_D, eps) + rms_norm(routed_TD, w.moe.post_norm_D, eps)
    return out_TD, experts_TX


def mlp(activation: str, w: MlpWeights, x_TD, team: Team):
    return add_up("TF,FD->TD", gated("TD,DGF->TGF", x_TD, w.up_DGF, activation), w.down_FD, None, team.tensor)


def add_up(subscripts: str, x, w, bias, axis: Axis):
    """A product of which each device has the part that its own columns give, and a bias that all have."""
    if axis.size == 1:
        return project(subscripts, x, w, bias)
    out = axis.sum(einsum(subscripts, x, w))
    return out if bias is None else (out.astype(jnp.float32) + bias).astype(out.dtype)


def look_up(table_V, tokens_T, team: Team):
    """Rows of a table of words, of which each device has some."""
    if team.tensor.size == 1:
        return table_V[tokens_T]
    words = rows(table_V)
    at_T = tokens_T - team.tensor.index() * words
    own_T = (at_T >= 0) & (at_T < words)
    found_T = table_V[jnp.where(own_T, at_T, 0)]
    return team.tensor.sum(jnp.where(own_T.reshape(-1, *[1] * (found_T.ndim - 1)), found_T, 0))


def mix(moe: Moe, w: MoeWeights, router_TD, x_TD, live_T, team: Team = ALONE):
    """(what the experts give, which ones): route by `router_TD`, compute on `x_TD`. Padding chooses nobody.

    Of a team that shares the experts, each device computes what its own ones give, and its own columns of them.
    """
    logits_TE = einsum("TD,DE->TE", router_TD.astype(jnp.float32), w.router_DE)
    if w.router_bias_E is not None:
        logits_TE = logits_TE + w.router_bias_E
    groups = (moe.groups, moe.top_groups, moe.group_score)
    weights_TX, experts_TX = experts.route(
        logits_TE, moe.top_k, moe.score, moe.normalize, moe.scaling, groups, w.choice_bias_E
    )
    if w.expert_scale_E is not None:
        weights_TX = weights_TX * w.expert_scale_E[experts_TX]
    own = moe.slots // team.experts.size
    experts_TX = jnp.where(live_T[:, None], experts_TX, moe.experts)

    def expert(e, x_QD):
        up_bias_GF, down_bias_D = (None if bias is None else bias[e] for bias in (w.up_bias_EGF, w.down_bias_ED))
        up_DGF = experts.pick(w.up_EDGF, e)
        if up_bias_GF is None and moe.clamp is None:
            inner_QF = gated("QD,DGF->QGF", x_QD, up_DGF, moe.activation)
        else:
            inner_QF = glu(project("QD,DGF->QGF", x_QD, up_DGF, up_bias_GF), moe.activation, moe.clamp, moe.alpha)
        if down_bias_D is not None and team.tensor.size > 1:  # one of those that have a part of the columns adds it
            down_bias_D = jnp.where(team.tensor.index() == 0, down_bias_D, 0)
        return project("QF,FD->QD", inner_QF, experts.pick(w.down_EFD, e), down_bias_D)

    if team.alike.size < team.experts.size or moe.spare:
        return mix_over(team, x_TD, weights_TX, slots_of(moe, w, experts_TX), own, expert), experts_TX
    here_TX = experts_TX - team.experts.index() * own
    here_TX = jnp.where((here_TX >= 0) & (here_TX < own), here_TX, own)
    return team.sum(experts.mix_experts(x_TD, weights_TX, here_TX, own, expert)), experts_TX


def slots_of(moe: Moe, w: MoeWeights, experts_TX):
    """Where the chosen experts lie; rows take turns with an expert's copies. Which one computes shows in no bit."""
    if w.copies_E is None:
        return experts_TX
    copy_TX = jnp.arange(len(experts_TX))[:, None] % w.copies_E[experts_TX]
    return jnp.where(experts_TX < moe.experts, w.slots_EC[experts_TX, copy_TX], moe.slots)


def per_layer_inputs(weights: ModelWeights, tokens_T, x_TD, config: ModelConfig, team: Team):
    """Gemma 4's second embedding: what the token says to each layer, mixed with a projection of its first one."""
    A = config.per_layer_dim
    context_TLA = einsum("TD,DLA->TLA", x_TD, weights.per_layer_proj_DLA, jnp.float32) * config.dim**-0.5
    context_TLA = rms_norm(context_TLA.astype(x_TD.dtype), weights.per_layer_norm_A, config.norm_eps)
    token_TLA = look_up(weights.per_layer_embed_VLA, tokens_T, team).astype(x_TD.dtype)
    token_TLA = token_TLA * jnp.asarray(A**0.5, x_TD.dtype)
    return (context_TLA + token_TLA) * jnp.asarray(2**-0.5, x_TD.dtype)
