"""The decoder: one pure function for every family, driven by `ModelConfig`."""

from typing import Any

import jax
import jax.numpy as jnp

from ..ops import moe as experts
from ..ops.activation import ACTIVATIONS, glu, soft_cap
from ..ops.linear import einsum, gated, project
from ..ops.norm import rms_norm
from ..ops.rope import angles, rotate
from .config import Attention, LatentAttention, Layer, ModelConfig, Moe
from .weights import AttentionWeights, LatentWeights, LayerWeights, MlpWeights, ModelWeights, MoeWeights


def forward(weights: ModelWeights, cache, tokens_T, positions_T, config: ModelConfig, attend):
    """(hidden_TD after the final norm, cache).

    `attend(index, q_TNH, k_TKH, v_TKH, cache, **options) -> (out_TNH, cache)` is the only place where rows
    meet: the serving step passes paged attention, training and the tests pass a dense one. A row at position -1 is
    padding: it begins as zeros and stays zeros, which the products need not multiply.
    """
    dtype = jnp.dtype(config.dtype)
    x_TD = weights.embed_VD[tokens_T].astype(dtype) * jnp.asarray(config.embed_scale, dtype)
    live_T = positions_T >= 0
    x_TD = jnp.where(live_T[:, None], x_TD, 0)
    per_layer_TLA = per_layer_inputs(weights, tokens_T, x_TD, config) if config.per_layer_dim else None
    ropes = {rope: angles(positions_T, rope.inv_freq, rope.factor) for rope in distinct_ropes(config)}
    for index, (layer, w) in enumerate(zip(config.layers, weights.layers, strict=True)):
        with jax.named_scope(f"layer{index}"):
            per_layer_TA = None if per_layer_TLA is None else per_layer_TLA[:, index]
            x_TD, cache = block(index, layer, w, x_TD, live_T, per_layer_TA, ropes, cache, config, attend)
    return rms_norm(x_TD, weights.final_norm_D, config.norm_eps), cache


def logits(weights: ModelWeights, hidden_RD, config: ModelConfig):
    """Float32 logits of the rows given."""
    head_VD = weights.embed_VD if weights.head_VD is None else weights.head_VD
    with jax.named_scope("logits"):
        return soft_cap(einsum("RD,VD->RV", hidden_RD, head_VD, jnp.float32), config.final_soft_cap)


def distinct_ropes(config: ModelConfig):
    """Each rotary table is computed once a step, not once a layer."""
    return {layer.attention.rope for layer in config.layers if layer.attention.rope is not None}


def block(index, layer: Layer, w: LayerWeights, x_TD, live_T, per_layer_TA, ropes, cache, config: ModelConfig, attend):
    def norm(x, scale):
        return x if scale is None else rms_norm(x, scale, config.norm_eps)

    with jax.named_scope("attention"):
        run: Any = latent_attention if isinstance(layer.attention, LatentAttention) else attention
        rope = ropes.get(layer.attention.rope)
        y_TD, cache = run(
            index, layer.attention, w.attention, norm(x_TD, w.pre_attention_norm_D), rope, cache, config, attend
        )
        x_TD = x_TD + norm(y_TD, w.post_attention_norm_D)
    with jax.named_scope("mlp"):
        y_TD = feed_forward(layer, w, x_TD, norm(x_TD, w.pre_mlp_norm_D), live_T, config)
        x_TD = x_TD + norm(y_TD, w.post_mlp_norm_D)
    if w.per_layer is not None:
        with jax.named_scope("per_layer"):
            activation = ACTIVATIONS[layer.mlp.activation]
            gate_TA = activation(einsum("TD,DA->TA", x_TD, w.per_layer.gate_DA)) * per_layer_TA
            x_TD = x_TD + norm(einsum("TA,AD->TD", gate_TA, w.per_layer.up_AD), w.per_layer.norm_D)
    if w.scale is not None:
        x_TD = x_TD * w.scale.astype(x_TD.dtype)
    return x_TD, cache


def attention(index, a: Attention, w: AttentionWeights, x_TD, rope, cache, config: ModelConfig, attend):
    N, K = a.heads, a.kv_heads
    qkv_TGH = project("TD,DGH->TGH", x_TD, w.qkv_DGH, w.qkv_bias_GH)
    q_TNH, k_TKH, v_TKH = qkv_TGH[:, :N], None, None
    q_TNH = head_norm(a, q_TNH, w.q_norm, config.norm_eps)
    if rope is not None:
        q_TNH = rotate(q_TNH, rope)
    if a.kv_source is None:
        k_TKH = qkv_TGH[:, N : N + K]
        v_TKH = k_TKH if a.tied_kv else qkv_TGH[:, N + K :]
        k_TKH = head_norm(a, k_TKH, w.k_norm, config.norm_eps)
        if rope is not None:
            k_TKH = rotate(k_TKH, rope)
        if a.v_norm:
            v_TKH = rms_norm(v_TKH, None, config.norm_eps)
    out_TNH, cache = attend(
        index, q_TNH, k_TKH, v_TKH, cache,
        scale=a.scale, window=a.window, soft_cap=a.soft_cap, sinks_N=w.sinks_N,
    )  # fmt: skip
    return project("TNH,NHD->TD", out_TNH, w.out_NHD, w.out_bias_D), cache


def head_norm(a: Attention, x_TNH, scale, eps: float):
    """RMS norm of queries or keys, head by head or across all heads."""
    if a.qk_norm is None:
        return x_TNH
    if a.qk_norm == "head":
        return rms_norm(x_TNH, scale, eps)
    return rms_norm(x_TNH.reshape(x_TNH.shape[0], -1), scale, eps).reshape(x_TNH.shape)


def latent_attention(index, a: LatentAttention, w: LatentWeights, x_TD, rope, cache, config: ModelConfig, attend):
    """MLA with the up-projections absorbed: queries meet the latents themselves, as one shared KV head."""
    if w.q_down_DA is None:
        q_TA = x_TD
    else:
        q_TA = rms_norm(project("TD,DA->TA", x_TD, w.q_down_DA, w.q_down_bias_A), w.q_norm_A, a.norm_eps)
    q_TNH = einsum("TA,ANH->TNH", q_TA, w.q_up_ANH)
    kv_TA = project("TD,DA->TA", x_TD, w.kv_down_DA, w.kv_down_bias_A)
    latent_TA = rms_norm(kv_TA[:, : a.kv_rank], w.kv_norm_A, a.norm_eps)
    k_rope_T1H = rotate(kv_TA[:, None, a.kv_rank :], rope)
    q_latent_TNA = einsum("TNH,ANH->TNA", q_TNH[..., : a.nope_dim], w.k_up_ANH)
    q_TNA = jnp.concatenate([q_latent_TNA, rotate(q_TNH[..., a.nope_dim :], rope)], axis=-1)
    k_T1A = jnp.concatenate([latent_TA[:, None], k_rope_T1H], axis=-1)
    out_TNA, cache = attend(index, q_TNA, k_T1A, None, cache, scale=a.scale, value_dim=a.kv_rank)
    out_TNH = einsum("TNA,ANH->TNH", out_TNA, w.v_up_ANH)
    return project("TNH,NHD->TD", out_TNH, w.out_NHD, w.out_bias_D), cache


def feed_forward(layer: Layer, w: LayerWeights, residual_TD, x_TD, live_T, config: ModelConfig):
    """The dense block and the experts side by side; `residual_TD` is x before its norm."""
    out_TD = 0
    if layer.mlp is not None:
        out_TD = mlp(layer.mlp.activation, w.mlp, x_TD)
    if layer.moe is None:
        return out_TD
    if not layer.moe.own_norms:
        return out_TD + mix(layer.moe, w.moe, x_TD, x_TD, live_T)
    eps = config.norm_eps
    router_TD = rms_norm(residual_TD, None, eps) * (w.moe.router_scale_D * config.dim**-0.5).astype(x_TD.dtype)
    routed_TD = mix(layer.moe, w.moe, router_TD, rms_norm(residual_TD, w.moe.pre_norm_D, eps), live_T)
    return rms_norm(out_TD, w.moe.mlp_post_norm_D, eps) + rms_norm(routed_TD, w.moe.post_norm_D, eps)


def mlp(activation: str, w: MlpWeights, x_TD):
    return einsum("TF,FD->TD", gated("TD,DGF->TGF", x_TD, w.up_DGF, activation), w.down_FD)


def mix(moe: Moe, w: MoeWeights, router_TD, x_TD, live_T):
    """Route by `router_TD`, compute on `x_TD`; rows that are padding choose nobody."""
    logits_TE = einsum("TD,DE->TE", router_TD.astype(jnp.float32), w.router_DE)
    if w.router_bias_E is not None:
        logits_TE = logits_TE + w.router_bias_E
    groups = (moe.groups, moe.top_groups, moe.group_score)
    weights_TX, experts_TX = experts.route(
        logits_TE, moe.top_k, moe.score, moe.normalize, moe.scaling, groups, w.choice_bias_E
    )
    if w.expert_scale_E is not None:
        weights_TX = weights_TX * w.expert_scale_E[experts_TX]
    experts_TX = jnp.where(live_T[:, None], experts_TX, moe.experts)

    def expert(e, x_QD):
        up_bias_GF, down_bias_D = (None if bias is None else bias[e] for bias in (w.up_bias_EGF, w.down_bias_ED))
        up_QGF = project("QD,DGF->QGF", x_QD, experts.pick(w.up_EDGF, e), up_bias_GF)
        inner_QF = glu(up_QGF, moe.activation, moe.clamp, moe.alpha)
        return project("QF,FD->QD", inner_QF, experts.pick(w.down_EFD, e), down_bias_D)

    return experts.mix_experts(x_TD, weights_TX, experts_TX, moe.experts, expert)


def per_layer_inputs(weights: ModelWeights, tokens_T, x_TD, config: ModelConfig):
    """Gemma 4's second embedding: what the token says to each layer, mixed with a projection of its first one."""
    A = config.per_layer_dim
    context_TLA = einsum("TD,DLA->TLA", x_TD, weights.per_layer_proj_DLA, jnp.float32) * config.dim**-0.5
    context_TLA = rms_norm(context_TLA.astype(x_TD.dtype), weights.per_layer_norm_A, config.norm_eps)
    token_TLA = weights.per_layer_embed_VLA[tokens_T].astype(x_TD.dtype) * jnp.asarray(A**0.5, x_TD.dtype)
    return (context_TLA + token_TLA) * jnp.asarray(2**-0.5, x_TD.dtype)
