"""Models that read images: what their config.json says beside the text model's part."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .checkpoint.folder import read_config_json, read_json
from .config import ModelConfig, ModelError
from .images.rule import ImageRule, rule_from_config
from .towers import TOWERS, module_of
from .towers.checkpoint import has_tower
from .towers.config import Tower

PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"
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


def is_multimodal(folder: Path, hf_overrides: Mapping[str, Any] | None = None) -> bool:
    """Whether the folder holds a supported tower, with its weights."""
    # Whether the architecture is supported is for the text model's loader to say.
    hf = read_config_json(folder, hf_overrides, embeds=True)
    has_config = isinstance(hf.get("vision_config"), dict)
    return hf.get("model_type") in TOWERS and has_config and has_tower(folder)


def read(folder: Path, hf_overrides: Mapping[str, Any] | None = None) -> Multimodal:
    """Read how the model of a folder that `is_multimodal` reads images."""
    hf = read_config_json(folder, hf_overrides, embeds=True)
    model_type = hf["model_type"]
    vision_config = hf["vision_config"]
    kind = vision_config.get("model_type", model_type)
    dtype = vision_config.get("dtype") or hf.get("dtype") or hf.get("torch_dtype")
    tower = module_of(kind).config(vision_config | ({"dtype": dtype} if dtype else {}))
    text = hf.get("text_config") or {}
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if "image_token_id" not in hf:
        raise ModelError(f"{folder / 'config.json'} lacks 'image_token_id', the placeholder")
    sections = rope.get("mrope_section") or DEFAULT_SECTIONS.get(model_type, (24, 20, 20))
    return Multimodal(
        kind,
        tower,
        rule_from_config(model_type, read_preprocessor(folder)),
        hf["image_token_id"],
        tuple(sections),
    )


def read_preprocessor(folder: Path) -> dict[str, Any]:
    """How the folder says that images are read."""
    for name in (PREPROCESSOR, PROCESSOR):
        if (folder / name).is_file():
            settings = read_json(folder / name)
            return settings.get("image_processor", settings)
    raise ModelError(
        f"{folder / PREPROCESSOR} is missing, which says how images are read; language_model_only "
        "serves text without it"
    )


def with_axes(config: ModelConfig, multimodal: Multimodal) -> ModelConfig:
    """The text model with a rotary embedding that turns by rows and columns of images too."""

    def add_axes(layer):
        attention = layer.attention
        rope = getattr(attention, "rope", None)
        if rope is None:
            return layer
        axes = interleaved_axes(len(rope.inv_freq), multimodal.sections)
        return replace(layer, attention=replace(attention, rope=replace(rope, axes=axes)))

    return replace(config, layers=tuple(map(add_axes, config.layers)))


def interleaved_axes(num_pairs: int, sections: tuple[int, ...]) -> tuple[int, ...]:
    """The axis of each pair: time, row, column, time, row, ...; time alone in the last ones."""
    axes = [0] * num_pairs
    for axis in range(1, len(sections)):
        for pair in range(axis, min(len(sections) * sections[axis], num_pairs), len(sections)):
            axes[pair] = axis
    return tuple(axes)
