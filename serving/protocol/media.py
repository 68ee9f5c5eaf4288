"""Images in the messages of a conversation."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..api.errors import RequestError
from ..api.validation import shown
from .objects import keep_known_fields

IMAGE_TYPES = ("image_url", "input_image", "image_pil")
DATA = "data:"
BASE64 = ";base64"


class MessageImage(NamedTuple):
    """An image of a message."""

    param: str  # the field that held it
    content: Any  # the bytes of a file, or in Python a PIL image


def parse_image(param: str, part: Mapping[str, Any], ignored: set[str]) -> dict[str, Any]:
    """Parse a content part of one of IMAGE_TYPES: OpenAI's chat, its Responses, Python's own."""
    kind = part["type"]
    if kind == "image_pil":
        return {"type": "image", "image": MessageImage(f"{param}.image_pil", part.get("image_pil"))}
    part = keep_known_fields(param, part, ("type", "image_url", "detail", "uuid"), ignored)
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
            f"{param}.detail", f"must be 'auto' or 'high', got {shown(detail)}; images are read "
            "at one resolution"
        )  # fmt: skip
    return {"type": "image", "image": MessageImage(name, decode_data_url(name, url))}


def decode_data_url(param: str, url: Any) -> bytes:
    """The bytes in a data: URL; its media type is ignored, since the content tells."""
    if not isinstance(url, str):
        raise RequestError(param, f"must be a data: URL, got {shown(url)}")
    header, comma, encoded = url.partition(",")
    if not header.lower().startswith(DATA) or not header.lower().endswith(BASE64) or not comma:
        raise RequestError(
            param,
            f"must be a data: URL such as 'data:image/png;base64,...', got {shown(url[:64])}; the "
            "server fetches no URLs",
        )
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(param, "holds invalid base64") from None


def take_images(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[MessageImage]]:
    """The messages as chat templates read them, with `{"type": "image"}` for each image, and the
    images in order.
    """
    images: list[MessageImage] = []
    taken = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            images += [part["image"] for part in content if part["type"] == "image"]
            content = [{"type": "image"} if part["type"] == "image" else part for part in content]
            message = {**message, "content": content}
        taken.append(message)
    return taken, images
