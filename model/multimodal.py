"""Models that read images: what their config.json says beside the text model's part."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .checkpoint.folder import read_config_json, read_json
from .config import ModelConfig, ModelError
from .images.rule import ImageRule, rule_from_config
from .towers import TOWERS, module_of
from .towers.config import Tower

PREPROCESSOR = "preprocessor_config.json"
DEFAULT_SECTIONS = {"qwen3_5": (11, 11, 10), "qwen3_5_moe": (11, 11, 10)}


@dataclass(frozen=True)
class Multimodal:
    """How a model reads images."""

    kind: str  # model_type of its tower
    tower: Tower
    rule: ImageRule
    image_token: int  # the placeholder
    sections: tuple[int, ...]  # rotary pairs that turn by time, row and column

    @property
    def num_axes(self) -> int:
        return len(self.sections)


def read(folder: Path, hf_overrides: Mapping[str, Any] | None = None) -> Multimodal | None:
    """Read a folder; None if its model reads text only, or has a tower that is not supported."""
    hf = read_config_json(folder, hf_overrides, False)
    model_type = hf.get("model_type")
    vision_config = hf.get("vision_config")
    if model_type not in TOWERS or not isinstance(vision_config, dict):
        return None
    kind = vision_config.get("model_type", model_type)
    dtype = vision_config.get("dtype") or hf.get("dtype") or hf.get("torch_dtype")
    tower = module_of(kind).config(vision_config | ({"dtype": dtype} if dtype else {}))
    path = folder / PREPROCESSOR
    if not path.is_file():
        raise ModelError(
            f"{path} is missing, which says how images are read; language_model_only serves text "
            "without it"
        )
    text = hf.get("text_config") or {}
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if "image_token_id" not in hf:
        raise ModelError(f"{folder / 'config.json'} lacks 'image_token_id', the placeholder")
    sections = rope.get("mrope_section") or DEFAULT_SECTIONS.get(model_type, (24, 20, 20))
    return Multimodal(
        kind,
        tower,
        rule_from_config(model_type, read_json(path)),
        hf["image_token_id"],
        tuple(sections),
    )


def with_axes(config: ModelConfig, multimodal: Multimodal) -> ModelConfig:
    """The text model with a rotary embedding that turns by rows and columns of images too."""

    def turn(layer):
        attention = layer.attention
        rope = getattr(attention, "rope", None)
        if rope is None:
            return layer
        axes = interleaved_axes(len(rope.inv_freq), multimodal.sections)
        return replace(layer, attention=replace(attention, rope=replace(rope, axes=axes)))

    return replace(config, layers=tuple(map(turn, config.layers)))


def interleaved_axes(num_pairs: int, sections: tuple[int, ...]) -> tuple[int, ...]:
    """The axis of each pair: time, row, column, time, row, ...; time alone in the last ones."""
    axes = [0] * num_pairs
    for axis in range(1, len(sections)):
        for pair in range(axis, min(len(sections) * sections[axis], num_pairs), len(sections)):
            axes[pair] = axis
    return tuple(axes)
