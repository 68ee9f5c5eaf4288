"""gpt-oss: attention sinks, a window on every second layer, and four-bit experts."""

from dataclasses import replace
from typing import Any

import jax

from ...ops.quant import format_of, methods
from ..config import Attention, Layer, ModelConfig, ModelError, Moe
from ..weights import LayerWeights, MoeWeights
from .common import (
    Keys,
    Source,
    SourceTensor,
    effective_window,
    layer_sources,
    layer_types,
    model_config,
    model_sources,
    router_source,
    tensor,
)

MISSING = {"num_key_value_heads": 8, "torch_dtype": "bfloat16"}  # defaults
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(MISSING | hf)
    if not keys("rope_parameters", None) and not keys("rope_scaling", None):
        keys = Keys(keys.hf | {"rope_scaling": YARN})
    context_length = keys.count("max_position_embeddings", 131072)
    heads = keys.heads(64)
    bias = keys("attention_bias", True)
    keys.ignore("initial_context_length")  # repeats the rope parameters
    full = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], max_len or context_length, theta=150000.0),
        bias=bias,
        out_bias=bias,
        sinks=True,
    )
    sliding = replace(
        full, window=effective_window(keys.count("sliding_window", 128), context_length)
    )
    moe = Moe(
        experts=keys.count("num_local_experts", keys("num_experts", 128)),
        top_k=keys.count("num_experts_per_tok", keys("experts_per_token", 4)),
        dim=keys.count("intermediate_size"),
        score="softmax_top",
        router_bias=True,
        bias=True,
        clamp=keys.positive("swiglu_limit", 7.0),
        alpha=keys.positive("swiglu_alpha", 1.702),
        quant=keys.quantization(*methods()),
    )
    keys.refuse("hidden_act", "silu")
    keys.refuse("experts_per_token", moe.top_k)
    if moe.quant:
        multiple = format_of(moe.quant)[0].MULTIPLE
        for name in ("hidden_size", "intermediate_size"):
            if keys.count(name) % multiple:
                kind = moe.quant.upper()
                raise ModelError(
                    f"config.json: {name} = {keys(name)}; {kind} weights need a multiple of "
                    f"{multiple}"
                )
    L = keys.count("num_hidden_layers")
    kinds = layer_types(
        keys, L, ["full_attention" if i % 2 else "sliding_attention" for i in range(L)]
    )
    layers = tuple(
        Layer(sliding if kind == "sliding_attention" else full, moe=moe) for kind in kinds
    )
    return model_config(
        keys, "gpt_oss", layers, context_length, norm_eps=keys.positive("rms_norm_eps", 1e-5)
    )


def packed_source(format: str, name: str, E: int, into: int, *out: int) -> Any:
    """The source of stacked experts in a quantised weight format; gate and up rows interleave."""

    def source(stored) -> Source:
        return Source((SourceTensor(name + stored.ending, stored.shape, stored.turn),))

    tensors = format_of(format)[0].tensors(E, into, out)
    return jax.tree.map(source, tensors, is_leaf=lambda node: isinstance(node, tuple))


def layer(config: ModelConfig, index: int, prefix: str) -> LayerWeights:
    moe = config.layers[index].moe
    assert moe is not None
    D = config.dim
    mlp_prefix = f"{prefix}layers.{index}.mlp"
    E = moe.experts
    F = moe.dim
    experts = f"{mlp_prefix}.experts"
    if moe.quant:
        up = packed_source(moe.quant, f"{experts}.gate_up_proj", E, D, 2, F)
        down = packed_source(moe.quant, f"{experts}.down_proj", E, F, D)
    else:
        up_tensor = SourceTensor(
            f"{experts}.gate_up_proj",
            (E, D, 2 * F),
            lambda x: x.reshape(-1, D, F, 2).swapaxes(2, 3),
        )
        up = Source((up_tensor,))
        down = tensor(f"{experts}.down_proj", (E, F, D))
    bias = SourceTensor(
        f"{experts}.gate_up_proj_bias", (E, 2 * F), lambda x: x.reshape(E, F, 2).swapaxes(1, 2)
    )
    return layer_sources(config, index, prefix).replace(
        moe=MoeWeights(
            router_DE=router_source(moe, D, f"{mlp_prefix}.router.weight"),
            up_EDGF=up,
            down_EFD=down,
            router_bias_E=tensor(f"{mlp_prefix}.router.bias", (E,)),
            up_bias_EGF=Source((bias,)),
            down_bias_ED=tensor(f"{experts}.down_proj_bias", (E, D)),
        )
    )


def sources(config: ModelConfig):
    return model_sources(config, layer=layer)
