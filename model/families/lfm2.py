"""LFM2: short convolutions in most layers, attention in the others."""

from functools import partial
from typing import Any

from ..config import Attention, Layer, Mixer, Mlp, ModelConfig, ModelError, ShortConv
from ..mixers.short_conv import ShortConvWeights
from ..weights import LayerWeights
from .common import Keys, layer_sources, linear, model_config, model_sources, moe_sources, tensor

NORMS = {"pre_attention_norm_D": "operator_norm", "pre_mlp_norm_D": "ffn_norm"}
NAMES = {  # substring in the checkpoint -> common substring
    ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".q_layernorm.": ".q_norm.",
    ".k_layernorm.": ".k_norm.",
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
    ".feed_forward.": ".mlp.",
    "model.embedding_norm.": "model.norm.",
}


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys({"rope_theta": 1000000.0, "num_key_value_heads": 8} | hf)
    context_length = keys.count("max_position_embeddings", 128000)
    keys.ignore(
        "conv_dim", "conv_dim_out", "conv_use_xavier_init", "block_dim", "block_mlp_init_scale"
    )
    keys.ignore(
        "block_out_init_scale",
        "block_use_swiglu",
        "block_use_xavier_init",
        "block_norm_eps",
        "use_pos_enc",
    )
    keys.ignore("num_heads", "theta", "intermediate_size")
    mlp = Mlp(mlp_width(keys))
    layers = tuple(Layer(mixer, mlp) for mixer in mixers(keys, max_len or context_length))
    return model_config(keys, "lfm2", layers, context_length, **shared_fields(keys))


def mixers(keys: Keys, max_len: int) -> list[Mixer]:
    """The mixer of each layer."""
    heads = keys.heads()
    D = keys.count("hidden_size")
    L = keys.count("num_hidden_layers")
    attention = Attention(**heads, rope=keys.rope(heads["head_dim"], max_len), qk_norm="head")
    conv = ShortConv(D, keys.count("conv_L_cache", 3), keys("conv_bias", False))
    with_attention = keys("full_attn_idxs", list(range(L)))
    default_kinds = ["full_attention" if index in with_attention else "conv" for index in range(L)]
    kinds = keys("layer_types", None) or default_kinds
    if len(kinds) != L or not set(kinds) <= {"conv", "full_attention"}:
        raise ModelError(
            f"config.json: layer_types = {kinds!r}; it must name conv or full_attention for "
            f"{L} layers"
        )
    return [attention if kind == "full_attention" else conv for kind in kinds]


def shared_fields(keys: Keys) -> dict[str, Any]:
    """The fields of `ModelConfig` that dense and MoE models share."""
    tied = keys("tie_embedding", keys("tie_word_embeddings", True))
    return {"norm_eps": keys.positive("norm_eps", 1e-5), "tied": tied}


def mlp_width(keys: Keys) -> int:
    """The MLP's width: two thirds of the stated width, rounded up, unless the adjustment is off."""
    dim = keys.count("block_ff_dim", keys.count("intermediate_size", 12288))
    factor = keys.positive("block_ffn_dim_multiplier", 1.0)
    multiple = keys.count("block_multiple_of", 256)
    if not keys("block_auto_adjust_ff_dim", True):
        return dim
    return -(-int(factor * int(2 * dim / 3)) // multiple) * multiple


def layer(config: ModelConfig, index: int, prefix: str) -> LayerWeights:
    weights = layer_sources(config, index, prefix, NORMS, state=conv_sources)
    if (moe := config.layers[index].moe) is None:
        return weights
    names = {"choice_bias": "expert_bias", "experts": ("w1", "w3", "w2")}
    return weights.replace(moe=moe_sources(moe, config.dim, f"{prefix}layers.{index}.mlp", **names))


def conv_sources(a: ShortConv, D: int, prefix: str) -> ShortConvWeights:
    C = a.channels
    return ShortConvWeights(
        in_DC=tensor(f"{prefix}.conv.in_proj.weight", (3 * C, D), linear((3 * C,), (D,))),
        conv_CW=tensor(f"{prefix}.conv.conv.weight", (C, 1, a.width), lambda x: x[:, 0]),
        out_CD=tensor(f"{prefix}.conv.out_proj.weight", (D, C), linear((D,), (C,))),
        in_bias_C=tensor(f"{prefix}.conv.in_proj.bias", (3 * C,)) if a.bias else None,
        conv_bias_C=tensor(f"{prefix}.conv.conv.bias", (C,)) if a.bias else None,
        out_bias_D=tensor(f"{prefix}.conv.out_proj.bias", (D,)) if a.bias else None,
    )


sources = partial(model_sources, layer=layer)


def canonical(name: str) -> str:
    for checkpoint_part, common_part in NAMES.items():
        name = name.replace(checkpoint_part, common_part)
    return name
