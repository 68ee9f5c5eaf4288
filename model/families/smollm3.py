"""SmolLM3: Llama with every fourth layer free of a rotary embedding."""

from dataclasses import replace

from ..config import Attention, Layer, ModelConfig, ModelError
from .common import Keys, effective_window, layer_types, model_config, model_sources


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys({"num_key_value_heads": 4} | hf)
    context_length = keys.count("max_position_embeddings", 32768)
    heads = keys.heads()
    bias = keys("attention_bias", False)
    rope = keys.rope(heads["head_dim"], max_len or context_length, theta=2000000.0)
    attention = Attention(**heads, rope=rope, bias=bias, out_bias=bias)
    window = keys.count("sliding_window", None) if keys("use_sliding_window", False) else None
    L = keys.count("num_hidden_layers")
    is_rotary = rotated_layers(keys, L)
    kinds = [
        "full_attention" if is_rotary_layer or window is None else "sliding_attention"
        for is_rotary_layer in is_rotary
    ]
    mlp = keys.mlp()
    layers = []
    for is_rotary_layer, kind in zip(is_rotary, layer_types(keys, L, kinds), strict=True):
        layer_attention = replace(
            attention,
            window=effective_window(window, context_length)
            if kind == "sliding_attention"
            else None,
        )
        layers.append(
            Layer(layer_attention if is_rotary_layer else replace(layer_attention, rope=None), mlp)
        )
    return model_config(
        keys, "smollm3", tuple(layers), context_length, tied=keys("tie_word_embeddings", True)
    )


def rotated_layers(keys: Keys, count: int) -> list[bool]:
    """Whether each layer has a rotary embedding; a file may list them, with 0 for none."""
    rope_period = keys.count("no_rope_layer_interval", 4)
    stated = keys("no_rope_layers", []) or [int((i + 1) % rope_period != 0) for i in range(count)]
    if len(stated) != count:
        raise ModelError(
            f"config.json: no_rope_layers has {len(stated)} entries for {count} layers"
        )
    return [bool(flag) for flag in stated]


sources = model_sources
