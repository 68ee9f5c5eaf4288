"""Llama 2 and 3: the decoder of which most other families are variations."""

from ..config import Attention, Layer, ModelConfig
from .common import Keys, model_config, model_sources


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(hf)
    context_length = keys.count("max_position_embeddings", 2048)
    heads = keys.heads()
    bias = keys("attention_bias", False)
    attention = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], max_len or context_length),
        bias=bias,
        out_bias=bias,
    )
    layer = Layer(attention, keys.mlp())
    return model_config(keys, "llama", (layer,) * keys.count("num_hidden_layers"), context_length)


sources = model_sources
