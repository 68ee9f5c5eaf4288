"""Kimi Linear: Kimi Delta Attention in most layers, latent attention in others, and experts."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..config import KimiDelta, LatentAttention, Layer, Mlp, ModelConfig, ModelError, Moe
from ..mixers.kimi_delta import KimiDeltaWeights
from ..weights import LayerWeights
from . import deepseek
from .common import (
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
# Names in the first checkpoints -> names in Transformers.
RENAMED_KEYS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}


def config(hf: dict[str, Any], max_len: int | None = None) -> ModelConfig:
    keys = Keys({RENAMED_KEYS.get(name, name): value for name, value in hf.items()})
    keys.refuse("mla_use_nope", True)
    keys.refuse("moe_router_activation_func", "sigmoid")
    keys.refuse("use_grouped_topk", True)
    keys.refuse("moe_layer_freq", 1)
    keys.ignore("rope_theta", "rope_scaling", "rope_parameters")  # no rotary embedding
    activation = keys.activation("hidden_act")
    L = keys.count("num_hidden_layers", 27)
    attention = latent_attention(keys)
    delta = kimi_delta(keys, activation)
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
    blocks = {
        "dense": (Mlp(keys.count("intermediate_size", 9216), activation), None),
        "sparse": (shared, moe),
    }
    first_sparse = keys("first_k_dense_replace", 1)
    mixers = {"linear_attention": delta, "full_attention": attention}
    layers = tuple(
        Layer(mixers[mixer], *blocks[block])
        for mixer, block in zip(
            layer_kinds(keys, "layer_types", default_mixers(keys, L), L, KINDS),
            layer_kinds(
                keys,
                "mlp_layer_types",
                ["dense" if i < first_sparse else "sparse" for i in range(L)],
                L,
                tuple(blocks),
            ),
            strict=True,
        )
    )
    return model_config(keys, "kimi_linear", layers, keys.count("max_position_embeddings", 1 << 20))


def latent_attention(keys: Keys) -> LatentAttention:
    attention = deepseek.latent_attention(Keys(keys.hf | {"rope_theta": 10000.0}), 1)
    for name in (
        "kv_lora_rank",
        "qk_rope_head_dim",
        "qk_nope_head_dim",
        "v_head_dim",
        "q_lora_rank",
    ):
        keys(name, None)
    keys.ignore(
        "head_dim", "qk_head_dim", "num_key_value_heads", "attention_bias", "num_attention_heads"
    )
    return replace(attention, rope=None, interleaved=False)


def kimi_delta(keys: Keys, activation: str) -> KimiDelta:
    linear_config = Keys(keys("linear_attn_config", None) or {}, "linear_attn_config")
    linear_config.ignore("full_attn_layers", "kda_layers")
    dim = linear_config.count("head_dim", keys.count("linear_head_dim", 128))
    delta = KimiDelta(
        heads=linear_config.count("num_heads", keys.count("linear_num_heads", 32)),
        dim=dim,
        width=linear_config.count(
            "short_conv_kernel_size", keys.count("linear_conv_kernel_dim", 4)
        ),
        rank=dim,
        activation=activation,
    )
    if unknown := linear_config.unknown():
        raise ModelError(
            f"config.json: linear_attn_config has the key {unknown[0]}, which is not supported"
        )
    return delta


def default_mixers(keys: Keys, L: int) -> list[str]:
    """Each layer's kind of mixer without `layer_types`: by the 1-based lists of layers, or latent
    attention in every fourth layer.
    """
    linear_config: Any = keys("linear_attn_config", None) or {}
    full_layers = linear_config.get("full_attn_layers")
    delta_layers = linear_config.get("kda_layers")
    if full_layers is None or delta_layers is None:
        return [KINDS[index > 0 and index % 4 == 0] for index in range(L)]
    if sorted([*full_layers, *delta_layers]) != list(range(1, L + 1)):
        raise ModelError(
            f"config.json: full_attn_layers and kda_layers must name the {L} layers, from 1, "
            "each once"
        )
    return [KINDS[index + 1 in full_layers] for index in range(L)]


def layer_kinds(
    keys: Keys, name: str, default: list[str], L: int, supported: tuple[str, ...]
) -> list[str]:
    layer_kinds = keys(name, None) or default
    if len(layer_kinds) != L or not {*map(str, layer_kinds)} <= {*supported}:
        raise ModelError(
            f"config.json: {name} must have {L} entries, each {' or '.join(supported)}"
        )
    return layer_kinds


def delta_sources(a: KimiDelta, D: int, prefix: str) -> KimiDeltaWeights:
    N = a.heads
    H = a.dim
    R = a.rank
    size = a.size
    projections = []
    offset = 0
    for name, out in (("q", size), ("k", size), ("v", size), ("f_a", R), ("g_a", R), ("b", N)):
        transform = linear((out,), (D,))
        place = np.s_[:, offset : offset + out]
        projections.append(SourceTensor(f"{prefix}.{name}_proj.weight", (out, D), transform, place))
        offset += out
    convolved = tuple(
        SourceTensor(
            f"{prefix}.{name}_conv1d.weight",
            (size, 1, a.width),
            lambda x: x[:, 0],
            np.s_[start : start + size],
        )
        for name, start in zip("qkv", range(0, 3 * size, size), strict=True)
    )
    return KimiDeltaWeights(
        in_DC=Source(tuple(projections)),
        conv_CW=Source(convolved),
        decay_RNH=tensor(f"{prefix}.f_b_proj.weight", (size, R), linear((N, H), (R,))),
        gate_RNH=tensor(f"{prefix}.g_b_proj.weight", (size, R), linear((N, H), (R,))),
        fading_N=tensor(f"{prefix}.A_log", (1, 1, N, 1), lambda x: x.reshape(N)),
        fading_bias_NH=tensor(f"{prefix}.dt_bias", (size,), lambda x: x.reshape(N, H)),
        norm_H=scale(f"{prefix}.o_norm.weight", H),
        out_NHD=tensor(f"{prefix}.o_proj.weight", (D, size), linear((D,), (N, H))),
    )


def layer(config: ModelConfig, index: int, prefix: str) -> LayerWeights:
    layer = config.layers[index]
    D = config.dim
    layer_prefix = f"{prefix}layers.{index}"
    block = f"{layer_prefix}.mlp"
    a = layer.attention
    assert isinstance(a, KimiDelta | LatentAttention)
    return LayerWeights(
        attention=delta_sources(a, D, f"{layer_prefix}.self_attn")
        if isinstance(a, KimiDelta)
        else deepseek.attention_sources(a, D, f"{layer_prefix}.self_attn"),
        mlp=layer.mlp
        and mlp_sources(layer.mlp, D, f"{block}.shared_experts" if layer.moe else block),
        moe=layer.moe and moe_sources(layer.moe, D, block, experts=("w1", "w3", "w2")),
        pre_attention_norm_D=scale(f"{layer_prefix}.input_layernorm.weight", D),
        pre_mlp_norm_D=scale(f"{layer_prefix}.post_attention_layernorm.weight", D),
    )


sources = partial(model_sources, layer=layer)


def canonical(name: str) -> str:
    """A tensor's name as in Transformers; the first checkpoints use `block_sparse_moe`."""
    return name.replace(".block_sparse_moe.", ".mlp.")
