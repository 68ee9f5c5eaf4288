"""Compares patches, grids and numbers of tokens with those of transformers' Pillow processors."""

import io
import math
from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from quire.model.images.decode import decode
from quire.model.images.decoder import ImageDecoder
from quire.model.images.errors import ImageError
from quire.model.images.pixels import patches, value_table
from quire.model.images.rule import ImageRule, rule_from_config

EXTREME_SIZES = [(1, 1), (1, 2), (3, 1), (1, 200), (200, 1), (900, 5), (4, 700), (28, 28), (27, 29)]
EXTREME_SIZES += [(32, 32), (48, 96), (896, 896), (900, 700), (700, 900), (1600, 40), (30, 1999)]


def sizes() -> list[tuple[int, int]]:
    random = np.random.default_rng(7)
    small_sizes = random.integers(1, 100, (10, 2))
    large_sizes = random.integers(100, (900, 700), (15, 2))
    random_sizes = [(int(width), int(height)) for width, height in [*small_sizes, *large_sizes]]
    return EXTREME_SIZES + [
        (width, height)
        for width, height in random_sizes
        if max(width, height) <= 200 * min(width, height)
    ]


SIZES = sizes()


def make_image(width: int, height: int) -> Image.Image:
    """Noise, or a gradient for every third size."""
    if (width + height) % 3 == 0:
        rows = np.linspace(0, 255, height)[:, None, None]
        columns = np.linspace(255, 0, width)[None, :, None]
        pixels = (rows + columns) / 2 + np.array([0, 7, 60])
        return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    random = np.random.default_rng(width * 10_000 + height)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


def float_patches(image: Image.Image, rule: ImageRule) -> np.ndarray:
    """Patches after the value table, float32 [num_patches, patch, patch, 3]."""
    table = value_table(rule)
    cut = patches(image, rule)
    return np.stack([table[cut[..., channel], channel] for channel in range(3)], axis=-1)


def in_raster_order(grouped: np.ndarray, rows: int, columns: int, merge: int) -> np.ndarray:
    """Patches in row-major order of the whole image, [rows, columns, patch, patch, 3]."""
    shape = (rows // merge, columns // merge, merge, merge, *grouped.shape[1:])
    return grouped.reshape(shape).swapaxes(1, 2).reshape(rows, columns, *grouped.shape[1:])


def whole_image(image: Image.Image, rule: ImageRule) -> np.ndarray:
    """Float32 [3, height, width]."""
    rows, columns = rule.grid(*image.size)
    raster = in_raster_order(float_patches(image, rule), rows, columns, rule.merge)
    pixels_HWC = raster.swapaxes(1, 2).reshape(rows * rule.patch, columns * rule.patch, 3)
    return pixels_HWC.transpose(2, 0, 1)


def require_equal_bits(ours: np.ndarray, reference: np.ndarray) -> None:
    assert ours.dtype == reference.dtype == np.float32
    assert ours.shape == reference.shape
    assert np.array_equal(
        np.ascontiguousarray(ours).view(np.uint32), np.ascontiguousarray(reference).view(np.uint32)
    )


@dataclass(frozen=True)
class QwenCase:
    model_type: str
    config: dict


QWEN_CASES = {
    "qwen3": QwenCase(
        "qwen3_5",
        {
            "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
            "patch_size": 16,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    ),
    "qwen2_5": QwenCase("qwen2_5_vl", {"min_pixels": 3136, "max_pixels": 12_845_056}),
    "small": QwenCase(
        "qwen3_vl",
        {
            "size": {"shortest_edge": 4096, "longest_edge": 90_000},
            "patch_size": 16,
            "resample": 2,
            "rescale_factor": 1 / 127.5,
            "image_mean": [1.0, 0.9, 1.1],
            "image_std": [1.0, 0.7, 0.3],
        },
    ),
    "defaults": QwenCase("qwen3_vl_moe", {}),
}


@pytest.mark.parametrize("case", QWEN_CASES.values(), ids=QWEN_CASES)
def test_qwen_patches_equal_those_of_transformers(case):
    processor = Qwen2VLImageProcessorPil(**case.config)
    rule = rule_from_config(case.model_type, case.config)
    for width, height in SIZES:
        image = make_image(width, height)
        reference = processor(images=[image], return_tensors="np")
        rows, columns = rule.grid(width, height)
        assert reference["image_grid_thw"].tolist() == [[1, rows, columns]]
        assert rule.num_tokens(width, height) * rule.merge**2 == rows * columns
        assert processor.get_number_of_image_patches(height, width) == rows * columns
        frames = reference["pixel_values"].reshape(-1, 3, 2, rule.patch, rule.patch)
        ours = float_patches(image, rule).transpose(0, 3, 1, 2)
        require_equal_bits(ours, frames[:, :, 0])
        require_equal_bits(ours, frames[:, :, 1])


def test_qwen_refuses_the_ratios_that_transformers_refuses():
    processor = Qwen2VLImageProcessorPil()
    rule = rule_from_config("qwen2_5_vl", {})
    for width, height in [(1, 201), (1000, 4)]:
        with pytest.raises(ValueError, match="aspect ratio"):
            processor(images=[make_image(width, height)])
        with pytest.raises(ImageError, match="200 times"):
            rule.grid(width, height)


PIXTRAL_CASES = {
    "mistral3": ("mistral3", {"patch_size": {"height": 14, "width": 14}}, 2, 1540),
    "mistral3-small": ("mistral3", {"patch_size": 14}, 2, 300),
    "pixtral": ("pixtral", {}, 1, 1024),
}


@pytest.mark.parametrize("case", PIXTRAL_CASES.values(), ids=PIXTRAL_CASES)
def test_pixtral_patches_equal_those_of_transformers(case):
    model_type, patch_config, merge, longest = case
    config = patch_config | {"size": {"longest_edge": longest}}
    rule = rule_from_config(model_type, config)
    assert rule.merge == merge
    # The processor's caller multiplies the patch by the side of a group.
    multiple = rule.patch * merge
    processor = PixtralImageProcessorPil(
        **config | {"patch_size": {"height": multiple, "width": multiple}}
    )
    for width, height in SIZES:
        image = make_image(width, height)
        reference = processor(images=[image], return_tensors="np")
        rows, columns = rule.grid(width, height)
        assert list(reference["image_sizes"][0]) == [rows * rule.patch, columns * rule.patch]
        token_rows = reference["image_sizes"][0][0] // multiple
        token_columns = reference["image_sizes"][0][1] // multiple
        assert rule.num_tokens(width, height) == token_rows * token_columns
        require_equal_bits(whole_image(image, rule), reference["pixel_values"][0])


def test_gemma3_patches_equal_those_of_transformers():
    config = {
        "size": {"height": 896, "width": 896},
        "resample": 2,
        "do_convert_rgb": None,
        "do_pan_and_scan": None,
        "image_seq_length": 256,
    }
    processor = Gemma3ImageProcessorPil(**config)
    rule = rule_from_config("gemma3", config)
    for width, height in SIZES:
        image = make_image(width, height)
        reference = processor(images=[image], return_tensors="np")
        assert rule.grid(width, height) == (64, 64)
        assert rule.num_tokens(width, height) == 256
        require_equal_bits(whole_image(image, rule), reference["pixel_values"][0])


@pytest.mark.parametrize("max_tokens", [70, 280])
def test_gemma4_patches_equal_those_of_transformers(max_tokens):
    config = {"max_soft_tokens": max_tokens, "do_normalize": False}
    processor = Gemma4ImageProcessorPil(**config)
    rule = rule_from_config("gemma4", config)
    num_refused = 0
    for width, height in SIZES:
        image = make_image(width, height)
        try:
            reference = processor(images=[image], return_tensors="np")
        except ValueError:
            num_refused += 1
            with pytest.raises(ImageError):
                rule.grid(width, height)
            continue
        rows, columns = rule.grid(width, height)
        num_patches = rows * columns
        positions = reference["image_position_ids"][0]
        assert positions[num_patches - 1].tolist() == [columns - 1, rows - 1]
        assert (positions[num_patches:] == -1).all()
        assert reference["num_soft_tokens_per_image"] == [rule.num_tokens(width, height)]
        ours = in_raster_order(float_patches(image, rule), rows, columns, rule.merge)
        require_equal_bits(
            ours.reshape(num_patches, -1), reference["pixel_values"][0, :num_patches]
        )
    assert num_refused < len(SIZES) // 4


@pytest.mark.parametrize("mode", ["RGB", "L", "LA", "1", "P", "RGBA", "CMYK"])
def test_decoded_modes_equal_those_of_transformers(mode):
    image = make_image(90, 301).convert(mode)
    if mode == "RGBA":
        alpha = np.random.default_rng(0).integers(0, 256, (301, 90), dtype=np.uint8)
        image.putalpha(Image.fromarray(alpha))
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    options = {"transparency": 3} if mode == "P" else {}
    image.save(file, "JPEG" if mode == "CMYK" else "PNG", exif=exif, **options)
    reference = convert_to_rgb(ImageOps.exif_transpose(Image.open(file)), return_numpy=True)
    assert np.array_equal(np.asarray(decode(file.getvalue())), reference)


def test_worker_process_returns_the_values_of_transformers():
    processor = Qwen2VLImageProcessorPil()
    rule = rule_from_config("qwen2_5_vl", {})
    file = io.BytesIO()
    make_image(301, 200).save(file, "JPEG", quality=85)
    result = ImageDecoder().patches(file.getvalue(), rule)
    reference = processor(images=[Image.open(file)], return_tensors="np")
    assert reference["image_grid_thw"].tolist() == [[1, result.rows, result.columns]]
    table = value_table(rule)
    values = table[result.patches, np.arange(3)].transpose(0, 3, 1, 2)
    frames = reference["pixel_values"].reshape(-1, 3, 2, rule.patch, rule.patch)
    require_equal_bits(values, frames[:, :, 0])
    assert math.prod(result.patches.shape) * 2 == reference["pixel_values"].size
