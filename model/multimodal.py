"""Models that read images: what their folders say beside the text model's part."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .checkpoint.folder import read_config_json, read_json
from .config import FAR, ModelConfig, ModelError
from .images.rule import ImageRule, rule_from_config
from .towers import TOWERS, module_of
from .towers.checkpoint import has_tower
from .towers.config import Tower

PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"
# By model_type: the rotary pairs that turn by time, row and column, unless config.json says it.
DEFAULT_SECTIONS = {
    "qwen3_vl": (24, 20, 20),
    "qwen3_vl_moe": (24, 20, 20),
    "qwen3_5": (11, 11, 10),
    "qwen3_5_moe": (11, 11, 10),
}
# The model types that read images, and the `model_type` of their towers unless vision_config has it.
TOWER_KINDS = {
    "gemma3": "siglip_vision_model",
    "gemma4": "gemma4_vision",
    "mistral3": "pixtral",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl_moe",
}
# By model_type: the keys of preprocessor_config.json that can be overridden.
SIZE_KEYS = {
    "gemma4": ("max_soft_tokens",),
    "mistral3": ("size",),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"), ("min_pixels", "max_pixels", "size")
    ),
}
# By model_type: the tokens after each row of an image but the last, and after the last.
ROW_TOKENS = {"mistral3": ("[IMG_BREAK]", "[IMG_END]")}


@dataclass(frozen=True)
class ImageLayout:
    """The tokens of an image in a prompt: a placeholder for each embedding, and separators."""

    placeholder: int
    prompt_tokens: tuple[int, ...]  # of an image in a prompt, as chat templates write it
    row_break: int | None = None  # after each row but the last
    end: int | None = None  # after the last row
    # The text of `replaced` in a prompt is replaced by that of `tokens`, between texts `around`;
    # None: the text has all tokens.
    replaced: int | None = None
    tokens: tuple[int, ...] = ()
    around: str = ""


@dataclass(frozen=True)
class Multimodal:
    """How a model reads images."""

    kind: str  # model_type of its tower
    tower: Tower
    rule: ImageRule
    layout: ImageLayout
    sections: tuple[int, ...]  # rotary pairs that turn by time, row and column; (): text alone
    # The layers in which an image's tokens see all of it: "all", "window" (those with a window), or
    # None.
    span_layers: str | None = None
    media_token: int = 0  # see `ModelConfig.media_token`

    @property
    def num_axes(self) -> int:
        return len(self.sections)

    @property
    def sees_spans(self) -> bool:
        return self.span_layers is not None


def is_multimodal(folder: Path, hf_overrides: Mapping[str, Any] | None = None) -> bool:
    """Whether the folder holds a supported tower, with its weights."""
    # Whether the architecture is supported is for the text model's loader to say.
    hf = read_config_json(folder, hf_overrides, embeds=True)
    kind = tower_kind(hf)
    return kind in TOWERS and has_tower(folder, kind)


def tower_kind(hf: Mapping[str, Any]) -> Any:
    """The `model_type` of a model's tower; None if it has none, or is not one of TOWER_KINDS."""
    vision_config = hf.get("vision_config")
    model_type = hf.get("model_type")
    if not isinstance(vision_config, dict) or model_type not in TOWER_KINDS:
        return None
    return vision_config.get("model_type", TOWER_KINDS[model_type])


def read(
    folder: Path,
    hf_overrides: Mapping[str, Any] | None = None,
    processor_overrides: Mapping[str, Any] | None = None,
) -> Multimodal:
    """Read how the model of a folder that `is_multimodal` reads images.

    Args:
        folder: The model's folder.
        hf_overrides: Overrides for keys of config.json.
        processor_overrides: Overrides for keys of preprocessor_config.json.
    """
    hf = read_config_json(folder, hf_overrides, embeds=True)
    text = hf.get("text_config") or {}
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    tower = read_tower(hf)
    return Multimodal(
        tower_kind(hf),
        tower,
        read_rule(folder, hf, tower, processor_overrides),
        image_layout(folder, hf),
        tuple(rope.get("mrope_section") or DEFAULT_SECTIONS.get(hf["model_type"], ())),
        span_layers(hf),
        text.get("pad_token_id") or 0,
    )


def read_tower(hf: Mapping[str, Any]) -> Tower:
    """The tower of a model with this config.json, which has one of TOWERS."""
    vision_config = hf["vision_config"]
    dtype = vision_config.get("dtype") or hf.get("dtype") or hf.get("torch_dtype")
    tower_module = module_of(tower_kind(hf))
    return tower_module.config(vision_config | ({"dtype": dtype} if dtype else {}), hf)


def read_rule(
    folder: Path,
    hf: Mapping[str, Any],
    tower: Tower,
    processor_overrides: Mapping[str, Any] | None = None,
) -> ImageRule:
    """How the model of a folder turns an image into patches."""
    model_type = hf["model_type"]
    size_keys = SIZE_KEYS.get(model_type, ())
    if unknown := set(processor_overrides or ()) - set(size_keys):
        raise ModelError(
            f"mm_processor_kwargs has {min(unknown)!r}; of {model_type} models it can have "
            f"{', '.join(size_keys) or 'nothing'}"
        )
    preprocessor = {**read_preprocessor(folder), **(processor_overrides or {})}
    return rule_from_config(model_type, preprocessor, patch=tower.patch, merge=tower.merge)


def image_layout(folder: Path, hf: Mapping[str, Any]) -> ImageLayout:
    """The tokens of an image in a prompt of a model with this config.json."""
    model_type = hf["model_type"]
    placeholder = hf.get("image_token_id", hf.get("image_token_index"))
    if type(placeholder) is not int:
        raise ModelError(f"{folder / 'config.json'} lacks 'image_token_id', the placeholder")
    if model_type == "gemma3":
        first = hf.get("boi_token_index", 255999)
        tokens = first, placeholder, hf.get("eoi_token_index", 256000)
        return ImageLayout(placeholder, (first,), replaced=first, tokens=tokens, around="\n\n")
    if model_type == "gemma4":
        tokens = hf.get("boi_token_id", 255999), placeholder, hf.get("eoi_token_id", 258882)
        return ImageLayout(placeholder, (placeholder,), replaced=placeholder, tokens=tokens)
    brackets = hf.get("vision_start_token_id"), placeholder, hf.get("vision_end_token_id")
    prompt_tokens = tuple(token for token in brackets if token is not None)
    if model_type not in ROW_TOKENS:
        return ImageLayout(placeholder, prompt_tokens)
    row_break, end = special_tokens(folder, ROW_TOKENS[model_type])
    return ImageLayout(placeholder, prompt_tokens, row_break, end)


def span_layers(hf: Mapping[str, Any]) -> str | None:
    """The layers in which an image's tokens see all of it, see `Multimodal.span_layers`."""
    text = hf.get("text_config") or {}
    if hf["model_type"] == "gemma4" and text.get("use_bidirectional_attention") == "vision":
        return "window"
    return "all" if hf["model_type"] == "gemma3" else None


def text_replacement(layout: ImageLayout, token_text: Callable[[int], str]) -> tuple[str, str]:
    """The text of an image in a prompt, and the text that is tokenized in its place."""
    if layout.replaced is None:
        return "", ""
    image = "".join(map(token_text, layout.tokens))
    return token_text(layout.replaced), layout.around + image + layout.around


def special_tokens(folder: Path, texts: Sequence[str]) -> list[int]:
    """The ids of special tokens of a folder's tokenizer."""
    if not texts:
        return []
    ids: dict[str, int] = {}
    config_path = folder / "tokenizer_config.json"
    if config_path.is_file():
        added_tokens = read_json(config_path).get("added_tokens_decoder") or {}
        ids = {entry["content"]: int(number) for number, entry in added_tokens.items()}
    if not all(text in ids for text in texts) and (folder / "tokenizer.json").is_file():
        added_tokens = read_json(folder / "tokenizer.json").get("added_tokens") or []
        ids = {entry["content"]: entry["id"] for entry in added_tokens}
    for text in texts:
        if text not in ids:
            raise ModelError(f"the tokenizer of {folder} lacks {text!r}, which images need")
    return [ids[text] for text in texts]


def has_preprocessor(folder: Path) -> bool:
    """Whether the folder says how images are read."""
    return any((folder / name).is_file() for name in (PREPROCESSOR, PROCESSOR))


def read_preprocessor(folder: Path) -> dict[str, Any]:
    """How the folder says that images are read."""
    for name in (PREPROCESSOR, PROCESSOR):
        if (folder / name).is_file():
            settings = read_json(folder / name)
            return settings.get("image_processor", settings)
    raise ModelError(f"{folder / PREPROCESSOR} is missing, which says how images are read")


def with_images(config: ModelConfig, multimodal: Multimodal) -> ModelConfig:
    """The text model as it reads images: with a rotary embedding that turns by their rows and
    columns too, and with attention in which an image sees itself whole, where the model has that.
    """
    if multimodal.sees_spans:
        tokens = multimodal.rule.max_tokens
        windows = [getattr(layer.attention, "window", None) or FAR for layer in config.layers]
        if min(windows) < tokens:
            raise ModelError(
                f"config.json: sliding_window = {min(windows)}; it must be at least the {tokens} "
                "tokens of an image, or set language_model_only"
            )
        layers = (
            replace(layer, attention=replace(layer.attention, spans=True))
            if multimodal.span_layers == "all" or getattr(layer.attention, "window", None)
            else layer
            for layer in config.layers
        )
        config = replace(config, layers=tuple(layers))
    if config.per_layer_dim:
        config = replace(config, media_token=multimodal.media_token)
    if not multimodal.sections:
        return config

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
