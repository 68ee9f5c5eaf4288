"""Rules of model families for turning images into patches. The module reads no files."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import ModelError
from .errors import ImageError

BILINEAR = 2  # Pillow's numbers of resampling filters
BICUBIC = 3

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
GEMMA4_MAX_TOKENS = (70, 140, 280, 560, 1120)


@dataclass(frozen=True)
class AreaSizing:
    """Rounds both sides to multiples of a factor, then scales the area into a range (Qwen)."""

    factor: int
    min_pixels: int
    max_pixels: int
    max_ratio: int = 200

    def size(self, width: int, height: int) -> tuple[int, int]:
        if max(width, height) > self.max_ratio * min(width, height):
            raise ImageError(
                f"image has {width} x {height} pixels; its longer side must be at most "
                f"{self.max_ratio} times the shorter one"
            )
        factor = self.factor
        new_width = round(width / factor) * factor
        new_height = round(height / factor) * factor
        if new_width * new_height > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            new_width = max(factor, math.floor(width / shrink / factor) * factor)
            new_height = max(factor, math.floor(height / shrink / factor) * factor)
        elif new_width * new_height < self.min_pixels:
            enlarge = math.sqrt(self.min_pixels / (height * width))
            new_width = math.ceil(width * enlarge / factor) * factor
            new_height = math.ceil(height * enlarge / factor) * factor
        return new_width, new_height


@dataclass(frozen=True)
class LongestSide:
    """Shrinks the longer side to a maximum, then rounds both sides up to multiples (Pixtral)."""

    longest: int
    multiple: int

    def size(self, width: int, height: int) -> tuple[int, int]:
        ratio = max(height / self.longest, width / self.longest)
        new_width = math.floor(width / ratio) if ratio > 1 else width
        new_height = math.floor(height / ratio) if ratio > 1 else height
        if not new_width or not new_height:
            raise ImageError(
                f"image has {width} x {height} pixels; its shorter side is lost when the longer "
                f"one is shrunk to {self.longest}"
            )
        multiple = self.multiple
        return -(-new_width // multiple) * multiple, -(-new_height // multiple) * multiple


@dataclass(frozen=True)
class FixedSize:
    """Stretches every image to the same square (Gemma 3)."""

    side: int

    def size(self, width: int, height: int) -> tuple[int, int]:
        return self.side, self.side


@dataclass(frozen=True)
class TokenBudget:
    """Scales the area to a number of tokens and rounds both sides down (Gemma 4).

    Each token covers a square of `multiple` x `multiple` pixels.
    """

    multiple: int
    max_tokens: int

    def size(self, width: int, height: int) -> tuple[int, int]:
        multiple = self.multiple
        max_pixels = self.max_tokens * multiple**2
        scale = math.sqrt(max_pixels / (height * width))
        new_width = math.floor(scale * width / multiple) * multiple
        new_height = math.floor(scale * height / multiple) * multiple
        if not new_width:
            new_width = multiple
            new_height = min(height // width, self.max_tokens) * multiple
        elif not new_height:
            new_height = multiple
            new_width = min(width // height, self.max_tokens) * multiple
        if new_width * new_height > max_pixels:
            raise ImageError(
                f"image has {width} x {height} pixels; resized to {new_width} x {new_height}, it "
                f"exceeds {self.max_tokens} tokens"
            )
        return new_width, new_height


Sizing = AreaSizing | LongestSide | FixedSize | TokenBudget
SIZINGS: dict[str, type[Sizing]] = {
    sizing.__name__: sizing for sizing in (AreaSizing, LongestSide, FixedSize, TokenBudget)
}


@dataclass(frozen=True)
class ImageRule:
    """How a model turns an image into patches.

    Args:
        patch: side of a patch in pixels.
        merge: side in patches of the square group that becomes one token.
        mean: per channel, subtracted after rescaling.
        std: per channel, divides afterwards.
        resample: Pillow's number of the resampling filter.
        sizing: how the size after resizing follows from the size of an image.
        rescale: factor for bytes before normalisation.
    """

    patch: int
    merge: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resample: int
    sizing: Sizing
    rescale: float = 1 / 255

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches of an image that has this size before resizing."""
        new_width, new_height = self.sizing.size(width, height)
        return new_height // self.patch, new_width // self.patch

    def num_tokens(self, width: int, height: int) -> int:
        """Tokens of an image that has this size before resizing, without separators of rows."""
        rows, columns = self.grid(width, height)
        return (rows // self.merge) * (columns // self.merge)

    @property
    def max_tokens(self) -> int:
        """An upper bound of an image's tokens."""
        sizing = self.sizing
        side = self.patch * self.merge
        if isinstance(sizing, AreaSizing):
            most, fewest = (pixels / side**2 for pixels in (sizing.max_pixels, sizing.min_pixels))
            ratio = sizing.max_ratio
            one_row = math.sqrt(most * ratio)  # of the longest image that is one token high
            # both sides are rounded up
            enlarged = fewest + math.sqrt(fewest * ratio) + math.sqrt(fewest / ratio) + 1
            return math.floor(max(1, most, one_row, enlarged))
        if isinstance(sizing, TokenBudget):
            return sizing.max_tokens
        if isinstance(sizing, FixedSize):
            return (sizing.side // side) ** 2
        return (-(-sizing.longest // side)) ** 2

    @property
    def has_fixed_size(self) -> bool:
        """Whether all images have the same number of tokens."""
        return isinstance(self.sizing, FixedSize)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; the class of `sizing` is in its key `class`."""
        sizing = {"class": type(self.sizing).__name__, **asdict(self.sizing)}
        return asdict(self) | {"sizing": sizing}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ImageRule":
        """The rule for which `to_json` returned these fields."""
        sizing = dict(fields["sizing"])
        sizing_class = SIZINGS[sizing.pop("class")]
        converted = {
            "sizing": sizing_class(**sizing),
            "mean": tuple(fields["mean"]),
            "std": tuple(fields["std"]),
        }
        return cls(**{**fields, **converted})


def rule_from_config(
    model_type: str,
    preprocessor_config: Mapping[str, Any],
    *,
    patch: int | None = None,
    merge: int | None = None,
) -> ImageRule:
    """Read the image rule of a checkpoint.

    Args:
        model_type: `model_type` of the checkpoint's config.json.
        preprocessor_config: the content of preprocessor_config.json, or the object
            `image_processor` of processor_config.json. A missing key or null means the default of
            the family's processor in transformers.
        patch: `patch_size` of the model's vision config, used if the preprocessor config has none.
        merge: side of the group of patches for a token by the model's config, used likewise.
    """
    if model_type not in FAMILIES:
        raise ModelError(
            f"model type {model_type!r} has no image rule; supported are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    config = ConfigReader(preprocessor_config)
    config.require_processor(family.processors)
    config.require_supported_steps()
    is_normalized = config.flag("do_normalize", default=family.is_normalized)
    if family.is_normalized and not is_normalized:
        raise ModelError("do_normalize is False; only true is supported")
    geometry = family.read_geometry(config, patch, merge)
    return ImageRule(
        patch=geometry.patch,
        merge=geometry.merge,
        mean=config.channels("image_mean", family.mean) if is_normalized else (0.0, 0.0, 0.0),
        std=config.channels("image_std", family.std) if is_normalized else (1.0, 1.0, 1.0),
        resample=config.choice("resample", family.resample, (BILINEAR, BICUBIC)),
        sizing=geometry.sizing,
        rescale=config.number("rescale_factor", 1 / 255),
    )


class ConfigReader:
    """Reads typed values of a preprocessor config; null counts as missing."""

    def __init__(self, config: Mapping[str, Any]):
        self.values = {key: value for key, value in config.items() if value is not None}

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{key} is {value!r}; it must be true or false")
        return value

    def integer(self, key: str, default: int) -> int:
        return _positive_integer(key, self.values.get(key, default))

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        if not _is_number(value) or value <= 0:
            raise ModelError(f"{key} is {value!r}; it must be a positive number")
        return float(value)

    def choice(self, key: str, default: int, choices: tuple[int, ...]) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or value not in choices:
            supported = ", ".join(map(str, choices))
            raise ModelError(f"{key} is {value!r}; supported are {supported}")
        return value

    def channels(self, key: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
        value = self.values.get(key, default)
        numbers = [value] * 3 if _is_number(value) else value
        is_valid = isinstance(numbers, list | tuple) and len(numbers) == 3
        if not is_valid or not all(map(_is_number, numbers)):
            raise ModelError(f"{key} is {value!r}; it must be three numbers, one per channel")
        if key == "image_std" and not all(numbers):
            raise ModelError(f"{key} is {value!r}; it must not contain 0")
        red, green, blue = map(float, numbers)
        return red, green, blue

    def side(self, key: str, default: int) -> int:
        """An integer, or an object with equal `height` and `width`."""
        value = self.values.get(key, default)
        if isinstance(value, Mapping):
            width = value.get("width")
            if set(value) != {"height", "width"} or value["height"] != width:
                raise ModelError(
                    f"{key} is {dict(value)!r}; only equal height and width are supported"
                )
            value = width
        return _positive_integer(key, value)

    def size(self, default: Mapping[str, int]) -> dict[str, Any]:
        """The object `size`, without nulls."""
        value = self.values.get("size", default)
        if not isinstance(value, Mapping):
            raise ModelError(f"size is {value!r}; it must be an object such as {dict(default)!r}")
        return {key: item for key, item in value.items() if item is not None}

    def require_processor(self, names: tuple[str, ...]) -> None:
        """Raise if another processor class wrote the file: its rule differs."""
        name = self.values.get("image_processor_type", names[0])
        if str(name).removesuffix("Fast").removesuffix("Pil") not in names:
            raise ModelError(
                f"image_processor_type is {name!r}; {' or '.join(names)} is supported here"
            )

    def require_supported_steps(self) -> None:
        for key in ("do_resize", "do_rescale", "do_convert_rgb"):
            if not self.flag(key, default=True):
                raise ModelError(f"{key} is False; only true is supported")
        for key in ("do_center_crop", "do_pan_and_scan"):
            if self.flag(key, default=False):
                raise ModelError(f"{key} is True; only false is supported")
        if "pad_size" in self.values:
            raise ModelError(f"pad_size is {self.values['pad_size']!r}; padding is not supported")


@dataclass(frozen=True)
class Geometry:
    """Patches, groups and sizing that a preprocessor config describes."""

    patch: int
    merge: int
    sizing: Sizing


@dataclass(frozen=True)
class Family:
    """Defaults of a family's processor in transformers, and the reader of its geometry.

    Args:
        processors: accepted values of `image_processor_type`, without the suffix `Fast`.
        read_geometry: gets the config, and `patch` and `merge` of the model's config or None.
    """

    processors: tuple[str, ...]
    read_geometry: Callable[[ConfigReader, int | None, int | None], Geometry]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resample: int
    is_normalized: bool = True


def _qwen_geometry(config: ConfigReader, patch: int | None, merge: int | None) -> Geometry:
    patch = config.integer("patch_size", patch or 14)
    merge = config.integer("merge_size", merge or 2)
    config.choice("temporal_patch_size", 2, (2,))
    size = config.size({"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280})
    unknown_keys = set(size) - {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}
    if unknown_keys:
        raise ModelError(
            f"size is {size!r}; it must have the keys shortest_edge and longest_edge, in pixels"
        )
    min_pixels = config.values.get("min_pixels", size.get("shortest_edge"))
    max_pixels = config.values.get("max_pixels", size.get("longest_edge"))
    sizing = AreaSizing(
        factor=patch * merge,
        min_pixels=_positive_integer("min_pixels or size.shortest_edge", min_pixels),
        max_pixels=_positive_integer("max_pixels or size.longest_edge", max_pixels),
    )
    if sizing.min_pixels > sizing.max_pixels:
        raise ModelError(
            f"size has a minimum of {sizing.min_pixels} pixels; it must be at most the maximum, "
            f"{sizing.max_pixels}"
        )
    return Geometry(patch, merge, sizing)


def _pixtral_geometry(config: ConfigReader, patch: int | None, merge: int | None) -> Geometry:
    patch = config.side("patch_size", patch or 16)
    merge = merge or 1
    size = config.size({"longest_edge": 1024})
    if set(size) != {"longest_edge"}:
        raise ModelError(f"size is {size!r}; only longest_edge is supported")
    longest = _positive_integer("size.longest_edge", size["longest_edge"])
    return Geometry(patch, merge, LongestSide(longest, multiple=patch * merge))


def _mistral3_geometry(config: ConfigReader, patch: int | None, merge: int | None) -> Geometry:
    return _pixtral_geometry(config, patch, merge or 2)


def _gemma3_geometry(config: ConfigReader, patch: int | None, merge: int | None) -> Geometry:
    patch = patch or 14
    size = config.size({"height": 224, "width": 224})
    if set(size) != {"height", "width"} or size["height"] != size["width"]:
        raise ModelError(f"size is {size!r}; only equal height and width are supported")
    side = _positive_integer("size.height", size["height"])
    num_tokens = config.integer("image_seq_length", 256)
    tokens_per_side = math.isqrt(num_tokens)
    merge = merge or max(1, side // patch // tokens_per_side)
    if tokens_per_side**2 != num_tokens or tokens_per_side * merge * patch != side:
        raise ModelError(
            f"size is {size!r}; {num_tokens} tokens of {merge} x {merge} patches of {patch} pixels "
            "do not make that square"
        )
    return Geometry(patch, merge, FixedSize(side))


def _gemma4_geometry(config: ConfigReader, patch: int | None, merge: int | None) -> Geometry:
    patch = config.integer("patch_size", patch or 16)
    merge = config.integer("pooling_kernel_size", merge or 3)
    max_tokens = config.choice("max_soft_tokens", 280, GEMMA4_MAX_TOKENS)
    return Geometry(patch, merge, TokenBudget(patch * merge, max_tokens))


def _positive_integer(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"{key} is {value!r}; it must be a positive integer")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_QWEN = Family(
    ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor"),
    _qwen_geometry,
    CLIP_MEAN,
    CLIP_STD,
    BICUBIC,
)
_PIXTRAL = ("PixtralImageProcessor",)
FAMILIES = {
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "mistral3": Family(_PIXTRAL, _mistral3_geometry, CLIP_MEAN, CLIP_STD, BICUBIC),
    "pixtral": Family(_PIXTRAL, _pixtral_geometry, CLIP_MEAN, CLIP_STD, BICUBIC),
    "gemma3": Family(("Gemma3ImageProcessor",), _gemma3_geometry, HALF, HALF, BILINEAR),
    "gemma4": Family(
        ("Gemma4ImageProcessor",),
        _gemma4_geometry,
        (0.0, 0.0, 0.0),
        (1.0, 1.0, 1.0),
        BICUBIC,
        is_normalized=False,
    ),
}
