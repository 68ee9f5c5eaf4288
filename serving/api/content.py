"""The content of a message: text, or texts and images in order."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .errors import RequestError

MEDIA_FIELD = "multi_modal_data"  # of prompts in Python


class MediaUrl(NamedTuple):
    """A URL that has to be fetched."""

    url: str


class MessageImage(NamedTuple):
    """An image of a message."""

    param: str  # the field that held it
    content: Any  # the bytes of a file, a `MediaUrl`, or in Python a PIL image


# A message's text, or its texts and images in order: {"type": "text", "text": ...} and
# {"type": "image", "image": MessageImage}.
Content = str | list[dict[str, Any]]


def image_part(param: str, content: Any) -> dict[str, Any]:
    return {"type": "image", "image": MessageImage(param, content)}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def parts_of(content: Content) -> list[dict[str, Any]]:
    """A message's content as a list of parts."""
    if isinstance(content, list):
        return content
    return [text_part(content)] if content else []


def joined_texts(content: Content) -> str:
    """The texts of a message."""
    if isinstance(content, str):
        return content
    return "\n".join(
        content_part["text"] for content_part in content if content_part["type"] == "text"
    )


def take_images(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[MessageImage]]:
    """The messages as chat templates read them, with `{"type": "image"}` for each image, and the
    images in order.
    """
    images: list[MessageImage] = []
    template_messages: list[Mapping[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            images += [
                content_part["image"] for content_part in content if content_part["type"] == "image"
            ]
            content = [
                {"type": "image"} if content_part["type"] == "image" else content_part
                for content_part in content
            ]
            message = {**message, "content": content}
        template_messages.append(message)
    return template_messages, images


def refuse_images(prompt: Any, method: str) -> None:
    """Refuse a prompt with images where they would be left out."""
    if isinstance(prompt, Mapping) and prompt.get(MEDIA_FIELD):
        raise RequestError(MEDIA_FIELD, f"cannot be used with {method}; leave it out")
