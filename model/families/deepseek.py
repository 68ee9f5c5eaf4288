"""DeepSeek V2 and V3, Kimi K2: latent attention, a few dense layers, then shared and routed experts side by side."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ..config import LatentAttention, Layer, Mlp, ModelConfig, ModelError, Moe
from ..mixers.latent import LatentWeights
from ..weights import LayerWeights
from .common import (
    LLAMA_NORMS,
    Keys,
    Source,
    linear,
    mlp_sources,
    model_config,
    model_sources,
    moe_sources,
    part_pairs,
    scale,
    tensor,
)


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys, kind = Keys(hf), {"kimi_k2": "deepseek_v3"}.get(hf["model_type"], hf["model_type"])
    longest = keys.count("max_position_embeddings", {"deepseek_v2": 2048, "deepseek_v3": 4096}[kind])
    attention, activation = latent_attention(keys, max_len or longest), keys.activation("hidden_act")
    dense = Layer(attention, Mlp(keys.count("intermediate_size"), activation))
    moe = {"deepseek_v2": softmax_experts, "deepseek_v3": sigmoid_experts}[kind](keys, activation)
    shared = keys.count("n_shared_experts", None)
    sparse = Layer(attention, Mlp(shared * moe.dim, activation) if shared else None, moe)
    first, every = (
        keys("first_k_dense_replace", {"deepseek_v2": 0, "deepseek_v3": 3}[kind]),
        keys.count("moe_layer_freq", 1),
    )
    layers = tuple(dense if i < first or i % every else sparse for i in range(keys.count("num_hidden_layers")))
    keys.refuse("mlp_bias", False)
    return model_config(keys, kind, layers, longest)


def latent_attention(keys: Keys, max_len: int) -> LatentAttention:
    nope, rotary = keys.count("qk_nope_head_dim", 128), keys.count("qk_rope_head_dim", 64)
    keys.ignore("head_dim", "qk_head_dim", "num_key_value_heads")  # these follow from other keys
    return LatentAttention(
        heads=keys.count("num_attention_heads"),
        q_rank=keys.count("q_lora_rank", None),
        kv_rank=keys.count("kv_lora_rank", 512),
        nope_dim=nope,
        rope_dim=rotary,
        v_dim=keys.count("v_head_dim", 128),
        scale=(nope + rotary) ** -0.5 * sharpness(keys("rope_parameters", None) or keys("rope_scaling", None) or {}),
        rope=keys.rope(rotary, max_len),
        bias=keys("attention_bias", False),
        interleaved=keys("rope_interleave", True),
    )


def sharpness(rope: dict[str, Any]) -> float:
    """What yarn's stretched context multiplies the scores' scale by."""
    weight, factor = rope.get("mscale_all_dim"), rope.get("factor") or 1.0
    return (0.1 * weight * math.log(factor) + 1.0) ** 2 if weight and factor > 1 else 1.0


def softmax_experts(keys: Keys, activation: str) -> Moe:
    """V2: a group's score is that of its best expert."""
    method = keys("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"config.json: topk_method = {method!r}; it can be greedy or group_limited_greedy")
    keys.refuse("scoring_func", "softmax")
    keys.refuse("norm_topk_prob", False)
    groups = keys.count("n_group", 1), keys.count("topk_group", 1)
    groups, top_groups = groups if method == "group_limited_greedy" else (1, 1)
    return Moe(**experts(keys, 1.0), activation=activation, normalize=False, groups=groups, top_groups=top_groups)


def sigmoid_experts(keys: Keys, activation: str) -> Moe:
    """V3: a learned bias is added for the choice; a group's score is the sum of its two best experts'."""
    keys.refuse("topk_method", "noaux_tc")
    keys.refuse("scoring_func", "sigmoid")
    return Moe(
        **experts(keys, 2.5),
        activation=activation,
        score="sigmoid",
        normalize=keys("norm_topk_prob", True),
        groups=keys.count("n_group", 8),
        top_groups=keys.count("topk_group", 4),
        group_score="top2",
        router_float32=True,
        choice_bias=True,
    )


def experts(keys: Keys, scaling: float) -> dict[str, Any]:
    return {
        "experts": keys.count("n_routed_experts"),
        "top_k": keys.count("num_experts_per_tok"),
        "dim": keys.count("moe_intermediate_size"),
        "scaling": keys.positive("routed_scaling_factor", scaling),
    }


def attention_sources(a: LatentAttention, D: int, prefix: str) -> LatentWeights:
    N, A, H, KV, wide = a.heads, a.kv_rank, a.nope_dim + a.rope_dim, a.nope_dim + a.v_dim, a.kv_rank + a.rope_dim
    rank = a.q_rank or D
    q_name, kv_name = "q_b_proj" if a.q_rank else "q_proj", "kv_a_proj_with_mqa"

    def rotary(x: np.ndarray) -> np.ndarray:
        """With the rotary pairs, which are at the end of the last axis, parted."""
        return part_pairs(x, x.shape[-1] - a.rope_dim, x.shape[-1]) if a.interleaved else x

    def kv_up(turn: Callable[[np.ndarray], np.ndarray]) -> Source:
        return tensor(f"{prefix}.kv_b_proj.weight", (N * KV, A), lambda x: turn(x.reshape(N, KV, A)))

    def product(name: str, out: tuple[int, ...], into: tuple[int, ...], then=lambda x: x) -> Source:
        shape, turn = (math.prod(out), math.prod(into)), linear(out, into)
        return tensor(f"{prefix}.{name}.weight", shape, lambda x: then(turn(x)))

    return LatentWeights(
        q_down_DA=product("q_a_proj", (rank,), (D,)) if a.q_rank else None,
        q_norm_A=scale(f"{prefix}.q_a_layernorm.weight", rank) if a.q_rank else None,
        q_up_ANH=product(q_name, (N, H), (rank,), rotary),
        kv_down_DA=product(kv_name, (wide,), (D,), rotary),
        kv_norm_A=scale(f"{prefix}.kv_a_layernorm.weight", A),
        k_up_NAH=kv_up(lambda x_NHA: x_NHA[:, : a.nope_dim].swapaxes(1, 2)),
        v_up_NHA=kv_up(lambda x_NHA: x_NHA[:, a.nope_dim :]),
        out_NHD=product("o_proj", (D,), (N, a.v_dim)),
        q_down_bias_A=tensor(f"{prefix}.q_a_proj.bias", (rank,)) if a.bias and a.q_rank else None,
        kv_down_bias_A=tensor(f"{prefix}.{kv_name}.bias", (wide,), rotary) if a.bias else None,
        out_bias_D=tensor(f"{prefix}.o_proj.bias", (D,)) if a.bias else None,
    )


def layer(config: ModelConfig, index: int, prefix: str) -> LayerWeights:
    this, D, here = config.layers[index], config.dim, f"{prefix}layers.{index}"
    return LayerWeights(
        attention=attention_sources(this.attention, D, f"{here}.self_attn"),
        mlp=this.mlp and mlp_sources(this.mlp, D, f"{here}.mlp.shared_experts" if this.moe else f"{here}.mlp"),
        moe=this.moe and moe_sources(this.moe, D, f"{here}.mlp"),
        **{field: scale(f"{here}.{name}.weight", D) for field, name in LLAMA_NORMS.items()},
    )


def ignored(name: str, config: ModelConfig) -> bool:
    """The layers past the last, which predict further tokens."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return found is not None and int(found[1]) >= len(config.layers)


def sources(config: ModelConfig):
    return model_sources(config, layer=layer)
