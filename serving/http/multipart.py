"""Parsing of forms (multipart/form-data, RFC 7578), by which clients upload files."""

from collections.abc import Mapping
from email.message import Message
from email.utils import collapse_rfc2231_value
from typing import NamedTuple

from ..api.errors import RequestError

MAX_PARTS = 16
MAX_HEAD = 4096  # bytes of a part's headers


class FormPart(NamedTuple):
    """A field of a form; only files have a `filename`."""

    data: bytes
    filename: str | None


def parse_form(kind: str, body: bytes) -> Mapping[str, FormPart]:
    """Parse a body whose Content-Type is `kind` into its parts, by name."""
    boundary = parameter(header("content-type", kind), "boundary")
    if boundary is None or not 1 <= len(boundary) <= 70 or not boundary.isascii():
        raise RequestError("body", "must name a boundary of 1 to 70 characters in its Content-Type")
    _, *encoded_parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode(), MAX_PARTS + 1)
    if not encoded_parts or not encoded_parts.pop().startswith(b"--"):
        raise RequestError(
            "body", f"must be a form of at most {MAX_PARTS} parts that ends with its boundary"
        )
    parts_by_name: dict[str, FormPart] = {}
    for encoded_part in encoded_parts:
        headers, blank_line, data = encoded_part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        if not blank_line or len(headers) > MAX_HEAD:
            raise RequestError(
                "body", f"must be a form whose parts have headers of at most {MAX_HEAD} bytes"
            )
        name, filename = part_names(headers.decode(errors="replace"))
        if name in parts_by_name:
            raise RequestError(name, "is given twice; leave one of them out")
        parts_by_name[name] = FormPart(data, filename)
    return parts_by_name


def part_names(headers: str) -> tuple[str, str | None]:
    """The name of a part and its file name, from its headers."""
    for line in headers.split("\r\n"):
        label, _, value = line.partition(":")
        if label.strip().lower() == "content-disposition":
            disposition = header("content-disposition", value.strip())
            if name := parameter(disposition, "name"):
                return name, parameter(disposition, "filename")
    raise RequestError("body", "must be a form whose parts have names")


def parameter(message: Message, name: str) -> str | None:
    """A parameter of a header, decoded from its own charset if it names one (RFC 2231)."""
    label = message.keys()[0]
    try:
        value = message.get_param(name, header=label)
        return None if value is None else collapse_rfc2231_value(value).strip()
    except ValueError as error:  # the charset has a NUL, or cannot decode the value
        raise RequestError(
            "body", f"must be a form whose {label} can be decoded: {error}"
        ) from None


def header(label: str, value: str) -> Message:
    message = Message()
    message[label] = value.replace("\r", " ").replace("\n", " ")
    return message
