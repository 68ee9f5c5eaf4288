"""Answers as gpt-oss writes them: messages with a channel, perhaps a recipient, and text between markers."""

import re
from collections.abc import Collection, Generator, Iterator

from .calls import BEGINS, arguments, attempt, new_id
from .form import Form
from .pieces import Said, Thought
from .reader import Broken, Reader, Text, blank, marker, text

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
HEADER = frozenset("_-./=: ")  # beside letters and digits
RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
THINKING = re.compile(r"<\|channel\|> *analysis\b")


def written(specials: Collection[str]) -> Form:
    """A call; the token that ends it ends the answer."""
    return Form("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}")


def read(reader: Reader, tools: bool, inside: bool) -> Iterator[None]:
    """The prompt ended within the header of a message, or `inside` a thought."""
    kind: Text = Thought
    if not inside:
        yield from blank(reader)
        kind = yield from message(reader, (START, CHANNEL, MESSAGE, "to="), tools)
    while found := (yield from text(reader, (START, CHANNEL, *ENDS), kind)):
        if found in ENDS:
            reader.drop()
            kind = Said
        else:
            kind = yield from message(reader, (), tools)


def message(reader: Reader, openings: tuple[str, ...], tools: bool) -> Generator[None, None, Text]:
    """Read a header, whose first marker is one of `openings` or held, and a call whole; the kind of text to come."""
    try:
        head = yield from header(reader, openings)
    except Broken:
        reader.release(Said)
        return Said
    to = RECIPIENT.search(head)
    if to and tools:
        yield from attempt(reader, body(reader, to[1]))
        return Said
    reader.drop()
    return Thought if THINKING.search(head) else Said


def header(reader: Reader, openings: tuple[str, ...]) -> Generator[None, None, str]:
    found = yield from marker(reader, openings)
    if openings and not found:
        raise Broken
    while found != MESSAGE:
        if reader.char.isalnum() or reader.char in HEADER:
            reader.hold()
            yield
        elif not (found := (yield from marker(reader, (START, CHANNEL, CONSTRAIN, MESSAGE)))):
            raise Broken
    return "".join(reader.held)


def body(reader: Reader, name: str) -> Iterator[None]:
    """The text of a message that is a call."""
    yield from blank(reader)
    given = reader.char in BEGINS
    if not given and not (yield from marker(reader, ENDS)):
        raise Broken
    reader.begin(name, new_id())
    if given:
        yield from arguments(reader)
