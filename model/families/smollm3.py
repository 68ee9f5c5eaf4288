"""SmolLM3: Llama with every fourth layer free of a rotary embedding."""

from dataclasses import replace

from ..config import Attention, Layer, ModelConfig, ModelError
from .common import Keys, layer_types, model_config, model_sources, narrower


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys({"num_key_value_heads": 4} | hf)
    longest, heads, bias = keys.count("max_position_embeddings", 32768), keys.heads(), keys("attention_bias", False)
    rope = keys.rope(heads["head_dim"], max_len or longest, theta=2000000.0)
    attention = Attention(**heads, rope=rope, bias=bias, out_bias=bias)
    window = keys.count("sliding_window", None) if keys("use_sliding_window", False) else None
    L = keys.count("num_hidden_layers")
    turned = rotated_layers(keys, L)
    kinds = ["full_attention" if turns or window is None else "sliding_attention" for turns in turned]
    mlp, layers = keys.mlp(), []
    for turns, kind in zip(turned, layer_types(keys, L, kinds), strict=True):
        own = replace(attention, window=narrower(window, longest) if kind == "sliding_attention" else None)
        layers.append(Layer(own if turns else replace(own, rope=None), mlp))
    return model_config(keys, "smollm3", tuple(layers), longest, tied=keys("tie_word_embeddings", True))


def rotated_layers(keys: Keys, count: int) -> list[bool]:
    """Whether each layer has a rotary embedding; a file may list them, with zeros for those that have none."""
    every = keys.count("no_rope_layer_interval", 4)
    stated = keys("no_rope_layers", []) or [int((i + 1) % every != 0) for i in range(count)]
    if len(stated) != count:
        raise ModelError(f"config.json: no_rope_layers has {len(stated)} entries for {count} layers")
    return [bool(turns) for turns in stated]


sources = model_sources
