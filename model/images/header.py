"""Reads the format, size and EXIF orientation of an image file without decoding it.

The parsers are pure Python and work on untrusted bytes in the server's process.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import ImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # Pillow's names
ACCEPTED = "PNG, JPEG, WebP, GIF and BMP are accepted"
MAX_PIXELS = 50_000_000
MAX_RATIO = 200  # of the longer side to the shorter one
MAX_CHUNKS = 65_536  # of a file that are read; bounds the time for a hostile one

_ORIENTATION_TAG = 0x0112
_SHORT = 3  # type of an EXIF value
_JPEG_STANDALONE = {0x01, *range(0xD0, 0xDA)}  # markers without content
_JPEG_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # markers with the image's size
_JPEG_SCAN = 0xDA
_JPEG_EXIF = 0xE1


@dataclass(frozen=True)
class ImageHeader:
    """Format, stored size and EXIF orientation (1 to 8) of an image file."""

    format: str
    width: int
    height: int
    orientation: int

    @property
    def oriented_size(self) -> tuple[int, int]:
        """Width and height after the orientation is applied."""
        is_transposed = self.orientation >= 5
        return (self.height, self.width) if is_transposed else (self.width, self.height)


def read_header(data: bytes, max_pixels: int = MAX_PIXELS) -> ImageHeader:
    """Read the header of an image file and check the limits.

    Args:
        data: the file's content.
        max_pixels: largest accepted product of width and height.
    """
    if not data:
        raise ImageError(f"image is empty (0 bytes); {ACCEPTED}")
    format_name = _format(data)
    try:
        header = _PARSERS[format_name](data)
    except (struct.error, IndexError):
        raise ImageError(f"{format_name} image is damaged or truncated in its header") from None
    _check_limits(*header.oriented_size, max_pixels)
    return header


def _format(data: bytes) -> str:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data.startswith(b"BM"):
        return "BMP"
    raise ImageError(f"image starts with {data[:12]!r}, an unknown format; {ACCEPTED}")


def _check_limits(width: int, height: int, max_pixels: int) -> None:
    if width <= 0 or height <= 0:
        raise ImageError(f"image has {width} x {height} pixels; both sides must be at least 1")
    if width * height > max_pixels:
        raise ImageError(
            f"image has {width} x {height} pixels; at most {max_pixels:,} are accepted"
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ImageError(
            f"image has {width} x {height} pixels; its longer side must be at most {MAX_RATIO} "
            "times the shorter one"
        )


def _png_header(data: bytes) -> ImageHeader:
    width, height = struct.unpack_from(">II", data, 16)
    exif = b""
    if b"eXIf" in data:  # may follow the pixels
        exif = next((chunk for kind, chunk in _png_chunks(data) if kind == b"eXIf"), b"")
    return ImageHeader("PNG", width, height, _orientation(exif))


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    offset = 8
    for _ in range(MAX_CHUNKS):
        if offset + 8 > len(data):
            return
        length, kind = struct.unpack_from(">I4s", data, offset)
        if kind == b"eXIf":
            yield kind, data[offset + 8 : offset + 8 + length]
        offset += length + 12  # with length, kind and checksum


def _jpeg_header(data: bytes) -> ImageHeader:
    size = None
    exif = b""
    offset = 2
    for _ in range(MAX_CHUNKS):
        offset = data.find(b"\xff", offset)
        if offset < 0:
            break
        marker = data[offset + 1]
        if marker in (0, 0xFF) or marker in _JPEG_STANDALONE:
            offset += 1 if marker == 0xFF else 2
            continue
        if marker == _JPEG_SCAN:
            break
        (length,) = struct.unpack_from(">H", data, offset + 2)
        content = data[offset + 4 : offset + 2 + length]
        if marker in _JPEG_FRAMES:
            size = struct.unpack_from(">HH", content, 1)
        elif marker == _JPEG_EXIF and content.startswith(b"Exif\0\0"):
            exif += content[6:]  # a long one is split
        offset += 2 + max(length, 2)
    if size is None:
        raise ImageError("JPEG image is damaged or truncated: its size is missing")
    height, width = size
    return ImageHeader("JPEG", width, height, _orientation(exif))


def _webp_header(data: bytes) -> ImageHeader:
    kind = data[12:16]
    exif = b""
    if kind == b"VP8X":
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
        exif = _webp_exif(data)
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width = 1 + (bits & 0x3FFF)
        height = 1 + (bits >> 14 & 0x3FFF)
    elif kind == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    else:
        raise ImageError(f"WebP image starts with the chunk {kind!r}; VP8, VP8L or VP8X must")
    return ImageHeader("WEBP", width, height, _orientation(exif))


def _webp_exif(data: bytes) -> bytes:
    offset = 12
    for _ in range(MAX_CHUNKS):
        if offset + 8 > len(data):
            break
        kind, length = struct.unpack_from("<4sI", data, offset)
        if kind == b"EXIF":
            return data[offset + 8 : offset + 8 + length]
        offset += 8 + length + length % 2
    return b""


def _gif_header(data: bytes) -> ImageHeader:
    """The size is the screen's, enlarged to hold the first frame as Pillow does."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    offset = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    is_in_extension = False
    for _ in range(MAX_CHUNKS):
        if is_in_extension:  # blocks that begin with their length; an empty one is the last
            is_in_extension = data[offset] != 0
            offset += 1 + data[offset]
        elif data[offset] == ord(","):
            left, top, frame_width, frame_height = struct.unpack_from("<HHHH", data, offset + 1)
            width = max(width, left + frame_width)
            height = max(height, top + frame_height)
            return ImageHeader("GIF", width, height, 1)
        elif data[offset] == ord(";"):
            break
        elif data[offset] == ord("!"):
            is_in_extension = True
            offset += 2
        else:
            offset += 1
    raise ImageError("GIF image has no frame")


def _bmp_header(data: bytes) -> ImageHeader:
    (header_size,) = struct.unpack_from("<I", data, 14)
    if header_size == 12:
        width, height = struct.unpack_from("<HH", data, 18)
    else:
        width, height = struct.unpack_from("<ii", data, 18)
    return ImageHeader("BMP", width, abs(height), 1)


def _orientation(exif: bytes) -> int:
    """The orientation in the first directory of an EXIF block; 1 if it has none."""
    while exif.startswith(b"Exif\0\0"):
        exif = exif[6:]
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(f"{order}I", exif, 4)
        (num_entries,) = struct.unpack_from(f"{order}H", exif, directory)
        for entry in range(directory + 2, directory + 2 + 12 * num_entries, 12):
            tag, value_type, _, value = struct.unpack_from(f"{order}HHIH", exif, entry)
            if tag == _ORIENTATION_TAG and value_type == _SHORT:
                return value if 1 <= value <= 8 else 1
    except struct.error:  # it ends early
        pass
    return 1


_PARSERS = {
    "PNG": _png_header,
    "JPEG": _jpeg_header,
    "WEBP": _webp_header,
    "GIF": _gif_header,
    "BMP": _bmp_header,
}
