"""Vision towers: the part of a multimodal model that turns images into rows of the decoder's width.

A tower is a `ModelConfig` of layers that attend in both directions, with a way in (patches of
pixels to rows) and a way out (the merger). One module each, by the `model_type` in `vision_config`;
it defines `config(vision_config, hf) -> Tower`, where `hf` is the whole config.json, the `PREFIXES`
of its tensors in a checkpoint, and `sources(tower, prefix)`, a weight tree whose leaves are
`Source`.
"""

import importlib
from typing import Any

from ..config import ModelError

TOWERS = {
    "gemma4_vision": ".gemma4",
    "pixtral": ".pixtral",
    "siglip_vision_model": ".siglip",
    "qwen3_5": ".qwen3",
    "qwen3_5_moe": ".qwen3",
    "qwen3_5_moe_vision": ".qwen3",
    "qwen3_5_vision": ".qwen3",
    "qwen3_vl": ".qwen3",
    "qwen3_vl_moe": ".qwen3",
    "qwen3_vl_moe_vision": ".qwen3",
    "qwen3_vl_vision": ".qwen3",
}


def module_of(kind: Any) -> Any:
    """The module of a tower, by its `model_type`."""
    if not isinstance(kind, str) or kind not in TOWERS:
        raise ModelError(
            f"vision_config has model_type {kind!r}, which is not supported; supported are "
            f"{', '.join(TOWERS)}"
        )
    return importlib.import_module(TOWERS[kind], __name__)
