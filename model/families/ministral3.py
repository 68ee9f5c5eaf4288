"""Ministral 3 and Devstral 2: Mistral whose queries are scaled by position, for long contexts."""

from typing import Any

from ..config import Attention, Layer, ModelConfig, ModelError, Temperature
from .common import Keys, effective_window, model_config, model_sources

MISSING = {"num_key_value_heads": 8}  # defaults
ROPE = {  # default without any rope keys
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    hf, temperature = split_temperature(hf, ROPE)
    keys = Keys(MISSING | hf)
    context_length = keys.count("max_position_embeddings", 262144)
    heads = keys.heads(128)
    attention = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], max_len or context_length),
        window=effective_window(keys.count("sliding_window", None), context_length),
        temperature=temperature,
    )
    layers = (Layer(attention, keys.mlp()),) * keys.count("num_hidden_layers")
    return model_config(
        keys, "ministral3", layers, context_length, norm_eps=keys.positive("rms_norm_eps", 1e-5)
    )


def split_temperature(hf: dict, missing: dict[str, Any]) -> tuple[dict, Temperature | None]:
    """(config.json without the temperature keys in its RoPE parameters, the temperature)."""
    name = (
        "rope_parameters"
        if hf.get("rope_parameters") or not hf.get("rope_scaling")
        else "rope_scaling"
    )
    params = hf.get(name) or missing
    if not isinstance(params, dict):
        raise ModelError(f"config.json: {name} = {params!r:.80}; it must be an object")
    keys = Keys(params)
    scale = keys("llama_4_scaling_beta", 0.0)
    floor = keys.count("original_max_position_embeddings", None)
    if scale and not floor:
        raise ModelError(
            f"config.json: {name} lacks original_max_position_embeddings, which "
            "llama_4_scaling_beta needs"
        )
    rope_params = {
        key: x
        for key, x in params.items()
        if key not in ("llama_4_scaling_beta", "max_position_embeddings")
    }
    return hf | {name: rope_params}, Temperature(float(scale), float(floor)) if scale else None


sources = model_sources
