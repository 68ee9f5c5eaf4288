"""Kimi Linear: Kimi Delta Attention in most layers, latent attention without positions in the others, and experts."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..config import KimiDelta, LatentAttention, Layer, Mlp, ModelConfig, ModelError, Moe
from ..mixers.kimi_delta import KimiDeltaWeights
from ..weights import LayerWeights
from . import deepseek
from .common import (
    LLAMA_NORMS,
    Keys,
    Source,
    SourceTensor,
    linear,
    mlp_sources,
    model_config,
    model_sources,
    moe_sources,
    scale,
    tensor,
)

KINDS = ("linear_attention", "full_attention")
# Names of the first files, and what transformers calls the same.
OLDER = {
    "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob", "num_expert_group": "n_group",
    "num_experts": "num_local_experts", "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}  # fmt: skip


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys({OLDER.get(name, name): value for name, value in hf.items()})
    keys.refuse("mla_use_nope", True)
    keys.refuse("moe_router_activation_func", "sigmoid")
    keys.refuse("use_grouped_topk", True)
    keys.refuse("moe_layer_freq", 1)
    keys.ignore("rope_theta", "rope_scaling", "rope_parameters")  # there are no positions
    activation, L = keys.activation("hidden_act"), keys.count("num_hidden_layers", 27)
    attention, delta = latent(keys), kimi_delta(keys, activation)
    moe = Moe(
        experts=keys.count("num_local_experts", 256),
        top_k=keys.count("num_experts_per_tok", 8),
        dim=keys.count("moe_intermediate_size", 1024),
        activation=activation,
        score="sigmoid",
        normalize=keys("norm_topk_prob", True),
        scaling=keys.positive("routed_scaling_factor", 2.446),
        groups=keys.count("n_group", 1),
        top_groups=keys.count("topk_group", 1),
        group_score="top2",
        router_float32=True,
        choice_bias=True,
    )
    shared = Mlp(keys.count("n_shared_experts", 1) * moe.dim, activation)
    blocks = {"dense": (Mlp(keys.count("intermediate_size", 9216), activation), None), "sparse": (shared, moe)}
    first = keys("first_k_dense_replace", 1)
    mixers = {"linear_attention": delta, "full_attention": attention}
    layers = tuple(
        Layer(mixers[mixer], *blocks[block])
        for mixer, block in zip(
            kinds(keys, "layer_types", usual(keys, L), L, KINDS),
            kinds(keys, "mlp_layer_types", ["dense" if i < first else "sparse" for i in range(L)], L, tuple(blocks)),
            strict=True,
        )
    )
    return model_config(keys, "kimi_linear", layers, keys.count("max_position_embeddings", 1 << 20))


def latent(keys: Keys) -> LatentAttention:
    found = deepseek.latent_attention(Keys(keys.hf | {"rope_theta": 10000.0}), 1)
    for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "q_lora_rank"):
        keys(name, None)
    keys.ignore("head_dim", "qk_head_dim", "num_key_value_heads", "attention_bias", "num_attention_heads")
    return replace(found, rope=None, interleaved=False)


def kimi_delta(keys: Keys, activation: str) -> KimiDelta:
    inside = Keys(keys("linear_attn_config", None) or {}, "linear_attn_config")
    inside.ignore("full_attn_layers", "kda_layers")
    dim = inside.count("head_dim", keys.count("linear_head_dim", 128))
    made = KimiDelta(
        heads=inside.count("num_heads", keys.count("linear_num_heads", 32)),
        dim=dim,
        width=inside.count("short_conv_kernel_size", keys.count("linear_conv_kernel_dim", 4)),
        rank=dim,
        activation=activation,
    )
    if unknown := inside.unknown():
        raise ModelError(f"config.json: linear_attn_config has the key {unknown[0]}, which is not supported")
    return made


def usual(keys: Keys, L: int) -> list[str]:
    """Each layer's mixer where there are no `layer_types`: by the numbers from 1 of both kinds, or every fourth."""
    inside: Any = keys("linear_attn_config", None) or {}
    full, delta = inside.get("full_attn_layers"), inside.get("kda_layers")
    if full is None or delta is None:
        return [KINDS[index > 0 and index % 4 == 0] for index in range(L)]
    if sorted([*full, *delta]) != list(range(1, L + 1)):
        raise ModelError(f"config.json: full_attn_layers and kda_layers must name the {L} layers, from 1, each once")
    return [KINDS[index + 1 in full] for index in range(L)]


def kinds(keys: Keys, name: str, default: list[str], L: int, known: tuple[str, ...]) -> list[str]:
    found = keys(name, None) or default
    if len(found) != L or not {*map(str, found)} <= {*known}:
        raise ModelError(f"config.json: {name} must have {L} entries, each {' or '.join(known)}")
    return found


def delta_sources(a: KimiDelta, D: int, prefix: str) -> KimiDeltaWeights:
    N, H, R, size = a.heads, a.dim, a.rank, a.size
    parts, at = [], 0
    for name, out in (("q", size), ("k", size), ("v", size), ("f_a", R), ("g_a", R), ("b", N)):
        turn, place = linear((out,), (D,)), np.s_[:, at : at + out]
        parts.append(SourceTensor(f"{prefix}.{name}_proj.weight", (out, D), turn, place))
        at += out
    convolved = tuple(
        SourceTensor(
            f"{prefix}.{name}_conv1d.weight", (size, 1, a.width), lambda x: x[:, 0], np.s_[start : start + size]
        )
        for name, start in zip("qkv", range(0, 3 * size, size), strict=True)
    )
    return KimiDeltaWeights(
        in_DC=Source(tuple(parts)),
        conv_CW=Source(convolved),
        decay_RNH=tensor(f"{prefix}.f_b_proj.weight", (size, R), linear((N, H), (R,))),
        gate_RNH=tensor(f"{prefix}.g_b_proj.weight", (size, R), linear((N, H), (R,))),
        fading_N=tensor(f"{prefix}.A_log", (1, 1, N, 1), lambda x: x.reshape(N)),
        fading_bias_NH=tensor(f"{prefix}.dt_bias", (size,), lambda x: x.reshape(N, H)),
        norm_H=scale(f"{prefix}.o_norm.weight", H),
        out_NHD=tensor(f"{prefix}.o_proj.weight", (D, size), linear((D,), (N, H))),
    )


def layer(config: ModelConfig, index: int, prefix: str) -> LayerWeights:
    this, D, here = config.layers[index], config.dim, f"{prefix}layers.{index}"
    block = f"{here}.mlp"
    make = delta_sources if isinstance(this.attention, KimiDelta) else deepseek.attention_sources
    return LayerWeights(
        attention=make(this.attention, D, f"{here}.self_attn"),
        mlp=this.mlp and mlp_sources(this.mlp, D, f"{block}.shared_experts" if this.moe else block),
        moe=this.moe and moe_sources(this.moe, D, block, experts=("w1", "w3", "w2")),
        **{field: scale(f"{here}.{name}.weight", D) for field, name in LLAMA_NORMS.items()},
    )


sources = partial(model_sources, layer=layer)


def canonical(name: str) -> str:
    """The makers' files say `block_sparse_moe` where a layer has experts, and transformers' everywhere."""
    return name.replace(".block_sparse_moe.", ".mlp.")
