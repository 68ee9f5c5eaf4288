"""Llama 2 and 3: the plain decoder that most other families vary."""

from ..config import Attention, Layer, ModelConfig
from .common import Keys, model_config, model_sources


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(hf)
    longest, heads, bias = keys.count("max_position_embeddings", 2048), keys.heads(), keys("attention_bias", False)
    attention = Attention(**heads, rope=keys.rope(heads["head_dim"], max_len or longest), bias=bias, out_bias=bias)
    layer = Layer(attention, keys.mlp())
    return model_config(keys, "llama", (layer,) * keys.count("num_hidden_layers"), longest)


sources = model_sources
