"""Image files to patches: decoding, hostile files, rules of model families, worker processes."""

import contextlib
import io
import struct
import sys
import time
import zlib
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from quire.model.errors import ModelError
from quire.model.images.decode import decode, image_size
from quire.model.images.decoder import ImageDecoder, patches_digest
from quire.model.images.errors import ImageError
from quire.model.images.header import read_header
from quire.model.images.pixels import patches, resize, value_table
from quire.model.images.rule import (
    AreaSizing,
    FixedSize,
    ImageRule,
    LongestSide,
    TokenBudget,
    rule_from_config,
)

HALF = (0.5, 0.5, 0.5)
RULE = ImageRule(8, 2, HALF, HALF, 3, AreaSizing(16, 16 * 16, 64 * 64))
QWEN3 = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
EXIF_ORIENTATION = 0x0112


def noise(width: int, height: int, channels: int = 3) -> np.ndarray:
    random = np.random.default_rng(width * 1000 + height)
    return random.integers(0, 256, (height, width, channels), dtype=np.uint8)


def encode(image: Image.Image, format_name: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, format_name, **options)
    return file.getvalue()


def noise_file(format_name: str, width: int = 40, height: int = 30) -> bytes:
    return encode(Image.fromarray(noise(width, height)), format_name)


def png_chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


def grey_png(width: int, height: int, bits: int = 1) -> bytes:
    """A black PNG, compressed row by row."""
    header = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    compressor = zlib.compressobj()
    row = bytes(1 + -(-width * bits // 8))
    compressed = b"".join(compressor.compress(row) for _ in range(height))
    compressed += compressor.flush()
    chunks = png_chunk(b"IHDR", header) + png_chunk(b"IDAT", compressed) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


# ---- decoding


@pytest.mark.parametrize("format_name", FORMATS)
def test_decoded_pixels_equal_those_of_pillow(format_name):
    data = noise_file(format_name)
    assert image_size(data) == (40, 30)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(np.asarray(decode(data)), expected)


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (257, 129), (3, 500)])
@pytest.mark.parametrize("format_name", FORMATS)
def test_header_size_equals_decoded_size(format_name, size):
    data = noise_file(format_name, *size)
    assert image_size(data) == decode(data).size == size


@pytest.mark.parametrize("options", [{"lossless": True}, {"quality": 80}, {"exif": b"Exif\0\0"}])
def test_webp_header_size_is_read_from_all_kinds_of_chunks(options):
    data = encode(Image.fromarray(noise(300, 7)), "WEBP", **options)
    assert image_size(data) == decode(data).size == (300, 7)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format_name", ["PNG", "JPEG", "WEBP"])
def test_exif_orientation_is_applied_to_size_and_pixels(format_name, orientation):
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = orientation
    data = encode(Image.fromarray(noise(40, 30)), format_name, exif=exif)
    reference = Image.open(io.BytesIO(data))
    reference.load()
    method = [None, None, *(Image.Transpose(number) for number in (0, 3, 1, 5, 4, 6, 2))][
        orientation
    ]
    expected = reference.convert("RGB")
    if method is not None:
        expected = expected.transpose(method)
    image = decode(data)
    assert image_size(data) == image.size == ((30, 40) if orientation >= 5 else (40, 30))
    assert np.array_equal(np.asarray(image), np.asarray(expected))


def test_exif_chunk_after_the_pixels_of_a_png_is_applied():
    exif = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    data = noise_file("PNG")
    end = png_chunk(b"IEND", b"")
    data = data.removesuffix(end) + png_chunk(b"eXIf", exif) + end
    assert image_size(data) == decode(data).size == (30, 40)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")  # of Pillow
@pytest.mark.parametrize("exif", [b"", b"MM", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff"])
def test_damaged_exif_means_no_rotation(exif):
    data = encode(Image.fromarray(noise(40, 30)), "JPEG", exif=b"Exif\0\0" + exif)
    assert image_size(data) == decode(data).size == (40, 30)


@pytest.mark.parametrize("format_name", ["PNG", "WEBP"])
def test_alpha_is_composited_on_white(format_name):
    rgba = noise(20, 300, channels=4)  # more rows than are composited at once
    data = encode(Image.fromarray(rgba), format_name, lossless=True, exact=True)
    pixels = np.asarray(decode(data)).astype(float)
    alpha = rgba[..., 3:] / 255
    assert np.abs(pixels - (rgba[..., :3] * alpha + 255 * (1 - alpha))).max() <= 1
    image = Image.fromarray(rgba)
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    assert np.array_equal(pixels, np.asarray(Image.alpha_composite(white, image).convert("RGB")))


@pytest.mark.parametrize("format_name", ["PNG", "GIF"])
def test_transparent_palette_entry_becomes_white(format_name):
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.putpixel((2, 1), 0)
    pixels = np.asarray(decode(encode(image, format_name, transparency=0)))
    assert pixels[1, 2].tolist() == [255, 255, 255]
    assert pixels[0, 0].tolist() == [10, 20, 30]


def test_transparent_colour_of_an_rgb_png_becomes_white():
    image = Image.new("RGB", (2, 1), (1, 2, 3))
    image.putpixel((1, 0), (4, 5, 6))
    pixels = np.asarray(decode(encode(image, "PNG", transparency=(4, 5, 6))))
    assert pixels.tolist() == [[[1, 2, 3], [255, 255, 255]]]


def test_cmyk_jpeg_is_converted():
    image = Image.fromarray(noise(32, 32)).convert("CMYK")
    data = encode(image, "JPEG")
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(np.asarray(decode(data)), expected)


@pytest.mark.parametrize("mode", ["L", "LA", "1", "P"])
def test_grey_and_palette_pngs_are_converted(mode):
    image = Image.fromarray(noise(16, 8)).convert(mode)
    pixels = np.asarray(decode(encode(image, "PNG")))
    assert np.array_equal(pixels, np.asarray(image.convert("RGB")))


def test_sixteen_bit_grey_keeps_the_high_byte():
    values = np.array([[0, 255, 256, 40_000, 65_535]], dtype=np.uint16)
    pixels = np.asarray(decode(encode(Image.fromarray(values), "PNG")))
    assert pixels[..., 0].tolist() == [[0, 0, 1, 156, 255]]
    assert np.array_equal(pixels[..., 0], pixels[..., 2])


def test_transparent_value_of_a_sixteen_bit_grey_png_becomes_white():
    values = np.array([[1000, 2000]], dtype=np.uint16)
    data = encode(Image.fromarray(values), "PNG", transparency=2000)
    assert np.asarray(decode(data))[..., 1].tolist() == [[3, 255]]


def test_first_frame_of_an_animated_gif_is_decoded():
    frames = [Image.new("RGB", (6, 6), color) for color in ("red", "blue", "green")]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:], comment=b"c" * 600)
    assert np.asarray(decode(data))[3, 3].tolist() == [255, 0, 0]


def test_gif_frame_beyond_the_screen_enlarges_the_image():
    data = bytearray(noise_file("GIF", 40, 30))
    data[6:10] = struct.pack("<HH", 5, 5)
    assert image_size(bytes(data)) == decode(bytes(data)).size == (40, 30)


def test_file_with_two_formats_is_decoded_as_what_it_starts_with():
    png = noise_file("PNG")
    jpeg = noise_file("JPEG")
    assert read_header(png + jpeg).format == "PNG"
    assert np.array_equal(np.asarray(decode(png + jpeg)), np.asarray(decode(png)))
    assert read_header(jpeg + png).format == "JPEG"
    assert np.array_equal(np.asarray(decode(jpeg + png)), np.asarray(decode(jpeg)))


# ---- refused files


def test_png_of_900_million_pixels_in_100_kilobytes_is_refused_by_its_header():
    data = grey_png(30_000, 30_000)
    assert len(data) < 200_000
    for read in (image_size, decode):
        with pytest.raises(
            ImageError, match=r"30000 x 30000 pixels; at most 50,000,000 are accepted"
        ):
            read(data)


def test_max_pixels_is_a_limit_of_the_product_of_sides():
    data = noise_file("PNG", 40, 30)
    assert image_size(data, max_pixels=1200) == (40, 30)
    with pytest.raises(ImageError, match="40 x 30 pixels; at most 1,199"):
        image_size(data, max_pixels=1199)


def test_ratio_of_sides_above_200_is_refused():
    assert image_size(grey_png(1, 200)) == (1, 200)
    with pytest.raises(ImageError, match="1 x 30000 pixels; its longer side must be at most 200"):
        image_size(grey_png(1, 30_000))


@pytest.mark.parametrize("kept", [0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("format_name", FORMATS)
def test_truncated_files_are_refused(format_name, kept):
    data = noise_file(format_name, 80, 60)
    with pytest.raises(ImageError):
        decode(data[: int(len(data) * kept)])


@pytest.mark.parametrize("format_name", FORMATS)
def test_damaged_files_raise_nothing_but_image_errors(format_name):
    data = noise_file(format_name, 24, 24)
    random = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(data)
        for position in random.integers(0, min(len(data), 200), 4):
            damaged[position] = random.integers(0, 256)
        try:
            size = image_size(bytes(damaged))
            assert decode(bytes(damaged)).size == size
        except ImageError:
            pass


@pytest.mark.parametrize(
    "data",
    [
        b"<svg width='10' height='10'/>",
        b"%PDF-1.7\n1 0 obj",
        b"II*\0\x08\0\0\0",  # TIFF
        b"P6 1 1 255 abc",
        b"\0\0\0\x1cftypavif",
        b"RIFF\0\0\0\0WAVE",
        b"x",
    ],
    ids=["svg", "pdf", "tiff", "ppm", "avif", "wav", "text"],
)
def test_other_formats_are_refused(data):
    with pytest.raises(ImageError, match="unknown format; PNG, JPEG, WebP, GIF and BMP are"):
        decode(data)


def test_empty_file_is_refused():
    with pytest.raises(ImageError, match=r"empty \(0 bytes\)"):
        decode(b"")


def test_zero_sides_are_refused():
    with pytest.raises(ImageError, match="0 x 5 pixels; both sides must be at least 1"):
        image_size(grey_png(0, 5))


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8" + b"\xff" * 20_000_000,
        b"\xff\xd8" + b"\xff\xe0\0\x02" * 5_000_000,
        b"GIF89a\1\0\1\0\0\0\0!\xfe" + b"\1\1" * 20_000_000,
        b"GIF89a\1\0\1\0\0\0\0" + b"x" * 20_000_000,
        b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\x08" + bytes(9) + b"JUNK\0\0\0\0" * 5_000_000,
    ],
    ids=["jpeg-padding", "jpeg-segments", "gif-comments", "gif-junk", "webp-chunks"],
)
def test_headers_of_many_chunks_are_read_quickly(data):
    start = time.process_time()
    with contextlib.suppress(ImageError):
        assert image_size(data) == (1, 1)
    assert time.process_time() - start < 0.5  # seconds; without a bound it takes more than one


def test_missing_pillow_names_the_extra(monkeypatch):
    data = noise_file("PNG")
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.PngImagePlugin", None)
    for needs_pillow in (lambda: decode(data), ImageDecoder):
        with pytest.raises(ModelError, match=r"pip install 'quire\[images\]'"):
            needs_pillow()


# ---- rules


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [(1024, 768, 768), (1, 1, 64), (100, 50, 72), (4096, 4096, 16_384), (9000, 9000, 16_384)],
)
def test_qwen3_tokens_of_known_sizes(width, height, tokens):
    rule = rule_from_config("qwen3_5", QWEN3)
    assert rule.num_tokens(width, height) == tokens
    rows, columns = rule.grid(width, height)
    assert rows * columns == 4 * tokens


def test_mistral_tokens_of_known_sizes():
    config = {"patch_size": {"height": 14, "width": 14}, "size": {"longest_edge": 1540}}
    rule = rule_from_config("mistral3", config)
    assert rule.num_tokens(1024, 768) == 1036
    assert rule.grid(1024, 768) == (56, 74)
    assert rule.sizing == LongestSide(1540, 28)
    assert rule_from_config("pixtral", config).sizing == LongestSide(1540, 14)


def test_gemma_tokens_of_known_sizes():
    config = {"size": {"height": 896, "width": 896}, "do_convert_rgb": None, "resample": 2}
    rule = rule_from_config("gemma3", config)
    assert (rule.patch, rule.merge, rule.sizing) == (14, 4, FixedSize(896))
    assert rule.num_tokens(3, 500) == 256
    rule = rule_from_config("gemma4", {"max_soft_tokens": 70})
    assert rule.sizing == TokenBudget(48, 70)
    assert rule.num_tokens(1000, 1000) == 64
    assert value_table(rule)[255].tolist() == [1, 1, 1]


def test_no_image_has_more_tokens_than_the_rule_says():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        most = int(rng.integers(1, 400))
        fewest = int(rng.integers(1, most + 1))
        size = {"shortest_edge": fewest * 32 * 32, "longest_edge": most * 32 * 32}
        rule = rule_from_config("qwen3_vl", {"patch_size": 16, "size": size})
        short = int(rng.integers(1, 2000))
        long = short * int(rng.integers(1, 201))
        width, height = rng.permutation([short, long]).tolist()
        assert rule.num_tokens(width, height) <= rule.max_tokens


def test_top_level_min_and_max_pixels_override_the_size():
    config = QWEN3 | {"min_pixels": 3136, "max_pixels": 50_176}
    rule = rule_from_config("qwen2_5_vl", config)
    assert rule.sizing == AreaSizing(32, 3136, 50_176)


def test_missing_and_null_keys_mean_the_defaults_of_transformers():
    rule = rule_from_config("qwen2_5_vl", {"resample": None, "image_mean": None})
    assert (rule.patch, rule.merge, rule.resample) == (14, 2, 3)
    assert rule.sizing == AreaSizing(28, 3136, 1_003_520)
    assert rule.mean[0] == 0.48145466


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_resize": False}, "do_resize is False; only true is supported"),
        ({"do_rescale": False}, "do_rescale is False; only true"),
        ({"do_normalize": False}, "do_normalize is False; only true"),
        ({"do_convert_rgb": False}, "do_convert_rgb is False; only true"),
        ({"do_center_crop": True}, "do_center_crop is True; only false"),
        ({"resample": 0}, "resample is 0; supported are 2, 3"),
        ({"temporal_patch_size": 1}, "temporal_patch_size is 1; supported are 2"),
        ({"patch_size": "16"}, "patch_size is '16'; it must be a positive integer"),
        ({"image_mean": [0.5]}, "image_mean is .* three numbers"),
        ({"image_std": [0, 1, 1]}, "image_std is .* must not contain 0"),
        ({"size": {"height": 3, "width": 3}}, "size is .* shortest_edge and longest_edge"),
        ({"size": {"shortest_edge": 9}}, "longest_edge is None; it must be a positive integer"),
        ({"max_pixels": 3}, "minimum of 65536 pixels; it must be at most the maximum, 3"),
        ({"image_processor_type": "SiglipImageProcessor"}, "'SiglipImageProcessor'; Qwen2VL"),
    ],
)
def test_unsupported_values_of_the_preprocessor_config_are_named(changes, message):
    with pytest.raises(ModelError, match=message):
        rule_from_config("qwen3_vl", QWEN3 | changes)


def test_unsupported_values_of_other_families_are_named():
    with pytest.raises(ModelError, match="do_pan_and_scan is True"):
        rule_from_config("gemma3", {"do_pan_and_scan": True})
    with pytest.raises(ModelError, match="256 tokens of 3 x 3 patches of 14 pixels"):
        rule_from_config("gemma3", {"size": {"height": 700, "width": 700}})
    with pytest.raises(ModelError, match="patch_size is .*equal height and width"):
        rule_from_config("mistral3", {"patch_size": {"height": 14, "width": 16}})
    with pytest.raises(ModelError, match="'llava' has no image rule; supported are qwen2_5_vl"):
        rule_from_config("llava", {})


def test_images_whose_sides_vanish_are_refused():
    with pytest.raises(ImageError, match="1 x 201 pixels; .* at most 200 times"):
        AreaSizing(28, 3136, 50_176).size(1, 201)
    with pytest.raises(ImageError, match="shorter side is lost"):
        LongestSide(100, 14).size(150, 1)


@pytest.mark.parametrize(
    "sizing", [AreaSizing(16, 256, 4096), LongestSide(9, 2), FixedSize(8), TokenBudget(6, 70)]
)
def test_rules_survive_json(sizing):
    rule = replace(RULE, sizing=sizing, mean=(0.1, 0.2, 1 / 3))
    assert ImageRule.from_json(rule.to_json()) == rule


# ---- patches


def test_patches_are_ordered_by_group_and_within_groups_by_row():
    rule = replace(RULE, sizing=FixedSize(32))
    patch_numbers = np.arange(16, dtype=np.uint8).reshape(4, 4)
    pixels = patch_numbers.repeat(8, axis=0).repeat(8, axis=1)
    image = Image.fromarray(pixels).convert("RGB")
    numbers = patches(image, rule)[:, 0, 0, 0].tolist()
    assert numbers == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]


def test_patches_keep_rows_columns_and_channels():
    image = Image.fromarray(noise(48, 32))
    pixels = np.asarray(image)
    cut = patches(image, RULE)
    assert cut.shape == (24, 8, 8, 3)
    assert np.array_equal(cut[0], pixels[:8, :8])
    assert np.array_equal(cut[6], pixels[8:16, 16:24])
    assert cut.flags.c_contiguous


def test_resize_to_the_same_size_changes_nothing():
    image = Image.fromarray(noise(48, 32))
    assert np.array_equal(np.asarray(resize(image, RULE)), np.asarray(image))


def test_value_table_rescales_and_normalises_in_float32():
    table = value_table(replace(RULE, mean=(0.5, 0, 0), std=(0.5, 1, 2)))
    assert table.dtype == np.float32
    assert table[255].tolist() == [1, 1, 0.5]
    assert table[0].tolist() == [-1, 0, 0]


# ---- worker processes


@pytest.fixture(scope="module")
def decoder():
    return ImageDecoder()


@pytest.mark.parametrize("format_name", FORMATS)
def test_worker_returns_the_patches_of_this_process(decoder, format_name):
    data = noise_file(format_name, 60, 44)
    result = decoder.patches(data, RULE)
    assert (result.rows, result.columns) == RULE.grid(60, 44) == (6, 8)
    assert np.array_equal(result.patches, patches(decode(data), RULE))


def test_digest_depends_on_rule_grid_and_patches(decoder):
    result = decoder.patches(noise_file("PNG", 64, 32), RULE)
    digest = patches_digest(RULE, result.rows, result.columns, result.patches)
    assert result.digest == digest
    assert len(digest) == 32
    other_digests = {
        patches_digest(replace(RULE, mean=(0, 0, 0)), 4, 8, result.patches),
        patches_digest(RULE, 8, 4, result.patches),
        patches_digest(RULE, 4, 8, result.patches ^ 1),
    }
    assert len(other_digests | {digest}) == 4


def test_worker_reports_errors_and_goes_on(decoder):
    data = noise_file("PNG", 64, 64)
    with pytest.raises(ImageError, match="PNG image is damaged or truncated"):
        decoder.patches(data[: len(data) // 2], RULE)
    assert len(decoder.patches(data, RULE).patches) == 64


def test_worker_out_of_memory_is_replaced():
    decoder = ImageDecoder(memory=16 << 20)
    small = noise_file("PNG", 64, 64)
    decoder.patches(small, RULE)
    with pytest.raises(ImageError, match="not be decoded with 16 MiB of memory and 20 s of proc"):
        decoder.patches(grey_png(4000, 4000), RULE)
    assert len(decoder.patches(small, RULE).patches) == 64
