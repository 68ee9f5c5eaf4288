"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and beside them a dense block behind a gate."""

from dataclasses import replace
from functools import partial

from ..config import Attention, Layer, Mlp, ModelConfig, Moe
from ..weights import LayerWeights
from .common import (
    Keys,
    effective_window,
    layer_types,
    linear,
    model_config,
    model_sources,
    sparse_layer_sources,
    tensor,
)


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(hf)
    context_length = keys.count("max_position_embeddings", 32768)
    heads = keys.heads()
    rope = keys.rope(heads["head_dim"], max_len or context_length)
    full = Attention(**heads, rope=rope, bias=keys("qkv_bias", True))
    uses_window = keys("use_sliding_window", False)
    num_windowed = keys("max_window_layers", 28)
    sliding = replace(
        full,
        window=effective_window(
            keys.count("sliding_window", 4096) if uses_window else None, context_length
        ),
    )
    L = keys.count("num_hidden_layers")
    activation = keys.activation("hidden_act")
    kinds = [
        "sliding_attention" if uses_window and i % 2 == 0 and i < num_windowed else "full_attention"
        for i in range(L)
    ]
    moe = Moe(
        experts=keys.count("num_experts", 60),
        top_k=keys.count("num_experts_per_tok", 4),
        dim=keys.count("moe_intermediate_size", 1408),
        activation=activation,
        normalize=keys("norm_topk_prob", False),
    )
    shared = Mlp(keys.count("shared_expert_intermediate_size", 5632), activation, gate=True)
    dense = keys.mlp()
    step = keys.count("decoder_sparse_step", 1)
    dense_only = keys("mlp_only_layers", [])
    layers = tuple(
        Layer(attention, dense)
        if i in dense_only or (i + 1) % step
        else Layer(attention, shared, moe)
        for i, kind in enumerate(layer_types(keys, L, kinds))
        for attention in (full if kind == "full_attention" else sliding,)
    )
    return model_config(keys, "qwen2_moe", layers, context_length)


def layer(config: ModelConfig, index: int, prefix: str) -> LayerWeights:
    weights = sparse_layer_sources(config, index, prefix, shared="shared_expert")
    D = config.dim
    if config.layers[index].moe is None:
        return weights
    gate = tensor(
        f"{prefix}layers.{index}.mlp.shared_expert_gate.weight", (1, D), linear((1,), (D,))
    )
    return weights.replace(mlp=weights.mlp.replace(gate_D1=gate))


sources = partial(model_sources, layer=layer)
