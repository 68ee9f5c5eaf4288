"""Parsing of images in the messages of a conversation."""

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Any

from ..api.content import Content, MediaUrl, image_part, joined_texts, text_part
from ..api.errors import RequestError
from ..api.validation import shown, unicode_text
from .objects import Kinds, keep_known_fields, parse_list, parse_typed_object

IMAGE_TYPES = ("image_url", "input_image", "image_pil")
DATA = "data:"
BASE64 = ";base64"
SOURCES = {"base64": ("media_type", "data"), "url": ("url",)}  # of Anthropic's image blocks


ParseImage = Callable[[str, dict[str, Any]], dict[str, Any]]  # of a field and a part


def parse_image(param: str, part: Mapping[str, Any], ignored: set[str]) -> dict[str, Any]:
    """Parse a content part of one of IMAGE_TYPES: OpenAI's chat, its Responses, Python's own."""
    if part["type"] == "image_pil":
        picture = part.get("image_pil")
        if not hasattr(picture, "convert"):
            raise RequestError(f"{param}.image_pil", f"must be a PIL image, got {shown(picture)}")
        return image_part(f"{param}.image_pil", picture)
    names = ("type", "image_url", "detail", "uuid")
    return parse_image_url(param, keep_known_fields(param, part, names, ignored), ignored)


def parse_image_url(param: str, part: Mapping[str, Any], ignored: set[str]) -> dict[str, Any]:
    """Parse an OpenAI part, whose `image_url` is a URL or an object with one."""
    url = part.get("image_url")
    detail = part.get("detail")
    name = f"{param}.image_url"
    if isinstance(url, Mapping):
        url_fields = keep_known_fields(name, url, ("url", "detail"), ignored)
        detail = url_fields.get("detail", detail)
        url = url_fields.get("url")
        name = f"{name}.url"
    if detail not in (None, "auto", "high"):
        raise RequestError(
            f"{param}.detail",
            f"must be 'auto' or 'high', got {shown(detail)}; images are read at one resolution",
        )
    return image_part(name, read_url(name, url))


def parse_input_image(param: str, part: dict[str, Any]) -> dict[str, Any]:
    """Parse an `input_image` of the Responses API."""
    if "file_id" in part:
        raise RequestError(
            f"{param}.file_id", "cannot be read here; send the image in image_url, as a data: URL"
        )
    return parse_image_url(param, part, set())


def parse_image_block(param: str, block: dict[str, Any]) -> dict[str, Any]:
    """Parse an image block of Anthropic's messages."""
    source = parse_typed_object(f"{param}.source", block.get("source"), SOURCES)
    if source["type"] == "url":
        name = f"{param}.source.url"
        return image_part(name, read_url(name, source.get("url")))
    name = f"{param}.source.data"
    return image_part(name, decode_base64(name, source.get("data")))


def read_url(param: str, url: Any) -> bytes | MediaUrl:
    """The bytes in a data: URL, whose media type is ignored, since the content tells; another URL
    is fetched later.
    """
    if not isinstance(url, str):
        raise RequestError(param, f"must be a URL, got {shown(url)}")
    if url[:8].lower().startswith(("http:", "https:", "file:")):
        return MediaUrl(url)
    header, comma, encoded = url.partition(",")
    if not header.lower().startswith(DATA) or not header.lower().endswith(BASE64) or not comma:
        raise RequestError(
            param,
            f"must be a URL such as 'data:image/png;base64,...', got {shown(url[:64])}",
        )
    return decode_base64(param, encoded)


def decode_base64(param: str, text: Any) -> bytes:
    if not isinstance(text, str):
        raise RequestError(param, f"must be base64, got {shown(text)}")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(param, "holds invalid base64") from None


def join_parts(
    param: str, value: Any, kinds: Kinds, max_parts: int, image_kind: str, parse: ParseImage
) -> Content:
    """As `join_texts`, but a list with an image stays a list of texts and images.

    Args:
        param: The field.
        value: A string, or a list of parts.
        kinds: The fields of each kind of part.
        max_parts: Of a list.
        image_kind: The kind that is an image.
        parse: Parses a part of that kind.
    """
    if not isinstance(value, list):
        return unicode_text(param, value)
    parts = []
    for i, content_part in enumerate(parse_list(param, value, max_parts)):
        fields = parse_typed_object(f"{param}[{i}]", content_part, kinds)
        if fields["type"] == image_kind:
            parts.append(parse(f"{param}[{i}]", fields))
        else:
            name = kinds[fields["type"]][0]
            parts.append(text_part(unicode_text(f"{param}[{i}].{name}", fields.get(name))))
    has_image = any(part["type"] == "image" for part in parts)
    return parts if has_image else joined_texts(parts)
