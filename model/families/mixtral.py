"""Mixtral: Mistral with eight experts in place of the MLP."""

from functools import partial

from ..config import Attention, Layer, ModelConfig, Moe
from .common import Keys, effective_window, model_config, model_sources, sparse_layer_sources

MISSING = {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2}


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(MISSING | hf)
    context_length = keys.count("max_position_embeddings", 131072)
    heads = keys.heads()
    attention = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], max_len or context_length, theta=1e6),
        window=effective_window(keys.count("sliding_window", None), context_length),
    )
    moe = Moe(
        experts=keys.count("num_local_experts"),
        top_k=keys.count("num_experts_per_tok"),
        dim=keys.count("intermediate_size"),
        activation=keys.activation("hidden_act"),
    )
    layers = (Layer(attention, moe=moe),) * keys.count("num_hidden_layers")
    return model_config(
        keys, "mixtral", layers, context_length, norm_eps=keys.positive("rms_norm_eps", 1e-5)
    )


def canonical(name: str) -> str:
    """A tensor's name as in Transformers 5; checkpoints use `block_sparse_moe`."""
    return name.replace(".block_sparse_moe.", ".mlp.")


sources = partial(model_sources, layer=sparse_layer_sources, names={"experts": ("w1", "w3", "w2")})
