"""What a GGUF file says of a model: the metadata that `architectures.py` reads, from a configuration and config.json.

Only what is read back as the same model may be written: whoever writes a file compares both.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from ..config import Attention, ModelConfig
from ..errors import ModelError
from .file_type import FILE_TYPES
from .rotary import FREQS, llama3

Described = tuple[dict[str, Any], dict[str, np.ndarray]]
FAMILIES = {  # and the architecture that has them
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3_text": "gemma3",
}  # fmt: skip
# general.file_type by the type of the matrices.
WRITTEN_TYPES = {"MXFP4" if name == "MXFP4_MOE" else name: number for number, name in FILE_TYPES.items()}
SLACK = 1e-5  # between numbers of a configuration: a file keeps 32 bits
# Fields of a configuration that a file has other words for.
APART = ("family", "dtype", "quant", "stored", "kv_cache_dtype", "file_format")


def metadata_of(
    config: ModelConfig, hf: Mapping[str, Any], kind: str, name: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The keys, and the tensors that are part of the configuration. `hf` is the text model's config.json."""
    if config.family not in FAMILIES or not config.writes:
        raise ModelError(
            f"models of the family {config.family} are not written to GGUF files; those of {', '.join(FAMILIES)} are"
        )
    architecture, first = FAMILIES[config.family], config.layers[0]
    a = first.attention
    assert isinstance(a, Attention)
    own, tensors = rope(config, hf, architecture, a)
    own |= {
        "block_count": len(config.layers), "context_length": config.max_len, "embedding_length": config.dim,
        "attention.head_count": a.heads, "attention.head_count_kv": a.kv_heads, "attention.key_length": a.head_dim,
        "attention.value_length": a.head_dim, "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "vocab_size": config.vocab_size,
    }  # fmt: skip
    moe = next((layer.moe for layer in config.layers if layer.moe is not None), None)
    if moe is not None:
        own |= {"expert_count": moe.experts, "expert_used_count": moe.top_k, "expert_feed_forward_length": moe.dim}
    mlp = next((layer.mlp for layer in config.layers if layer.mlp is not None), None)
    if architecture == "qwen3moe" and any(layer.moe is None for layer in config.layers):
        raise ModelError("this model of the family qwen3_moe has a layer without experts; llama.cpp knows none such")
    own["feed_forward_length"] = hf["intermediate_size"] if mlp is None else mlp.dim
    windows = {layer.attention.window for layer in config.layers} - {None}
    if windows and architecture.startswith("gemma"):
        own["attention.sliding_window"] = windows.pop()
    caps = {"attn_logit_softcapping": a.soft_cap, "final_logit_softcapping": config.final_soft_cap}
    own |= {key: float(value) for key, value in caps.items() if value is not None}
    found: dict[str, Any] = {
        "general.architecture": architecture, "general.type": "model", "general.name": name,
        "general.file_type": WRITTEN_TYPES[kind], "general.quantization_version": 2,
    }  # fmt: skip
    return found | {f"{architecture}.{key}": value for key, value in own.items()}, tensors


def rope(
    config: ModelConfig, hf: Mapping[str, Any], architecture: str, a: Attention
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The keys of the rotary embedding, and its factors where it is scaled as Llama 3's is."""
    said = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    local, said = said.get("sliding_attention") or {}, said.get("full_attention", said)
    usual = 1e6 if architecture == "gemma3" else 10000.0
    theta = float(said.get("rope_theta") or hf.get("rope_theta") or usual)
    kind = said.get("rope_type") or said.get("type") or "default"
    turned = next((2 * len(x.attention.rope.inv_freq) for x in config.layers if x.attention.rope), a.head_dim)
    found: dict[str, Any] = {"rope.freq_base": theta, "rope.dimension_count": turned}
    swa = float(local.get("rope_theta") or hf.get("rope_local_base_freq") or 10000.0)
    if architecture == "gemma3":
        found["rope.freq_base_swa"] = swa
    if kind == "llama3" and architecture == "llama":
        length = said.get("original_max_position_embeddings") or config.max_len
        rule = said["factor"], said["low_freq_factor"], said["high_freq_factor"], length
        return found, {FREQS: llama3(theta, turned, *rule).astype(np.float32)}
    if kind not in ("default", "linear", "yarn"):
        raise ModelError(f"config.json: rope_type = {kind!r} of {config.family} models is not written to GGUF files")
    if kind != "default":
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(said["factor"])}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = said.get("original_max_position_embeddings") or config.max_len
        keys = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        found |= {f"rope.scaling.{own}": float(said[key]) for key, own in keys.items() if said.get(key) is not None}
    return found, {}


def check_same(mine: ModelConfig, read: ModelConfig) -> None:
    """Refuse a model that a file would say something else of."""
    for field in fields(mine):
        if field.name not in APART and (place := differs(getattr(mine, field.name), getattr(read, field.name))):
            raise ModelError(
                f"this model of the family {mine.family} cannot be said in a GGUF file: {field.name}{place} would be "
                "read as another"
            )


def differs(mine: Any, read: Any) -> str:
    """Where two values differ, and how; empty where they do not."""
    if is_dataclass(mine) and type(mine) is type(read):
        pairs = ((f".{field.name}", getattr(mine, field.name), getattr(read, field.name)) for field in fields(mine))
    elif isinstance(mine, tuple) and isinstance(read, tuple) and len(mine) == len(read):
        pairs = ((f"[{at}]", one, other) for at, (one, other) in enumerate(zip(mine, read, strict=True)))
    elif isinstance(mine, float) and isinstance(read, int | float) and not isinstance(read, bool):
        return "" if abs(mine - read) <= SLACK * abs(mine) else f" = {mine!r} ({read!r})"
    else:
        return "" if mine == read else f" = {mine!r:.60} ({read!r:.60})"
    return next((place + found for place, one, other in pairs if (found := differs(one, other))), "")
