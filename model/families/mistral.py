"""Mistral: Llama with a sliding window, which later versions do not have."""

from ..config import Attention, Layer, Mlp, ModelConfig
from .common import Keys, effective_window, model_config, model_sources

MISSING = {"num_key_value_heads": 8, "sliding_window": 4096}  # defaults


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(MISSING | hf)
    context_length = keys.count("max_position_embeddings", 131072)
    heads = keys.heads()
    attention = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], max_len or context_length),
        window=effective_window(keys.count("sliding_window", None), context_length),
    )
    layer = Layer(attention, Mlp(keys.count("intermediate_size"), keys.activation("hidden_act")))
    return model_config(keys, "mistral", (layer,) * keys.count("num_hidden_layers"), context_length)


sources = model_sources
