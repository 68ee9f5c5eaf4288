"""MiniMax-M2: norms across all heads, partial rotary embedding, and sigmoid-scored experts."""

from functools import partial

from ..config import Attention, Layer, ModelConfig, ModelError, Moe
from .common import Keys, model_config, model_sources, sparse_layer_sources

MISSING = {  # defaults
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "torch_dtype": "bfloat16",
}


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(MISSING | hf)
    check_supported(keys)
    context_length = keys.count("max_position_embeddings", 196608)
    heads = keys.heads(128)
    H = heads["head_dim"]
    if rotary := keys.count("rotary_dim", None):
        keys.hf = {"partial_rotary_factor": rotary / H} | keys.hf
    attention = Attention(
        **heads, rope=keys.rope(H, max_len or context_length, theta=5000000.0), qk_norm="all"
    )
    moe = Moe(
        experts=keys.count("num_local_experts"),
        top_k=keys.count("num_experts_per_tok"),
        dim=keys.count("intermediate_size"),
        activation=keys.activation("hidden_act"),
        score="sigmoid",
        router_float32=True,
        choice_bias=True,
    )
    layers = (Layer(attention, moe=moe),) * keys.count("num_hidden_layers")
    return model_config(keys, "minimax_m2", layers, context_length)


def check_supported(keys: Keys) -> None:
    """Raise ModelError for config values that the format allows but no published model uses."""
    if {*keys("attn_type_list", [])} - {1}:
        raise ModelError(
            "config.json: attn_type_list has a kind of attention other than 1, which is not "
            "supported"
        )
    keys.refuse("qk_norm_type", "per_layer")
    keys.refuse("use_qk_norm", True)
    keys.refuse("use_routing_bias", True)
    keys.refuse("scoring_func", "sigmoid")
    keys.refuse("shared_intermediate_size", 0)
    # Multi-token prediction, and kinds of attention and blocks that no layer has.
    keys.ignore(
        "use_mtp",
        "num_mtp_modules",
        "mtp_transformer_layers",
        "shared_moe_mode",
        "mlp_intermediate_size",
    )
    keys.ignore("swa_rope_theta", "max_model_len")
    keys.ignore(*(name for name in keys.hf if name.startswith("layernorm_")))


def canonical(name: str) -> str:
    """A tensor's name as in Transformers 5; checkpoints use `block_sparse_moe`."""
    return name.replace(".block_sparse_moe.", ".mlp.")


NAMES = {"experts": ("w1", "w3", "w2"), "choice_bias": "e_score_correction_bias"}
sources = partial(model_sources, layer=sparse_layer_sources, names=NAMES)
