"""Falcon-H1: attention and Mamba 2 side by side in each layer, with multipliers everywhere."""

from functools import partial

from ..config import Attention, Layer, Mamba2, Mlp, ModelConfig, ModelError, SideBySide
from ..mixers.side_by_side import SideBySideWeights
from .common import Keys, attention_sources, model_config, model_sources
from .granite_hybrid import mamba2_sources

NORMS = {"pre_attention_norm_D": "input_layernorm", "pre_mlp_norm_D": "pre_ff_layernorm"}
NAMES = {".feed_forward.": ".mlp.", "model.final_layernorm.": "model.norm."}


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys({"num_key_value_heads": 8} | hf)
    context_length = keys.count("max_position_embeddings", 8192)
    heads = keys.heads()
    bias = keys("attention_bias", False)
    rope = keys.rope(heads["head_dim"], max_len or context_length)
    # `in_multiplier` scales the input: scores contain it twice and values once.
    in_multiplier, out_multiplier = (
        keys.positive(f"attention_{end}_multiplier", 1.0) for end in ("in", "out")
    )
    heads["scale"] *= in_multiplier * in_multiplier * keys.positive("key_multiplier", 1.0)
    attention = Attention(**heads, rope=rope, bias=bias, out_bias=bias)
    if bias:
        keys.refuse("attention_in_multiplier", 1.0)
        keys.refuse("attention_out_multiplier", 1.0)
    mixer = SideBySide(
        attention,
        mamba2(keys),
        (in_multiplier * out_multiplier, keys.positive("ssm_out_multiplier", 1.0)),
    )
    gate_multiplier, down_multiplier = read_multipliers(keys, "mlp_multipliers", 2)
    mlp = Mlp(
        keys.count("intermediate_size"),
        keys.activation("hidden_act"),
        multipliers=(gate_multiplier, down_multiplier),
    )
    keys.refuse("mlp_bias", False)
    keys.refuse("projectors_bias", False)
    keys.refuse("mamba_use_mlp", True)
    keys.refuse("attn_layer_indices")
    keys.ignore(
        "mlp_expansion_factor",
        "num_logits_to_keep",
        "mamba_chunk_size",
        "layers_block_type",
        "layer_types",
    )
    return model_config(
        keys,
        "falcon_h1",
        (Layer(mixer, mlp),) * keys.count("num_hidden_layers"),
        context_length,
        norm_eps=keys.positive("rms_norm_eps", 1e-5),
        embed_scale=keys.positive("embedding_multiplier", 1.0),
        logit_scale=keys.positive("lm_head_multiplier", 1.0),
    )


def mamba2(keys: Keys) -> Mamba2:
    heads = keys.count("mamba_n_heads", 128)
    inner = keys.count("mamba_d_ssm", keys.count("mamba_expand", 2) * keys.count("hidden_size"))
    size = keys("mamba_d_head", None)
    size = inner // heads if size in (None, "auto") else size
    if size * heads != inner:
        raise ModelError(
            f"config.json: mamba_d_head = {size}; {heads} heads of it must be {inner} numbers"
        )
    normed = keys("mamba_rms_norm", False)
    keys.ignore("mamba_norm_before_gate")
    if normed:
        keys.refuse("mamba_norm_before_gate", False)
    keys.refuse("mamba_proj_bias", False)
    keys.refuse("time_step_limit", [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
    in_multiplier = keys.positive("ssm_in_multiplier", 1.0)
    return Mamba2(
        heads=heads,
        groups=keys.count("mamba_n_groups", 1),
        key_dim=keys.count("mamba_d_state", 256),
        value_dim=size,
        width=keys.count("mamba_d_conv", 4),
        conv_bias=keys("mamba_conv_bias", True),
        activation=keys.activation("hidden_act"),
        normed=normed,
        multipliers=tuple(
            in_multiplier * multiplier
            for multiplier in read_multipliers(keys, "ssm_multipliers", 5)
        ),
    )


def read_multipliers(keys: Keys, name: str, count: int) -> tuple[float, ...]:
    """`count` multipliers from one key."""
    values = keys(name, [1.0] * count)
    if len(values) != count or not all(type(value) in (int, float) for value in values):
        raise ModelError(f"config.json: {name} = {values!r}; it must be {count} numbers")
    return tuple(map(float, values))


def mixer_sources(a: SideBySide, D: int, prefix: str) -> SideBySideWeights:
    return SideBySideWeights(
        attention_sources(a.attention, D, f"{prefix}.self_attn"),
        mamba2_sources(a.mamba, D, f"{prefix}.mamba"),
    )


sources = partial(model_sources, norms=NORMS, state=mixer_sources)


def canonical(name: str) -> str:
    for checkpoint_part, common_part in NAMES.items():
        name = name.replace(checkpoint_part, common_part)
    return name
