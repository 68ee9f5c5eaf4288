"""OLMo Hybrid: pre-norm gated DeltaNet in most layers, OLMo 3's post-norm attention in others."""

from functools import partial

import numpy as np

from ..config import Attention, DeltaNet, Layer, ModelConfig
from ..mixers.delta_net import DeltaNetWeights
from ..weights import LayerWeights
from .common import (
    LLAMA_NORMS,
    POST_NORMS,
    Keys,
    Source,
    SourceTensor,
    layer_sources,
    linear,
    model_config,
    model_sources,
    scale,
    tensor,
)
from .qwen3_next import layer_kinds

NAMES = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
}


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(hf)
    context_length = keys.count("max_position_embeddings", 65536)
    heads = keys.heads()
    bias = keys("attention_bias", False)
    rope = keys.rope(heads["head_dim"], max_len or context_length) if has_positions(keys) else None
    attention = Attention(**heads, rope=rope, qk_norm="all", bias=bias, out_bias=bias)
    N = keys.count("linear_num_key_heads", attention.heads)
    key_dim = keys.count("linear_key_head_dim", int(0.75 * keys.count("hidden_size") / N))
    delta = DeltaNet(
        heads=keys.count("linear_num_value_heads", attention.heads),
        key_heads=N,
        key_dim=key_dim,
        value_dim=keys.count("linear_value_head_dim", 2 * key_dim),
        width=keys.count("linear_conv_kernel_dim", 4),
        activation=keys.activation("hidden_act"),
        overshoots=keys("linear_allow_neg_eigval", True),
        norm_eps=1e-5,
    )
    keys.ignore(
        "linear_a_log_min",
        "linear_a_log_max",
        "linear_dt_min",
        "linear_dt_max",
        "linear_dt_init_floor",
    )
    full = Layer(attention, keys.mlp(), pre_norm=False, post_norm=True)
    recurrent = Layer(delta, keys.mlp())
    layers = tuple(full if kind == "full_attention" else recurrent for kind in layer_kinds(keys))
    return model_config(keys, "olmo_hybrid", layers, context_length)


def has_positions(keys: Keys) -> bool:
    """Whether attention has a rotary embedding: not if the base is null."""
    params = keys("rope_parameters", None) or {}
    return params.get("rope_theta", keys.hf.get("rope_theta", 10000.0)) is not None


def layer(config: ModelConfig, index: int, prefix: str) -> LayerWeights:
    norms = LLAMA_NORMS if config.layers[index].pre_norm else POST_NORMS
    return layer_sources(config, index, prefix, norms, state=delta_sources)


def delta_sources(a: DeltaNet, D: int, layer_prefix: str) -> DeltaNetWeights:
    prefix = f"{layer_prefix}.linear_attn"
    keys, values = a.sizes
    sizes = {"q": keys, "k": keys, "v": values, "g": values}
    ends_by_projection = np.cumsum(list(sizes.values())).tolist()
    slices = {
        name: slice(end - size, end)
        for (name, size), end in zip(sizes.items(), ends_by_projection, strict=True)
    }

    def rows(name: str, size: int, at) -> SourceTensor:
        return SourceTensor(f"{prefix}.{name}_proj.weight", (size, D), linear((size,), (D,)), at)

    return DeltaNetWeights(
        in_DC=Source(
            tuple(rows(name, size, np.s_[:, slices[name]]) for name, size in sizes.items())
        ),
        gates_DGN=Source(tuple(rows(name, a.heads, np.s_[:, at]) for at, name in enumerate("ba"))),
        conv_CW=Source(
            tuple(
                SourceTensor(
                    f"{prefix}.{x}_conv1d.weight",
                    (sizes[x], 1, a.width),
                    lambda x: x[:, 0],
                    slices[x],
                )
                for x in "qkv"
            )
        ),
        fading_N=tensor(f"{prefix}.A_log", (a.heads,)),
        fading_bias_N=tensor(f"{prefix}.dt_bias", (a.heads,)),
        norm_H=scale(f"{prefix}.o_norm.weight", a.value_dim),
        out_NHD=tensor(
            f"{prefix}.o_proj.weight", (D, values), linear((D,), (a.heads, a.value_dim))
        ),
    )


sources = partial(model_sources, layer=layer)


def canonical(name: str) -> str:
    for checkpoint_part, common_part in NAMES.items():
        name = name.replace(checkpoint_part, common_part)
    return name
