"""The metadata that describes a model in a GGUF file, from its ModelConfig and config.json.

The inverse of `architectures.py`. The writer checks that the file would be read back as the same
model.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from ..config import Attention, ModelConfig
from ..errors import ModelError
from .file_type import FILE_TYPES
from .rotary import FREQS, llama3_factors

ARCHITECTURE_BY_FAMILY = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3_text": "gemma3",
}  # fmt: skip
# general.file_type by block type of the matrices.
WRITTEN_TYPES = {
    "MXFP4" if name == "MXFP4_MOE" else name: number for number, name in FILE_TYPES.items()
}
REL_TOLERANCE = 1e-5  # between floats of two configurations: a file stores 32 bits
# Fields of ModelConfig that a file does not store in the same form.
IGNORED_FIELDS = ("family", "dtype", "quant", "stored", "kv_cache_dtype", "file_format")


def model_metadata(
    config: ModelConfig, hf: Mapping[str, Any], kind: str, name: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The metadata keys, and the tensors that are part of the configuration.

    Args:
        hf: config.json of the text model.
        kind: the block type of the matrices.
        name: the model's name.
    """
    if config.family not in ARCHITECTURE_BY_FAMILY or not config.writes:
        raise ModelError(
            f"models of the family {config.family} are not written to GGUF files; "
            f"those of {', '.join(ARCHITECTURE_BY_FAMILY)} are"
        )
    architecture = ARCHITECTURE_BY_FAMILY[config.family]
    first_layer = config.layers[0]
    attention = first_layer.attention
    assert isinstance(attention, Attention)
    architecture_values, tensors = rope_metadata(config, hf, architecture, attention)
    architecture_values |= {
        "block_count": len(config.layers),
        "context_length": config.max_len,
        "embedding_length": config.dim,
        "attention.head_count": attention.heads,
        "attention.head_count_kv": attention.kv_heads,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "vocab_size": config.vocab_size,
    }
    moe = next((layer.moe for layer in config.layers if layer.moe is not None), None)
    if moe is not None:
        architecture_values |= {
            "expert_count": moe.experts,
            "expert_used_count": moe.top_k,
            "expert_feed_forward_length": moe.dim,
        }
    mlp = next((layer.mlp for layer in config.layers if layer.mlp is not None), None)
    if architecture == "qwen3moe" and any(layer.moe is None for layer in config.layers):
        raise ModelError(
            "this model of the family qwen3_moe has a layer without experts; llama.cpp does not "
            "support that"
        )
    architecture_values["feed_forward_length"] = hf["intermediate_size"] if mlp is None else mlp.dim
    windows = {layer.attention.window for layer in config.layers} - {None}
    if windows and architecture.startswith("gemma"):
        architecture_values["attention.sliding_window"] = windows.pop()
    caps = {
        "attn_logit_softcapping": attention.soft_cap,
        "final_logit_softcapping": config.final_soft_cap,
    }
    architecture_values |= {key: float(value) for key, value in caps.items() if value is not None}
    general_values: dict[str, Any] = {
        "general.architecture": architecture, "general.type": "model", "general.name": name,
        "general.file_type": WRITTEN_TYPES[kind], "general.quantization_version": 2,
    }  # fmt: skip
    return general_values | {
        f"{architecture}.{key}": value for key, value in architecture_values.items()
    }, tensors


def rope_metadata(
    config: ModelConfig, hf: Mapping[str, Any], architecture: str, attention: Attention
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The keys of the rotary embedding, and its tensor of factors for Llama 3's scaling."""
    rope_parameters = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    local = rope_parameters.get("sliding_attention") or {}
    rope_parameters = rope_parameters.get("full_attention", rope_parameters)
    default_theta = 1e6 if architecture == "gemma3" else 10000.0
    theta = float(rope_parameters.get("rope_theta") or hf.get("rope_theta") or default_theta)
    rope_type = rope_parameters.get("rope_type") or rope_parameters.get("type") or "default"
    rotary_dim = next(
        (2 * len(x.attention.rope.inv_freq) for x in config.layers if x.attention.rope),
        attention.head_dim,
    )
    values: dict[str, Any] = {"rope.freq_base": theta, "rope.dimension_count": rotary_dim}
    swa = float(local.get("rope_theta") or hf.get("rope_local_base_freq") or 10000.0)
    if architecture == "gemma3":
        values["rope.freq_base_swa"] = swa
    if rope_type == "llama3" and architecture == "llama":
        length = rope_parameters.get("original_max_position_embeddings") or config.max_len
        llama3_parameters = (
            rope_parameters["factor"],
            rope_parameters["low_freq_factor"],
            rope_parameters["high_freq_factor"],
            length,
        )
        return values, {
            FREQS: llama3_factors(theta, rotary_dim, *llama3_parameters).astype(np.float32)
        }
    if rope_type not in ("default", "linear", "yarn"):
        raise ModelError(
            f"config.json: rope_type = {rope_type!r} of {config.family} models is not written to "
            "GGUF files"
        )
    if rope_type != "default":
        values |= {
            "rope.scaling.type": rope_type,
            "rope.scaling.factor": float(rope_parameters["factor"]),
        }
    if rope_type == "yarn":
        values["rope.scaling.original_context_length"] = (
            rope_parameters.get("original_max_position_embeddings") or config.max_len
        )
        keys = {
            "attention_factor": "yarn_attn_factor",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
        }
        values |= {
            f"rope.scaling.{gguf_key}": float(rope_parameters[key])
            for key, gguf_key in keys.items()
            if rope_parameters.get(key) is not None
        }
    return values, {}


def check_round_trip(config: ModelConfig, restored: ModelConfig) -> None:
    """Raise if the configuration read back from the file would differ."""
    for field in fields(config):
        if field.name not in IGNORED_FIELDS and (
            difference := first_difference(
                getattr(config, field.name), getattr(restored, field.name)
            )
        ):
            raise ModelError(
                f"this model of the family {config.family} cannot be described in a GGUF file: "
                f"{field.name}{difference} would be read back differently"
            )


def first_difference(value: Any, restored: Any) -> str:
    """The path and values of the first difference between two values; empty if they are equal."""
    if is_dataclass(value) and type(value) is type(restored):
        pairs = (
            (f".{field.name}", getattr(value, field.name), getattr(restored, field.name))
            for field in fields(value)
        )
    elif isinstance(value, tuple) and isinstance(restored, tuple) and len(value) == len(restored):
        pairs = (
            (f"[{index}]", item, restored_item)
            for index, (item, restored_item) in enumerate(zip(value, restored, strict=True))
        )
    elif (
        isinstance(value, float)
        and isinstance(restored, int | float)
        and not isinstance(restored, bool)
    ):
        return (
            ""
            if abs(value - restored) <= REL_TOLERANCE * abs(value)
            else f" = {value!r} ({restored!r})"
        )
    else:
        return "" if value == restored else f" = {value!r:.60} ({restored!r:.60})"
    return next(
        (
            path + difference
            for path, item, restored_item in pairs
            if (difference := first_difference(item, restored_item))
        ),
        "",
    )
