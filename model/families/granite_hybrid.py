"""Granite 4: Mamba 2 in most layers, attention without positions in others, optional experts."""

from functools import partial

from ..config import Attention, Layer, Mamba2, Mlp, ModelConfig, ModelError, Moe
from ..mixers.mamba2 import Mamba2Weights
from ..weights import LayerWeights
from .common import (
    Keys,
    layer_sources,
    linear,
    model_config,
    model_sources,
    moe_sources,
    scale,
    tensor,
)
from .granite import multipliers

NAMES = {  # substring in the checkpoint -> common substring
    "shared_mlp.input_linear.": "mlp.gate_up_proj.", "shared_mlp.output_linear.": "mlp.down_proj.",
    "block_sparse_moe.input_linear.weight": "moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "moe.experts.down_proj",
    "block_sparse_moe.router.layer.": "moe.gate.", "block_sparse_moe.gate.": "moe.gate.",
    "block_sparse_moe.experts.": "moe.experts.",
}  # fmt: skip
KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(hf)
    context_length = keys.count("max_position_embeddings", 2048)
    heads = keys.heads()
    heads["scale"] = keys.positive("attention_multiplier", 1.0)
    bias = keys("attention_bias", False)
    rope = keys.rope(heads["head_dim"], max_len or context_length)
    kind = keys("position_embedding_type", None)
    if kind not in (None, "nope", "rope"):
        raise ModelError(
            f"config.json: position_embedding_type = {kind!r}; it must be nope or rope"
        )
    attention = Attention(**heads, rope=rope if kind == "rope" else None, bias=bias, out_bias=bias)
    mamba = mamba2(keys)
    L = keys.count("num_hidden_layers")
    activation = keys.activation("hidden_act")
    kinds = keys("layer_types", None) or keys("layers_block_type", ["mamba"] * L)
    if len(kinds) != L or not set(kinds) <= KINDS.keys():
        raise ModelError(
            f"config.json: layer_types = {kinds!r}; it must name mamba or attention for {L} layers"
        )
    experts = keys("num_local_experts", 8)
    dim = keys.count("intermediate_size", 11008)
    moe = None
    top_k = keys("num_experts_per_tok", 2)
    if experts:
        moe = Moe(experts=experts, top_k=top_k, dim=dim, activation=activation, score="softmax_top")
    mlp = Mlp(keys.count("shared_intermediate_size", 1024), activation)
    layers = tuple(
        Layer(mamba if KINDS[kind] == "mamba" else attention, mlp, moe) for kind in kinds
    )
    return model_config(
        keys,
        "granitemoehybrid",
        layers,
        context_length,
        **multipliers(keys),
    )


def mamba2(keys: Keys) -> Mamba2:
    """`mamba_chunk_size` is ignored: it selects another algorithm for the same result."""
    heads = keys.count("mamba_n_heads", 128)
    inner = keys.count("mamba_expand", 2) * keys.count("hidden_size")
    size = keys("mamba_d_head", None)
    size = inner // heads if size in (None, "auto") else size
    if size * heads != inner:
        raise ModelError(
            f"config.json: mamba_d_head = {size}; {heads} heads of it must be {inner} numbers"
        )
    keys.ignore("mamba_chunk_size", "init_method")
    keys.refuse("normalization_function", "rmsnorm")
    # The second form is how Transformers 5 writes it.
    keys.refuse("time_step_limit", [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
    return Mamba2(
        heads=heads,
        groups=keys.count("mamba_n_groups", 1),
        key_dim=keys.count("mamba_d_state", 256),
        value_dim=size,
        width=keys.count("mamba_d_conv", 4),
        conv_bias=keys("mamba_conv_bias", True),
        bias=keys("mamba_proj_bias", False),
        activation=keys.activation("hidden_act"),
    )


def layer(config: ModelConfig, index: int, prefix: str) -> LayerWeights:
    weights = layer_sources(config, index, prefix, fused=("gate_up",), state=mamba_sources)
    if (moe := config.layers[index].moe) is None:
        return weights
    return weights.replace(moe=moe_sources(moe, config.dim, f"{prefix}layers.{index}.moe"))


def mamba_sources(a: Mamba2, D: int, prefix: str) -> Mamba2Weights:
    return mamba2_sources(a, D, f"{prefix}.mamba")


def mamba2_sources(a: Mamba2, D: int, prefix: str) -> Mamba2Weights:
    values, convolved = a.sizes
    width = values + convolved + a.heads
    return Mamba2Weights(
        in_DC=tensor(f"{prefix}.in_proj.weight", (width, D), linear((width,), (D,))),
        conv_CW=tensor(f"{prefix}.conv1d.weight", (convolved, 1, a.width), lambda x: x[:, 0]),
        rate_N=tensor(f"{prefix}.A_log", (a.heads,)),
        step_bias_N=tensor(f"{prefix}.dt_bias", (a.heads,)),
        direct_N=tensor(f"{prefix}.D", (a.heads,)),
        norm_C=scale(f"{prefix}.norm.weight", values) if a.normed else None,
        out_CD=tensor(f"{prefix}.out_proj.weight", (D, values), linear((D,), (values,))),
        conv_bias_C=tensor(f"{prefix}.conv1d.bias", (convolved,)) if a.conv_bias else None,
        in_bias_C=tensor(f"{prefix}.in_proj.bias", (width,)) if a.bias else None,
        out_bias_D=tensor(f"{prefix}.out_proj.bias", (D,)) if a.bias else None,
    )


sources = partial(model_sources, layer=layer)


def canonical(name: str) -> str:
    for checkpoint_part, common_part in NAMES.items():
        name = name.replace(checkpoint_part, common_part)
    return name
