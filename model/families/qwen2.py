"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values; the upper layers may have a window."""

from ..config import Attention, Layer, Mlp, ModelConfig
from .common import Keys, layer_types, layers_by_type, model_config, model_sources


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(hf)
    keys.refuse("use_mrope", False)
    longest, heads = keys.count("max_position_embeddings", 32768), keys.heads()
    attention = Attention(**heads, rope=keys.rope(heads["head_dim"], max_len or longest), bias=True)
    return model_config(keys, "qwen2", windowed_layers(keys, attention, longest), longest)


def windowed_layers(keys: Keys, attention: Attention, longest: int) -> tuple[Layer, ...]:
    """Qwen's layers: with `use_sliding_window`, those from `max_window_layers` on have a window."""
    mlp = Mlp(keys.count("intermediate_size"), keys.activation("hidden_act"))
    L, window, first = keys.count("num_hidden_layers"), None, keys("max_window_layers", 28)
    if keys("use_sliding_window", False):
        window = keys.count("sliding_window", 4096)
    slides = [window is not None and i >= first for i in range(L)]
    kinds = layer_types(keys, L, ["sliding_attention" if slide else "full_attention" for slide in slides])
    return layers_by_type(kinds, mlp, attention, attention, window, longest)


sources = model_sources
