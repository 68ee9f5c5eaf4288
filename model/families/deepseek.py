"""DeepSeek V2 and V3, Kimi K2: latent attention, dense layers, then shared and routed experts."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ..config import LatentAttention, Layer, Mlp, ModelConfig, ModelError, Moe
from ..mixers.latent import LatentWeights
from ..weights import LayerWeights
from .common import (
    Keys,
    Source,
    deinterleave_rotary,
    linear,
    mlp_sources,
    model_config,
    model_sources,
    moe_sources,
    scale,
    tensor,
)


def config(hf: dict[str, Any], max_len: int | None = None) -> ModelConfig:
    keys = Keys(hf)
    kind = "deepseek_v3" if hf["model_type"] == "kimi_k2" else hf["model_type"]
    context_length = keys.count(
        "max_position_embeddings", {"deepseek_v2": 2048, "deepseek_v3": 4096}[kind]
    )
    attention = latent_attention(keys, max_len or context_length)
    activation = keys.activation("hidden_act")
    dense = Layer(attention, Mlp(keys.count("intermediate_size"), activation))
    moe = {"deepseek_v2": softmax_experts, "deepseek_v3": sigmoid_experts}[kind](keys, activation)
    shared = keys.count("n_shared_experts", None)
    sparse = Layer(attention, Mlp(shared * moe.dim, activation) if shared else None, moe)
    first_sparse = keys("first_k_dense_replace", {"deepseek_v2": 0, "deepseek_v3": 3}[kind])
    moe_period = keys.count("moe_layer_freq", 1)
    layers = tuple(
        dense if i < first_sparse or i % moe_period else sparse
        for i in range(keys.count("num_hidden_layers"))
    )
    keys.refuse("mlp_bias", False)
    return model_config(keys, kind, layers, context_length)


def latent_attention(keys: Keys, max_len: int) -> LatentAttention:
    nope = keys.count("qk_nope_head_dim", 128)
    rotary = keys.count("qk_rope_head_dim", 64)
    keys.ignore("head_dim", "qk_head_dim", "num_key_value_heads")  # implied by other keys
    return LatentAttention(
        heads=keys.count("num_attention_heads"),
        q_rank=keys.count("q_lora_rank", None),
        kv_rank=keys.count("kv_lora_rank", 512),
        nope_dim=nope,
        rope_dim=rotary,
        v_dim=keys.count("v_head_dim", 128),
        scale=(nope + rotary) ** -0.5
        * yarn_score_scale(keys("rope_parameters", None) or keys("rope_scaling", None) or {}),
        rope=keys.rope(rotary, max_len),
        bias=keys("attention_bias", False),
        interleaved=keys("rope_interleave", True),
    )


def yarn_score_scale(rope: dict[str, Any]) -> float:
    """The factor that YaRN applies to the scale of attention scores."""
    mscale = rope.get("mscale_all_dim")
    factor = rope.get("factor") or 1.0
    return (0.1 * mscale * math.log(factor) + 1.0) ** 2 if mscale and factor > 1 else 1.0


def softmax_experts(keys: Keys, activation: str) -> Moe:
    """DeepSeek V2's softmax routing: a group's score is the score of its best expert."""
    method = keys("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(
            f"config.json: topk_method = {method!r}; it can be greedy or group_limited_greedy"
        )
    keys.refuse("scoring_func", "softmax")
    keys.refuse("norm_topk_prob", False)
    groups = keys.count("n_group", 1), keys.count("topk_group", 1)
    groups, top_groups = groups if method == "group_limited_greedy" else (1, 1)
    return Moe(
        **expert_fields(keys, 1.0),
        activation=activation,
        normalize=False,
        groups=groups,
        top_groups=top_groups,
    )


def sigmoid_experts(keys: Keys, activation: str) -> Moe:
    """DeepSeek V3's sigmoid routing: a learned bias affects only the selection; a group's score is
    the sum of its two best experts.
    """
    keys.refuse("topk_method", "noaux_tc")
    keys.refuse("scoring_func", "sigmoid")
    return Moe(
        **expert_fields(keys, 2.5),
        activation=activation,
        score="sigmoid",
        normalize=keys("norm_topk_prob", True),
        groups=keys.count("n_group", 8),
        top_groups=keys.count("topk_group", 4),
        group_score="top2",
        router_float32=True,
        choice_bias=True,
    )


def expert_fields(keys: Keys, scaling: float) -> dict[str, Any]:
    return {
        "experts": keys.count("n_routed_experts"),
        "top_k": keys.count("num_experts_per_tok"),
        "dim": keys.count("moe_intermediate_size"),
        "scaling": keys.positive("routed_scaling_factor", scaling),
    }


def attention_sources(a: LatentAttention, D: int, prefix: str) -> LatentWeights:
    N = a.heads
    A = a.kv_rank
    H = a.nope_dim + a.rope_dim
    KV = a.nope_dim + a.v_dim
    kv_width = a.kv_rank + a.rope_dim
    rank = a.q_rank or D
    q_name = "q_b_proj" if a.q_rank else "q_proj"
    kv_name = "kv_a_proj_with_mqa"

    def split_pairs(x: np.ndarray) -> np.ndarray:
        """Deinterleave the rotary pairs, which are at the end of the last axis."""
        return deinterleave_rotary(x, x.shape[-1] - a.rope_dim, x.shape[-1]) if a.interleaved else x

    def kv_up(transform: Callable[[np.ndarray], np.ndarray]) -> Source:
        return tensor(
            f"{prefix}.kv_b_proj.weight", (N * KV, A), lambda x: transform(x.reshape(N, KV, A))
        )

    def projection(
        name: str, out: tuple[int, ...], into: tuple[int, ...], then=lambda x: x
    ) -> Source:
        shape = (math.prod(out), math.prod(into))
        transform = linear(out, into)
        return tensor(f"{prefix}.{name}.weight", shape, lambda x: then(transform(x)))

    return LatentWeights(
        q_down_DA=projection("q_a_proj", (rank,), (D,)) if a.q_rank else None,
        q_norm_A=scale(f"{prefix}.q_a_layernorm.weight", rank) if a.q_rank else None,
        q_up_ANH=projection(q_name, (N, H), (rank,), split_pairs),
        kv_down_DA=projection(kv_name, (kv_width,), (D,), split_pairs),
        kv_norm_A=scale(f"{prefix}.kv_a_layernorm.weight", A),
        k_up_NAH=kv_up(lambda x_NHA: x_NHA[:, : a.nope_dim].swapaxes(1, 2)),
        v_up_NHA=kv_up(lambda x_NHA: x_NHA[:, a.nope_dim :]),
        out_NHD=projection("o_proj", (D,), (N, a.v_dim)),
        q_down_bias_A=tensor(f"{prefix}.q_a_proj.bias", (rank,)) if a.bias and a.q_rank else None,
        kv_down_bias_A=tensor(f"{prefix}.{kv_name}.bias", (kv_width,), split_pairs)
        if a.bias
        else None,
        out_bias_D=tensor(f"{prefix}.o_proj.bias", (D,)) if a.bias else None,
    )


def layer(config: ModelConfig, index: int, prefix: str) -> LayerWeights:
    layer = config.layers[index]
    D = config.dim
    layer_prefix = f"{prefix}layers.{index}"
    assert isinstance(layer.attention, LatentAttention)
    return LayerWeights(
        attention=attention_sources(layer.attention, D, f"{layer_prefix}.self_attn"),
        mlp=layer.mlp
        and mlp_sources(
            layer.mlp,
            D,
            f"{layer_prefix}.mlp.shared_experts" if layer.moe else f"{layer_prefix}.mlp",
        ),
        moe=layer.moe and moe_sources(layer.moe, D, f"{layer_prefix}.mlp"),
        pre_attention_norm_D=scale(f"{layer_prefix}.input_layernorm.weight", D),
        pre_mlp_norm_D=scale(f"{layer_prefix}.post_attention_layernorm.weight", D),
    )


def ignored(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is not loaded: the MTP layers after the last layer."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return match is not None and int(match[1]) >= len(config.layers)


def sources(config: ModelConfig):
    return model_sources(config, layer=layer)
