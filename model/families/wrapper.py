"""Multimodal models: loads only the text model, which is nested in their config.json."""

import importlib
from typing import Any

from ..config import ModelConfig, ModelError
from ..weights import ModelWeights
from .config_keys import INSIDE, Keys

TEXT_TYPES = {  # model_type -> default model_type of its text_config
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "kimi_k25": "deepseek_v3",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
# Stated once for the whole model.
SHARED_KEYS = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
OTHER_WORDS = (  # substrings of keys about other modalities
    "vision",
    "image",
    "video",
    "audio",
    "projector",
    "projection",
    "media",
    "mm_",
    "boi_",
    "eoi_",
    "boa_",
    "eoa_",
    "spatial_merge",
    "language_model_only",
)
NESTED = {  # prefix in multimodal checkpoints -> prefix in text-only checkpoints
    "language_model.model.blocks.": "model.layers.",  # as transformers 5 writes Kimi K2.5
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
TOWERS = (  # prefixes of tensors of vision and audio towers
    "vision_tower.",
    "vision_model.",
    "vision_embedder.",
    "embed_vision.",
    "audio_tower.",
    "embed_audio.",
    "multi_modal_projector.",
    "mm_projector.",
    "visual.",
)


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    text = text_config(hf)
    return module(text["model_type"]).config(text, max_len)


def sources(config: ModelConfig) -> ModelWeights:
    return module(config.family).sources(config)


def module(kind: Any) -> Any:
    """The family's module for a text model's `model_type`."""
    from . import FAMILIES

    if not isinstance(kind, str) or FAMILIES.get(kind) in (None, ".wrapper"):
        raise ModelError(
            f"config.json: text_config has model_type {kind!r}, which is not supported in "
            "another model"
        )
    return importlib.import_module(FAMILIES[kind], __package__)


def text_config(hf: dict) -> dict[str, Any]:
    """The text model's config, with the keys that the outer config.json states for all parts."""
    outer = Keys(hf)
    text = outer("text_config")
    if not isinstance(text, dict):
        raise ModelError(f"config.json: text_config = {text!r}; it must be an object")
    outer.ignore(
        *SHARED_KEYS,
        "ignore_index",
        *(name for name in hf if any(word in name for word in OTHER_WORDS)),
    )
    outer.done()
    shared = {key: hf[key] for key in SHARED_KEYS if hf.get(key) is not None}
    dtypes = ("dtype", "torch_dtype") if {"dtype", "torch_dtype"} & {*shared} else ()
    text_keys = {key: value for key, value in text.items() if key not in dtypes}
    return (
        {"model_type": TEXT_TYPES[hf["model_type"]]} | text_keys | shared | {INSIDE: "text_config"}
    )


def canonical(name: str) -> str:
    """A tensor's name as in text-only checkpoints; multimodal checkpoints add various prefixes."""
    for nested, text_only in NESTED.items():
        if name.startswith(nested):
            return text_only + name.removeprefix(nested)
    return name


def is_other(name: str) -> bool:
    """Whether a tensor belongs to a vision or audio tower."""
    return name.removeprefix("model.").startswith(TOWERS)
