"""Llama 4: chunked attention in three of four layers; a routed and a shared expert per token."""

from dataclasses import replace
from functools import partial

from ..config import Attention, Layer, Mlp, ModelConfig, ModelError, Moe, Temperature
from ..weights import LayerWeights, MoeWeights
from .common import (
    Keys,
    Source,
    SourceTensor,
    effective_window,
    layer_sources,
    mlp_sources,
    model_config,
    model_sources,
    router_source,
    tensor,
)
from .smollm3 import rotated_layers

MISSING = {  # defaults
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "intermediate_size": 8192,
    "attention_chunk_size": 8192,
}


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(MISSING | hf)
    heads = keys.heads(128)
    bias = keys("attention_bias", False)
    L = keys.count("num_hidden_layers")
    is_rotary = rotated_layers(keys, L)
    context_length = keys.count("max_position_embeddings", 131072)
    rope = keys.rope(heads["head_dim"], max_len or context_length, theta=500000.0)
    # A norm without a scale is the same before and after the rotation.
    norm = "plain" if keys("use_qk_norm", True) else None
    rotary = Attention(**heads, rope=rope, bias=bias, out_bias=bias, qk_norm=norm)
    temperature = Temperature(keys("attn_scale", 0.1), float(keys.count("floor_scale", 8192)), 1)
    temperature = temperature if keys("attn_temperature_tuning", True) else None
    without_rope = replace(rotary, rope=None, qk_norm=None, temperature=temperature)
    mlp = keys.mlp(bias=False)
    moe = Moe(
        experts=keys.count("num_local_experts"),
        top_k=keys.count("num_experts_per_tok"),
        dim=mlp.dim,
        activation=mlp.activation,
        score="sigmoid",
        normalize=False,
        weigh_rows=True,
    )
    step = keys.count("interleave_moe_layer_step", 1)
    dense = Mlp(keys.count("intermediate_size_mlp", 16384), mlp.activation)
    sparse_layers = keys("moe_layers", None)
    sparse_layers = range(step - 1, L, step) if sparse_layers is None else sparse_layers
    keys.ignore("for_llm_compressor")
    layers = []
    for index, (is_rotary_layer, chunk) in enumerate(
        zip(is_rotary, chunks(keys, is_rotary, context_length), strict=True)
    ):
        attention = replace(
            rotary if is_rotary_layer else without_rope, window=chunk, chunked=chunk is not None
        )
        layers.append(
            Layer(attention, mlp, moe) if index in sparse_layers else Layer(attention, dense)
        )
    return model_config(
        keys,
        "llama4_text",
        tuple(layers),
        context_length,
        norm_eps=keys.positive("rms_norm_eps", 1e-5),
    )


def chunks(keys: Keys, is_rotary: list[bool], context_length: int) -> list[int | None]:
    """The chunk size of each layer's attention, or None for full attention."""
    size = keys.count("attention_chunk_size", None)
    kinds = keys(
        "layer_types",
        [
            "chunked_attention" if is_rotary_layer and size else "full_attention"
            for is_rotary_layer in is_rotary
        ],
    )
    if len(kinds) != len(is_rotary):
        raise ModelError(
            f"config.json: layer_types has {len(kinds)} entries for {len(is_rotary)} layers"
        )
    if unknown := {*map(str, kinds)} - {"full_attention", "chunked_attention"}:
        raise ModelError(f"config.json: layer type {min(unknown)!r} is not supported")
    if "chunked_attention" in kinds and size is None:
        raise ModelError(
            "config.json: layer_types names chunked_attention, but there is no attention_chunk_size"
        )
    return [
        effective_window(size, context_length) if kind == "chunked_attention" else None
        for kind in kinds
    ]


def layer(config: ModelConfig, index: int, prefix: str) -> LayerWeights:
    layer = config.layers[index]
    D = config.dim
    mlp_prefix = f"{prefix}layers.{index}.feed_forward"
    weights = layer_sources(config, index, prefix, interleaved=True)
    assert layer.mlp is not None  # dense layers have one, sparse layers a shared expert
    if layer.moe is None:
        return weights.replace(mlp=mlp_sources(layer.mlp, D, mlp_prefix))
    E = layer.moe.experts
    F = layer.moe.dim
    stacks = f"{mlp_prefix}.experts"
    up = SourceTensor(f"{stacks}.gate_up_proj", (E, D, 2 * F), lambda x: x.reshape(-1, D, 2, F))
    moe = MoeWeights(
        router_DE=router_source(layer.moe, D, f"{mlp_prefix}.router.weight"),
        up_EDGF=Source((up,)),
        down_EFD=tensor(f"{stacks}.down_proj", (E, F, D)),
    )
    return weights.replace(mlp=mlp_sources(layer.mlp, D, f"{mlp_prefix}.shared_expert"), moe=moe)


sources = partial(model_sources, layer=layer)
