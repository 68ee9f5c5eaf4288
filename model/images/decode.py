"""Decodes image files to RGB with Pillow, within limits that are checked on the header."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from ..extras import import_extra
from .errors import ImageError
from .header import MAX_PIXELS, ImageHeader, read_header

if TYPE_CHECKING:
    from PIL import Image

BAND = 256  # rows that are composited at once, to need little memory


def image_size(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Width and height of an image file after its EXIF orientation, read from the header.

    Args:
        data: content of a PNG, JPEG, WebP, GIF or BMP file.
        max_pixels: largest accepted product of width and height.
    """
    return read_header(data, max_pixels).oriented_size


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode the first frame of an image file to RGB.

    The EXIF orientation is applied, transparency is composited on white, and 16-bit grey is reduced
    to its high byte.

    Args:
        data: content of a PNG, JPEG, WebP, GIF or BMP file.
        max_pixels: largest accepted product of width and height.
    """
    pillow = import_pillow()
    header = read_header(data, max_pixels)
    image = _decode_rgb(pillow, data, header)  # frees the buffers of the file's decoder
    transpose = pillow.Transpose
    method = {
        2: transpose.FLIP_LEFT_RIGHT,
        3: transpose.ROTATE_180,
        4: transpose.FLIP_TOP_BOTTOM,
        5: transpose.TRANSPOSE,
        6: transpose.ROTATE_270,
        7: transpose.TRANSVERSE,
        8: transpose.ROTATE_90,
    }.get(header.orientation)
    return image if method is None else image.transpose(method)


def import_pillow() -> Any:
    """The module PIL.Image, with the plugins of the accepted formats."""
    for format_name in ("Png", "Jpeg", "WebP", "Gif", "Bmp"):
        import_extra(f"PIL.{format_name}ImagePlugin", "images", "image input")
    return import_extra("PIL.Image", "images", "image input")


def _decode_rgb(pillow: Any, data: bytes, header: ImageHeader) -> Image.Image:
    format_name = header.format
    try:
        with pillow.open(io.BytesIO(data), formats=[format_name]) as image:
            if image.size != (header.width, header.height):
                raise ImageError(
                    f"{format_name} image has {image.size[0]} x {image.size[1]} pixels; its "
                    f"header must state the same size, not {header.width} x {header.height}"
                )
            image.load()
            return to_rgb(image)
    except (ImageError, MemoryError):
        raise
    except pillow.UnidentifiedImageError:
        raise ImageError(f"{format_name} image is damaged or truncated in its header") from None
    except Exception as error:  # decoders of damaged data raise errors of many types
        raise ImageError(f"{format_name} image is damaged or truncated: {error}") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB, on white where it is transparent; 16 bits are scaled to 8."""
    pillow = import_pillow()
    if image.mode.startswith("I"):
        return _from_sixteen_bits(pillow, image)
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    if image.mode != "RGBA":
        image = image.convert("RGBA")
    opaque = pillow.new("RGB", image.size)
    for top in range(0, image.height, BAND):
        band = image.crop((0, top, image.width, min(top + BAND, image.height)))
        white = pillow.new("RGBA", band.size, (255, 255, 255, 255))
        opaque.paste(pillow.alpha_composite(white, band).convert("RGB"), (0, top))
    return opaque


def _from_sixteen_bits(pillow: Any, image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    grey = (values >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[values == transparent] = 255
    return pillow.fromarray(grey).convert("RGB")
