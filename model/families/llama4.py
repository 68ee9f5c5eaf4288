"""Llama 4: three layers of four see their own chunk of the context; one expert a token, and a dense block beside it."""

from dataclasses import replace
from functools import partial

from ..config import Attention, Layer, Mlp, ModelConfig, ModelError, Moe, Temperature
from ..weights import LayerWeights, MoeWeights
from .common import (
    Keys,
    Source,
    SourceTensor,
    layer_sources,
    mlp_sources,
    model_config,
    model_sources,
    narrower,
    router_source,
    tensor,
)
from .smollm3 import rotated_layers

MISSING = {  # what a config.json without these keys means
    "num_key_value_heads": 8, "num_local_experts": 16, "num_experts_per_tok": 1, "intermediate_size": 8192,
    "attention_chunk_size": 8192,
}  # fmt: skip


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(MISSING | hf)
    heads, bias, L = keys.heads(128), keys("attention_bias", False), keys.count("num_hidden_layers")
    turned = rotated_layers(keys, L)
    longest = keys.count("max_position_embeddings", 131072)
    rope = keys.rope(heads["head_dim"], max_len or longest, theta=500000.0)
    # A norm without a scale is the same before and after the rotation.
    norm = "plain" if keys("use_qk_norm", True) else None
    turning = Attention(**heads, rope=rope, bias=bias, out_bias=bias, qk_norm=norm)
    grows = Temperature(keys("attn_scale", 0.1), float(keys.count("floor_scale", 8192)), 1)
    grows = grows if keys("attn_temperature_tuning", True) else None
    still = replace(turning, rope=None, qk_norm=None, temperature=grows)
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
    dense, sparse = Mlp(keys.count("intermediate_size_mlp", 16384), mlp.activation), keys("moe_layers", None)
    sparse = range(step - 1, L, step) if sparse is None else sparse
    keys.ignore("for_llm_compressor")
    layers = []
    for index, (turns, chunk) in enumerate(zip(turned, chunks(keys, turned, longest), strict=True)):
        attention = replace(turning if turns else still, window=chunk, chunked=chunk is not None)
        layers.append(Layer(attention, mlp, moe) if index in sparse else Layer(attention, dense))
    return model_config(keys, "llama4_text", tuple(layers), longest, norm_eps=keys.positive("rms_norm_eps", 1e-5))


def chunks(keys: Keys, turned: list[bool], longest: int) -> list[int | None]:
    """The size of the chunks that each layer sees, or None where it sees everything."""
    size = keys.count("attention_chunk_size", None)
    kinds = keys("layer_types", ["chunked_attention" if turns and size else "full_attention" for turns in turned])
    if len(kinds) != len(turned):
        raise ModelError(f"config.json: layer_types has {len(kinds)} entries for {len(turned)} layers")
    if unknown := {*map(str, kinds)} - {"full_attention", "chunked_attention"}:
        raise ModelError(f"config.json: layer type {min(unknown)!r} is not supported")
    if "chunked_attention" in kinds and size is None:
        raise ModelError("config.json: layer_types names chunked_attention, but there is no attention_chunk_size")
    return [narrower(size, longest) if kind == "chunked_attention" else None for kind in kinds]


def layer(config: ModelConfig, index: int, prefix: str) -> LayerWeights:
    this, D, here = config.layers[index], config.dim, f"{prefix}layers.{index}.feed_forward"
    weights = layer_sources(config, index, prefix, interleaved=True)
    if this.moe is None:
        return weights.replace(mlp=mlp_sources(this.mlp, D, here))
    E, F, stacks = this.moe.experts, this.moe.dim, f"{here}.experts"
    up = SourceTensor(f"{stacks}.gate_up_proj", (E, D, 2 * F), lambda x: x.reshape(-1, D, 2, F))
    moe = MoeWeights(
        router_DE=router_source(this.moe, D, f"{here}.router.weight"),
        up_EDGF=Source((up,)),
        down_EFD=tensor(f"{stacks}.down_proj", (E, F, D)),
    )
    return weights.replace(mlp=mlp_sources(this.mlp, D, f"{here}.shared_expert"), moe=moe)


sources = partial(model_sources, layer=layer)
