"""Nemotron-H and Nemotron 3: Mamba 2 in most layers, attention without positions, ungated MLPs."""

from functools import partial
from itertools import accumulate
from typing import Any

from ..config import Attention, Layer, Mamba2, Mlp, ModelConfig, ModelError, Moe
from ..weights import LayerWeights
from .common import (
    Keys,
    attention_sources,
    mlp_sources,
    model_config,
    model_sources,
    moe_sources,
    scale,
)
from .granite_hybrid import mamba2_sources

KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
ALIASES = {"mamba": "linear_attention", "attention": "full_attention"}
RENAMED_KEYS = {  # older key -> current key
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
    "attention_head_dim": "head_dim",
}


def config(hf: dict[str, Any], max_len: int | None = None) -> ModelConfig:
    keys = Keys(
        {"n_group": 1, "topk_group": 1}
        | {RENAMED_KEYS.get(key, key): value for key, value in hf.items()}
    )
    context_length = keys.count("max_position_embeddings", 4096)
    bias = keys("attention_bias", False)
    blocks = kinds(keys)
    attention = Attention(**keys.heads(128), rope=None, bias=bias, out_bias=bias)
    mixers = {"full_attention": attention, "linear_attention": mamba2(keys)}
    activation = keys.activation("mlp_hidden_act")
    biases = keys("mlp_bias", False)
    mlp = Mlp(keys.count("intermediate_size", 21504), activation, biases, gated=False)
    moe = shared_mlp = None
    if "moe" in blocks:
        moe = routed_experts(keys, activation)
        shared_mlp = Mlp(
            keys.count("moe_shared_expert_intermediate_size", 7688), activation, biases, gated=False
        )
    feed_forward_by_kind = {"mlp": {"mlp": mlp}, "moe": {"mlp": shared_mlp, "moe": moe}}
    layers: list[Layer] = []
    for number, (kind, following_kind) in enumerate(zip(blocks, [*blocks[1:], ""], strict=True)):
        if kind in mixers:
            layers.append(Layer(mixers[kind], **feed_forward_by_kind.get(following_kind, {})))
        elif not number or blocks[number - 1] not in mixers:
            raise ModelError(
                f"config.json: block {number} of the pattern is {kind} and does not follow "
                "attention or Mamba, which is not supported"
            )
    keys.ignore(
        "rescale_prenorm_residual",
        "num_logits_to_keep",
        "use_mamba_kernels",
        "mamba_ssm_cache_dtype",
    )
    keys.ignore(
        "time_step_max",
        "time_step_floor",
        "time_step_limit",
        "mamba_dt_max",
        "mamba_dt_limit",
        "chunk_size",
    )
    keys.ignore(
        "mamba_dt_init_floor",
        "mamba_chunk_size",
        "moe_shared_expert_overlap",
        "mtp_layers_block_type",
    )
    keys.ignore(
        "mtp_hybrid_override_pattern",
        "num_nextn_predict_layers",
        "num_hidden_layers",
        "mamba_proj_bias",
    )
    keys.ignore(
        "rms_norm_eps",
        "hidden_dropout",
        "moe_intermediate_size",
        "moe_shared_expert_intermediate_size",
    )
    keys.ignore(
        "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group"
    )
    keys.ignore("routed_scaling_factor", "norm_topk_prob")
    keys.refuse("residual_in_fp32", False)
    keys.refuse("sliding_window")
    keys.refuse("moe_latent_size")
    eps = keys.positive("layer_norm_epsilon", 1e-5)
    return model_config(keys, "nemotron_h", tuple(layers), context_length, norm_eps=eps)


def kinds(keys: Keys) -> list[str]:
    """The kind of each block in the checkpoint."""
    pattern = keys("hybrid_override_pattern", None)
    named = keys("layers_block_type", None)
    block_kinds = (
        [KINDS.get(letter, letter) for letter in pattern or ""] if named is None else named
    )
    block_kinds = [ALIASES.get(kind, kind) for kind in block_kinds]
    if not block_kinds or not {*block_kinds} <= {*KINDS.values()}:
        raise ModelError(
            f"config.json: hybrid_override_pattern = {pattern!r}, layers_block_type = {named!r}; "
            f"one of them must name each block: {', '.join(KINDS)}, or {', '.join(KINDS.values())}"
        )
    return block_kinds


def mamba2(keys: Keys) -> Mamba2:
    keys.ignore("expand")  # implied by the heads
    return Mamba2(
        heads=keys.count("mamba_num_heads", 128),
        groups=keys.count("n_groups", 8),
        key_dim=keys.count("ssm_state_size", 128),
        value_dim=keys.count("mamba_head_dim", 64),
        width=keys.count("conv_kernel", 4),
        conv_bias=keys("use_conv_bias", True),
        bias=keys("use_bias", False),
        activation=keys.activation("mamba_hidden_act"),
        least_step=keys.positive("time_step_min", 0.001),
    )


def routed_experts(keys: Keys, activation: str) -> Moe:
    keys.refuse("n_shared_experts", 1)
    return Moe(
        experts=keys.count("n_routed_experts", 8),
        top_k=keys.count("num_experts_per_tok", 2),
        dim=keys.count("moe_intermediate_size", 7688),
        activation=activation,
        score="sigmoid",
        normalize=keys("norm_topk_prob", True),
        scaling=keys.positive("routed_scaling_factor", 1.0),
        groups=keys.count("n_group"),
        top_groups=keys.count("topk_group"),
        group_score="top2",
        router_float32=True,
        choice_bias=True,
        gated=False,
    )


def layer(config: ModelConfig, index: int, prefix: str) -> LayerWeights:
    """The sources of a layer: one block of the checkpoint, or a mixer block and the feed-forward
    block after it.
    """
    layer_config = config.layers[index]
    D = config.dim
    first_block = list(
        accumulate((1 + earlier.feeds_forward for earlier in config.layers[:index]), initial=0)
    )[-1]
    block_prefix, next_prefix = (
        f"{prefix}layers.{number}" for number in (first_block, first_block + 1)
    )
    mixer: Any
    if isinstance(layer_config.attention, Attention):
        mixer = attention_sources(layer_config.attention, D, f"{block_prefix}.mixer")
    else:
        assert isinstance(layer_config.attention, Mamba2)
        mixer = mamba2_sources(layer_config.attention, D, f"{block_prefix}.mixer")
    mlp_prefix = (
        f"{next_prefix}.mixer.shared_experts" if layer_config.moe else f"{next_prefix}.mixer"
    )
    return LayerWeights(
        attention=mixer,
        mlp=layer_config.mlp and mlp_sources(layer_config.mlp, D, mlp_prefix),
        moe=layer_config.moe
        and moe_sources(
            layer_config.moe, D, f"{next_prefix}.mixer", experts=("up_proj", "down_proj")
        ),
        pre_attention_norm_D=scale(f"{block_prefix}.norm.weight", D),
        pre_mlp_norm_D=scale(f"{next_prefix}.norm.weight", D)
        if layer_config.feeds_forward
        else None,
    )


sources = partial(model_sources, layer=layer)


def canonical(name: str) -> str:
    if name.startswith("backbone."):
        name = "model." + name.removeprefix("backbone.")
    return name.replace("model.embeddings.", "model.embed_tokens.").replace(
        "model.norm_f.", "model.norm."
    )


def ignored(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is not loaded: the MTP layers."""
    return name.startswith("mtp.")
