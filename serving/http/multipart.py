"""Files and fields that a client sends as a form: multipart/form-data, of RFC 7578."""

from collections.abc import Mapping
from email.message import Message
from email.utils import collapse_rfc2231_value
from typing import NamedTuple

from ..api.errors import RequestError

MAX_PARTS = 16
MAX_HEAD = 4096  # bytes of a part's headers


class Part(NamedTuple):
    """A field of a form; a file has a name."""

    data: bytes
    filename: str | None


def parse_form(kind: str, body: bytes) -> Mapping[str, Part]:
    """The parts of a body by their names; `kind` is its Content-Type."""
    boundary = parameter(header("content-type", kind), "boundary")
    if boundary is None or not 1 <= len(boundary) <= 70 or not boundary.isascii():
        raise RequestError("body", "must name a boundary of 1 to 70 characters in its Content-Type")
    _, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode(), MAX_PARTS + 1)
    if not parts or not parts.pop().startswith(b"--"):
        raise RequestError("body", f"must be a form of at most {MAX_PARTS} parts that ends with its boundary")
    found: dict[str, Part] = {}
    for part in parts:
        head, gap, data = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        if not gap or len(head) > MAX_HEAD:
            raise RequestError("body", f"must be a form whose parts have headers of at most {MAX_HEAD} bytes")
        name, own = name_of(head.decode(errors="replace"))
        if name in found:
            raise RequestError(name, "is given twice; leave one of them out")
        found[name] = Part(data, own)
    return found


def name_of(head: str) -> tuple[str, str | None]:
    """The names of a part and of its file."""
    for line in head.split("\r\n"):
        label, _, value = line.partition(":")
        if label.strip().lower() == "content-disposition":
            given = header("content-disposition", value.strip())
            if name := parameter(given, "name"):
                return name, parameter(given, "filename")
    raise RequestError("body", "must be a form whose parts have names")


def parameter(given: Message, name: str) -> str | None:
    """A parameter of a header as text; RFC 2231 lets it name a charset of its own."""
    label = given.keys()[0]
    try:
        value = given.get_param(name, header=label)
        return None if value is None else collapse_rfc2231_value(value).strip()
    except ValueError as error:  # of a charset with a NUL, or one that cannot decode the value
        raise RequestError("body", f"must be a form whose {label} can be decoded: {error}") from None


def header(label: str, value: str) -> Message:
    found = Message()
    found[label] = value.replace("\r", " ").replace("\n", " ")
    return found
