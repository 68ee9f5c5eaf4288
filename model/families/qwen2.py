"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values; optional windows."""

from ..config import Attention, Layer, Mlp, ModelConfig
from .common import Keys, layer_types, layers_by_type, model_config, model_sources


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(hf)
    keys.refuse("use_mrope", False)
    context_length = keys.count("max_position_embeddings", 32768)
    heads = keys.heads()
    attention = Attention(
        **heads, rope=keys.rope(heads["head_dim"], max_len or context_length), bias=True
    )
    return model_config(
        keys, "qwen2", windowed_layers(keys, attention, context_length), context_length
    )


def windowed_layers(keys: Keys, attention: Attention, context_length: int) -> tuple[Layer, ...]:
    """Qwen's layers: with `use_sliding_window`, those from `max_window_layers` on have a window."""
    mlp = Mlp(keys.count("intermediate_size"), keys.activation("hidden_act"))
    L = keys.count("num_hidden_layers")
    window = None
    first = keys("max_window_layers", 28)
    if keys("use_sliding_window", False):
        window = keys.count("sliding_window", 4096)
    has_window = [window is not None and i >= first for i in range(L)]
    kinds = layer_types(
        keys, L, ["sliding_attention" if windowed else "full_attention" for windowed in has_window]
    )
    return layers_by_type(kinds, mlp, attention, attention, window, context_length)


sources = model_sources
