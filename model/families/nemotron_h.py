"""Nemotron-H and Nemotron 3: Mamba 2 in most layers, attention without positions, and blocks without a gate."""

from functools import partial
from itertools import accumulate
from typing import Any

from ..config import Attention, Layer, Mamba2, Mlp, ModelConfig, ModelError, Moe
from ..weights import LayerWeights
from .common import Keys, attention_sources, mlp_sources, model_config, model_sources, moe_sources, scale
from .granite_hybrid import mamba2_sources

KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
ALIASES = {"mamba": "linear_attention", "attention": "full_attention"}
OLD = {  # keys by the names that configs had
    "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_expand": "expand",
    "mamba_dt_min": "time_step_min", "mamba_conv_bias": "use_conv_bias", "attention_head_dim": "head_dim",
}  # fmt: skip


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys({"n_group": 1, "topk_group": 1} | {OLD.get(key, key): value for key, value in hf.items()})
    longest = keys.count("max_position_embeddings", 4096)
    bias, blocks = keys("attention_bias", False), kinds(keys)
    attention = Attention(**keys.heads(128), rope=None, bias=bias, out_bias=bias)
    mixers = {"full_attention": attention, "linear_attention": mamba2(keys)}
    activation, biases = keys.activation("mlp_hidden_act"), keys("mlp_bias", False)
    mlp = Mlp(keys.count("intermediate_size", 21504), activation, biases, gated=False)
    moe = shared = None
    if "moe" in blocks:
        moe = experts(keys, activation)
        shared = Mlp(keys.count("moe_shared_expert_intermediate_size", 7688), activation, biases, gated=False)
    follows = {"mlp": {"mlp": mlp}, "moe": {"mlp": shared, "moe": moe}}
    layers: list[Layer] = []
    for number, (kind, after) in enumerate(zip(blocks, [*blocks[1:], None], strict=True)):
        if kind in mixers:
            layers.append(Layer(mixers[kind], **follows.get(after, {})))
        elif not number or blocks[number - 1] not in mixers:
            raise ModelError(
                f"config.json: block {number} of the pattern is {kind}, and does not follow attention or Mamba: such a "
                "block is not supported"
            )
    keys.ignore("rescale_prenorm_residual", "num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype")
    keys.ignore("time_step_max", "time_step_floor", "time_step_limit", "mamba_dt_max", "mamba_dt_limit", "chunk_size")
    keys.ignore("mamba_dt_init_floor", "mamba_chunk_size", "moe_shared_expert_overlap", "mtp_layers_block_type")
    keys.ignore("mtp_hybrid_override_pattern", "num_nextn_predict_layers", "num_hidden_layers", "mamba_proj_bias")
    keys.ignore("rms_norm_eps", "hidden_dropout", "moe_intermediate_size", "moe_shared_expert_intermediate_size")
    keys.ignore("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group")
    keys.ignore("routed_scaling_factor", "norm_topk_prob")
    keys.refuse("residual_in_fp32", False)
    keys.refuse("sliding_window")
    keys.refuse("moe_latent_size")
    eps = keys.positive("layer_norm_epsilon", 1e-5)
    return model_config(keys, "nemotron_h", tuple(layers), longest, norm_eps=eps)


def kinds(keys: Keys) -> list[str]:
    """What each block of the checkpoint is."""
    pattern, named = keys("hybrid_override_pattern", None), keys("layers_block_type", None)
    found = [KINDS.get(letter, letter) for letter in pattern or ""] if named is None else named
    found = [ALIASES.get(kind, kind) for kind in found]
    if not found or not {*found} <= {*KINDS.values()}:
        raise ModelError(
            f"config.json: hybrid_override_pattern = {pattern!r}, layers_block_type = {named!r}; one of them must name "
            f"each block: {', '.join(KINDS)}, or {', '.join(KINDS.values())}"
        )
    return found


def mamba2(keys: Keys) -> Mamba2:
    keys.ignore("expand")  # the heads say how wide it is
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


def experts(keys: Keys, activation: str) -> Moe:
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
    """A layer is one block of the checkpoint, or two where a feed-forward block follows."""
    this, D = config.layers[index], config.dim
    first = list(accumulate((1 + layer.feeds_forward for layer in config.layers[:index]), initial=0))[-1]
    here, after = (f"{prefix}layers.{number}" for number in (first, first + 1))
    mixer: Any
    if isinstance(this.attention, Attention):
        mixer = attention_sources(this.attention, D, f"{here}.mixer")
    else:
        assert isinstance(this.attention, Mamba2)
        mixer = mamba2_sources(this.attention, D, f"{here}.mixer")
    beside = f"{after}.mixer.shared_experts" if this.moe else f"{after}.mixer"
    return LayerWeights(
        attention=mixer,
        mlp=this.mlp and mlp_sources(this.mlp, D, beside),
        moe=this.moe and moe_sources(this.moe, D, f"{after}.mixer", experts=("up_proj", "down_proj")),
        pre_attention_norm_D=scale(f"{here}.norm.weight", D),
        pre_mlp_norm_D=scale(f"{after}.norm.weight", D) if this.feeds_forward else None,
    )


sources = partial(model_sources, layer=layer)


def canonical(name: str) -> str:
    if name.startswith("backbone."):
        name = "model." + name.removeprefix("backbone.")
    return name.replace("model.embeddings.", "model.embed_tokens.").replace("model.norm_f.", "model.norm.")


def ignored(name: str, config: ModelConfig) -> bool:
    """What predicts further tokens."""
    return name.startswith("mtp.")
