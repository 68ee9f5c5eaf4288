"""Qwen3-Next: gated DeltaNet in most layers, gated attention in others, and experts."""

from functools import partial

import numpy as np

from ..config import Attention, DeltaNet, Layer, Mlp, ModelConfig, ModelError, Moe
from ..mixers.delta_net import DeltaNetWeights
from ..weights import LayerWeights
from .common import (
    Keys,
    Source,
    SourceTensor,
    linear,
    model_config,
    model_sources,
    scale,
    sparse_layer_sources,
    tensor,
)

KINDS = {"linear_attention", "full_attention"}


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys({"partial_rotary_factor": 0.25} | hf)
    attention, delta = mixers(keys, max_len)
    activation = keys.activation("hidden_act")
    dense_only = keys("mlp_only_layers", [])
    moe = Moe(
        experts=keys.count("num_experts", 512),
        top_k=keys.count("num_experts_per_tok", 10),
        dim=keys.count("moe_intermediate_size", 512),
        activation=activation,
        normalize=keys("norm_topk_prob", True),
    )
    shared = Mlp(keys.count("shared_expert_intermediate_size", 512), activation, gate=True)
    dense = Mlp(keys.count("intermediate_size", 5632), activation)
    step = keys.count("decoder_sparse_step", 1)
    layers = tuple(
        Layer(mixer, dense)
        if index in dense_only or (index + 1) % step
        else Layer(mixer, shared, moe)
        for index, mixer in enumerate(
            attention if kind == "full_attention" else delta for kind in layer_kinds(keys)
        )
    )
    return model_config(keys, "qwen3_next", layers, keys.count("max_position_embeddings", 32768))


def mixers(keys: Keys, max_len: int | None) -> tuple[Attention, DeltaNet]:
    """(attention, DeltaNet): the mixers of the two kinds of layers."""
    context_length = keys.count("max_position_embeddings", 32768)
    heads = keys.heads(256)
    bias = keys("attention_bias", False)
    attention = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], max_len or context_length),
        qk_norm="head",
        bias=bias,
        out_bias=bias,
        out_gate=True,
    )
    delta = DeltaNet(
        heads=keys.count("linear_num_value_heads", 32),
        key_heads=keys.count("linear_num_key_heads", 16),
        key_dim=keys.count("linear_key_head_dim", 128),
        value_dim=keys.count("linear_value_head_dim", 128),
        width=keys.count("linear_conv_kernel_dim", 4),
        activation=keys.activation("hidden_act"),
    )
    return attention, delta


def layer_kinds(keys: Keys) -> list[str]:
    """Each layer's kind; by default every fourth layer has full attention."""
    count = keys.count("num_hidden_layers")
    attention_period = keys.count("full_attention_interval", 4)
    default_kinds = [
        "linear_attention" if (index + 1) % attention_period else "full_attention"
        for index in range(count)
    ]
    layer_kinds = keys("layer_types", None) or default_kinds
    if len(layer_kinds) != count or not set(layer_kinds) <= KINDS:
        raise ModelError(
            f"config.json: layer_types = {layer_kinds!r}; it must name {' or '.join(KINDS)} for "
            f"{count} layers"
        )
    return layer_kinds


def delta_sources(a: DeltaNet, D: int, layer_prefix: str) -> DeltaNetWeights:
    """The sources of DeltaNet with fused projections, whose rows are grouped by key head."""
    prefix = f"{layer_prefix}.linear_attn"
    K = a.key_heads
    value_heads_per_key = a.heads // a.key_heads
    keys, values = a.sizes

    def reorder_qkvz(x: np.ndarray) -> np.ndarray:
        by_key_head = x.reshape(K, -1, *x.shape[1:])
        boundaries = np.cumsum([a.key_dim, a.key_dim, value_heads_per_key * a.value_dim])
        return np.concatenate(
            [piece.reshape(-1, *x.shape[1:]) for piece in np.split(by_key_head, boundaries, axis=1)]
        ).T

    def reorder_gates(x: np.ndarray) -> np.ndarray:
        return x.reshape(K, 2, value_heads_per_key, D).transpose(3, 1, 0, 2).reshape(D, 2, a.heads)

    return common_sources(
        a,
        D,
        prefix,
        in_DC=tensor(f"{prefix}.in_proj_qkvz.weight", (2 * keys + 2 * values, D), reorder_qkvz),
        gates_DGN=tensor(f"{prefix}.in_proj_ba.weight", (2 * a.heads, D), reorder_gates),
    )


def separate_sources(a: DeltaNet, D: int, layer_prefix: str) -> DeltaNetWeights:
    """The sources of DeltaNet with separate projections, as in Qwen3.5."""
    prefix = f"{layer_prefix}.linear_attn"
    keys, values = a.sizes
    qkv_width = 2 * keys + values
    projections = (("qkv", qkv_width, np.s_[:, :qkv_width]), ("z", values, np.s_[:, qkv_width:]))
    return common_sources(
        a,
        D,
        prefix,
        in_DC=Source(
            tuple(
                SourceTensor(f"{prefix}.in_proj_{name}.weight", (n, D), linear((n,), (D,)), at)
                for name, n, at in projections
            )
        ),
        gates_DGN=Source(
            tuple(
                SourceTensor(
                    f"{prefix}.in_proj_{name}.weight",
                    (a.heads, D),
                    linear((a.heads,), (D,)),
                    np.s_[:, at],
                )
                for at, name in enumerate("ba")
            )
        ),
    )


def common_sources(a: DeltaNet, D: int, prefix: str, **projections: Source) -> DeltaNetWeights:
    channels = 2 * a.sizes[0] + a.sizes[1]
    return DeltaNetWeights(
        conv_CW=tensor(f"{prefix}.conv1d.weight", (channels, 1, a.width), lambda x: x[:, 0]),
        fading_N=tensor(f"{prefix}.A_log", (a.heads,)),
        fading_bias_N=tensor(f"{prefix}.dt_bias", (a.heads,)),
        norm_H=scale(f"{prefix}.norm.weight", a.value_dim),
        out_NHD=tensor(
            f"{prefix}.out_proj.weight", (D, a.sizes[1]), linear((D,), (a.heads, a.value_dim))
        ),
        **projections,
    )


def layer(
    config: ModelConfig, index: int, prefix: str, delta=delta_sources, norm_offset: float = 1.0
) -> LayerWeights:
    weights = sparse_layer_sources(
        config, index, prefix, "shared_expert", norm_offset=norm_offset, state=delta
    )
    if not (block := config.layers[index].mlp) or not block.gate:
        return weights
    gate = f"{prefix}layers.{index}.mlp.shared_expert_gate.weight"
    return weights.replace(
        mlp=weights.mlp.replace(gate_D1=tensor(gate, (1, config.dim), linear((1,), (config.dim,))))
    )


sources = partial(model_sources, layer=layer, norm_offset=1.0)


def ignored(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is not loaded: the MTP layer."""
    return name.startswith("mtp.")
