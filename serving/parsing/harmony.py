"""The format of gpt-oss: messages with a channel, an optional recipient, and text between
markers.
"""

import re
from collections.abc import Collection, Generator, Iterator

from .calls import BEGINS, new_id, read_arguments, try_call
from .form import Form
from .pieces import ReasoningPiece, TextPiece
from .reader import FormatError, Reader, Text, hold_blank, hold_marker, read_text

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
HEADER = frozenset("_-./=: ")  # besides letters and digits
RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
THINKING = re.compile(r"<\|channel\|> *analysis\b")


def call_form(specials: Collection[str]) -> Form:
    """Return the form of a call; its last token ends the answer."""
    return Form("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}")


def read(reader: Reader, tools: bool, inside: bool) -> Iterator[None]:
    """Read an answer. The prompt ended within the header of a message, or `inside` a thought."""
    kind: Text = ReasoningPiece
    if not inside:
        yield from hold_blank(reader)
        kind = yield from message(reader, (START, CHANNEL, MESSAGE, "to="), tools)
    while found_marker := (yield from read_text(reader, (START, CHANNEL, *ENDS), kind)):
        if found_marker in ENDS:
            reader.drop()
            kind = TextPiece
        else:
            kind = yield from message(reader, (), tools)


def message(reader: Reader, openings: tuple[str, ...], tools: bool) -> Generator[None, None, Text]:
    """Read a header, and the whole call if the message is one; return the kind of the text to come.

    The first marker of the header is one of `openings`, or is held already if there are none.
    """
    try:
        head = yield from header(reader, openings)
    except FormatError:
        reader.release(TextPiece)
        return TextPiece
    to = RECIPIENT.search(head)
    if to and tools:
        yield from try_call(reader, body(reader, to[1]))
        return TextPiece
    reader.drop()
    return ReasoningPiece if THINKING.search(head) else TextPiece


def header(reader: Reader, openings: tuple[str, ...]) -> Generator[None, None, str]:
    found_marker = yield from hold_marker(reader, openings)
    if openings and not found_marker:
        raise FormatError
    while found_marker != MESSAGE:
        if reader.char.isalnum() or reader.char in HEADER:
            reader.hold()
            yield
        elif not (
            found_marker := (yield from hold_marker(reader, (START, CHANNEL, CONSTRAIN, MESSAGE)))
        ):
            raise FormatError
    return "".join(reader.held)


def body(reader: Reader, name: str) -> Iterator[None]:
    """Read the text of a message that is a call."""
    yield from hold_blank(reader)
    has_arguments = reader.char in BEGINS
    if not has_arguments and not (yield from hold_marker(reader, ENDS)):
        raise FormatError
    reader.begin(name, new_id())
    if has_arguments:
        yield from read_arguments(reader)
