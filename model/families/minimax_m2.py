"""MiniMax-M2: norms across all heads, half of each head turns, and experts by sigmoid without groups."""

from functools import partial

from ..config import Attention, Layer, ModelConfig, ModelError, Moe
from .common import Keys, model_config, model_sources, sparse_layer_sources

MISSING = {  # what a config.json without these keys means
    "num_key_value_heads": 8, "num_local_experts": 256, "num_experts_per_tok": 8, "torch_dtype": "bfloat16",
}  # fmt: skip


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(MISSING | hf)
    check(keys)
    longest, heads = keys.count("max_position_embeddings", 196608), keys.heads(128)
    H = heads["head_dim"]
    if rotary := keys.count("rotary_dim", None):
        keys.hf = {"partial_rotary_factor": rotary / H} | keys.hf
    attention = Attention(**heads, rope=keys.rope(H, max_len or longest, theta=5000000.0), qk_norm="all")
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
    return model_config(keys, "minimax_m2", layers, longest)


def check(keys: Keys) -> None:
    """Refuse what the files could say and no model has been."""
    if {*keys("attn_type_list", [])} - {1}:
        raise ModelError("config.json: attn_type_list has another kind of attention than 1, which is not supported")
    keys.refuse("qk_norm_type", "per_layer")
    keys.refuse("use_qk_norm", True)
    keys.refuse("use_routing_bias", True)
    keys.refuse("scoring_func", "sigmoid")
    keys.refuse("shared_intermediate_size", 0)
    # Of layers that predict further tokens, of kinds of attention that no layer has, and of a block that is not there.
    keys.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "shared_moe_mode", "mlp_intermediate_size")
    keys.ignore("swa_rope_theta", "max_model_len")
    keys.ignore(*(name for name in keys.hf if name.startswith("layernorm_")))


def canonical(name: str) -> str:
    """A tensor's name as `transformers` 5 has it; checkpoints say `block_sparse_moe`."""
    return name.replace(".block_sparse_moe.", ".mlp.")


NAMES = {"experts": ("w1", "w3", "w2"), "choice_bias": "e_score_correction_bias"}
sources = partial(model_sources, layer=sparse_layer_sources, names=NAMES)
