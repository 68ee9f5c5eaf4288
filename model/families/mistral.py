"""Mistral: Llama with a sliding window, which later versions do not have."""

from ..config import Attention, Layer, Mlp, ModelConfig
from .common import Keys, model_config, model_sources, narrower

MISSING = {"num_key_value_heads": 8, "sliding_window": 4096}  # what a config.json without these keys means


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(MISSING | hf)
    longest, heads = keys.count("max_position_embeddings", 131072), keys.heads()
    attention = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], max_len or longest),
        window=narrower(keys.count("sliding_window", None), longest),
    )
    layer = Layer(attention, Mlp(keys.count("intermediate_size"), keys.activation("hidden_act")))
    return model_config(keys, "mistral", (layer,) * keys.count("num_hidden_layers"), longest)


sources = model_sources
