"""Seed-OSS: Llama with biases on queries, keys and values."""

from ..config import Attention, Layer, ModelConfig
from .common import Keys, model_config, model_sources


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(hf)
    context_length = keys.count("max_position_embeddings", 524288)
    heads = keys.heads(128)
    attention = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], max_len or context_length),
        bias=keys("attention_bias", True),
        out_bias=keys("attention_out_bias", False),
    )
    layers = (Layer(attention, keys.mlp()),) * keys.count("num_hidden_layers")
    return model_config(keys, "seed_oss", layers, context_length)


sources = model_sources
