"""DeepSeek V2 and V3: latent attention, a few dense layers, then shared and routed experts side by side."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ..config import LatentAttention, Layer, Mlp, ModelConfig, ModelError, Moe
from ..weights import LatentWeights, LayerWeights, MoeWeights
from .common import (
    LLAMA_NORMS,
    Keys,
    Part,
    Source,
    copy,
    decoder,
    expert_sources,
    linear,
    mlp_sources,
    model_sources,
    router_source,
    scale,
)


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys, kind = Keys(hf), hf["model_type"]
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
    keys.quantization("fp8")  # widened at load
    return decoder(keys, kind, layers, longest)


def latent_attention(keys: Keys, max_len: int) -> LatentAttention:
    nope, rotary = keys.count("qk_nope_head_dim", 128), keys.count("qk_rope_head_dim", 64)
    keys.ignore("head_dim", "qk_head_dim", "num_key_value_heads")  # follow from the sizes here
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
    """What a stretched context adds to the scale of the scores."""
    weight, factor = rope.get("mscale_all_dim"), rope.get("factor") or 1.0
    return (0.1 * weight * math.log(factor) + 1.0) ** 2 if weight and factor > 1 else 1.0


def softmax_experts(keys: Keys, activation: str) -> Moe:
    """V2: a group is as good as its best expert."""
    method = keys("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"config.json: topk_method = {method!r}; it can be greedy or group_limited_greedy")
    keys.refuse("scoring_func", "softmax")
    keys.refuse("norm_topk_prob", False)
    groups = keys.count("n_group", 1), keys.count("topk_group", 1)
    groups, top_groups = groups if method == "group_limited_greedy" else (1, 1)
    return Moe(**experts(keys, 1.0), activation=activation, normalize=False, groups=groups, top_groups=top_groups)


def sigmoid_experts(keys: Keys, activation: str) -> Moe:
    """V3: a learned bias steers the choice, and a group is as good as its two best experts."""
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
        choice_bias=True,
    )


def experts(keys: Keys, scaling: float) -> dict[str, Any]:
    return {
        "experts": keys.count("n_routed_experts"),
        "top_k": keys.count("num_experts_per_tok"),
        "dim": keys.count("moe_intermediate_size"),
        "scaling": keys.positive("routed_scaling_factor", scaling),
    }


def part_pairs(a: LatentAttention, x: np.ndarray) -> np.ndarray:
    """The rotary pairs at the end of the last axis, moved from side by side to half the width apart."""
    if not a.interleaved:
        return x
    R = a.rope_dim
    return np.concatenate([x[..., :-R], x[..., -R::2], x[..., 1 - R :: 2]], axis=-1)


def attention_sources(a: LatentAttention, D: int, prefix: str) -> LatentWeights:
    N, A, H, KV, wide = a.heads, a.kv_rank, a.nope_dim + a.rope_dim, a.nope_dim + a.v_dim, a.kv_rank + a.rope_dim
    rank = a.q_rank or D
    q_name, kv_name = "q_b_proj" if a.q_rank else "q_proj", "kv_a_proj_with_mqa"

    def kv_up(turn: Callable[[np.ndarray], np.ndarray]) -> Source:
        return Source((Part(f"{prefix}.kv_b_proj.weight", (N * KV, A), lambda x: turn(x.reshape(N, KV, A))),))

    def turned(name: str, out: tuple[int, ...], into: tuple[int, ...]) -> Source:
        shape, turn = (math.prod(out), math.prod(into)), linear(out, into)
        return Source((Part(f"{prefix}.{name}.weight", shape, lambda x: part_pairs(a, turn(x))),))

    def plain(name: str, out: tuple[int, ...], into: tuple[int, ...]) -> Source:
        return Source((Part(f"{prefix}.{name}.weight", (math.prod(out), math.prod(into)), linear(out, into)),))

    kv_bias = Part(f"{prefix}.{kv_name}.bias", (wide,), lambda x: part_pairs(a, x))
    return LatentWeights(
        q_down_DA=plain("q_a_proj", (rank,), (D,)) if a.q_rank else None,
        q_norm_A=scale(f"{prefix}.q_a_layernorm.weight", rank) if a.q_rank else None,
        q_up_ANH=turned(q_name, (N, H), (rank,)),
        kv_down_DA=turned(kv_name, (wide,), (D,)),
        kv_norm_A=scale(f"{prefix}.kv_a_layernorm.weight", A),
        k_up_NAH=kv_up(lambda x_NHA: x_NHA[:, : a.nope_dim].swapaxes(1, 2)),
        v_up_NHA=kv_up(lambda x_NHA: x_NHA[:, a.nope_dim :]),
        out_NHD=plain("o_proj", (D,), (N, a.v_dim)),
        q_down_bias_A=copy(f"{prefix}.q_a_proj.bias", (rank,)) if a.bias and a.q_rank else None,
        kv_down_bias_A=Source((kv_bias,)) if a.bias else None,
        out_bias_D=copy(f"{prefix}.o_proj.bias", (D,)) if a.bias else None,
    )


def layer(config: ModelConfig, index: int, prefix: str) -> LayerWeights:
    this, D, here = config.layers[index], config.dim, f"{prefix}layers.{index}"
    mlp, moe = this.mlp, None
    if this.moe is not None:
        bias = copy(f"{here}.mlp.gate.e_score_correction_bias", (this.moe.experts,)) if this.moe.choice_bias else None
        moe = MoeWeights(
            router_DE=router_source(this.moe, D, f"{here}.mlp.gate.weight"),
            choice_bias_E=bias,
            **expert_sources(this.moe, D, f"{here}.mlp.experts"),
        )
    return LayerWeights(
        attention=attention_sources(this.attention, D, f"{here}.self_attn"),
        mlp=mlp and mlp_sources(mlp.dim, D, f"{here}.mlp.shared_experts" if moe else f"{here}.mlp"),
        moe=moe,
        **{field: scale(f"{here}.{name}.weight", D) for field, name in LLAMA_NORMS.items()},
    )


def ignored(name: str, config: ModelConfig) -> bool:
    """The layers past the last, which predict a second token."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return found is not None and int(found[1]) >= len(config.layers)


def sources(config: ModelConfig):
    return model_sources(config, layer=layer)
