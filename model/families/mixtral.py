"""Mixtral: Mistral with eight experts in place of one feed-forward block."""

from functools import partial

from ..config import Attention, Layer, ModelConfig, Moe
from .common import Keys, model_config, model_sources, narrower, sparse_layer_sources

MISSING = {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2}


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(MISSING | hf)
    longest, heads = keys.count("max_position_embeddings", 131072), keys.heads()
    attention = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], max_len or longest, theta=1e6),
        window=narrower(keys.count("sliding_window", None), longest),
    )
    moe = Moe(
        experts=keys.count("num_local_experts"),
        top_k=keys.count("num_experts_per_tok"),
        dim=keys.count("intermediate_size"),
        activation=keys.activation("hidden_act"),
    )
    layers = (Layer(attention, moe=moe),) * keys.count("num_hidden_layers")
    return model_config(keys, "mixtral", layers, longest, norm_eps=keys.positive("rms_norm_eps", 1e-5))


def canonical(name: str) -> str:
    """A tensor's name as `transformers` 5 has it; checkpoints say `block_sparse_moe`."""
    return name.replace(".block_sparse_moe.", ".mlp.")


sources = partial(model_sources, layer=sparse_layer_sources, names={"experts": ("w1", "w3", "w2")})
