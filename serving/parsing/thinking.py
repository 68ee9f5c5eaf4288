"""Thoughts between <think> and </think>, before the rest of an answer."""

from collections.abc import Iterator

from .pieces import Said, Thought
from .reader import Broken, Reader, blank, marker, text

OPEN, CLOSE = "<think>", "</think>"


def read(reader: Reader, inside: bool) -> Iterator[None]:
    """The answer begins `inside` a thought, or with the tag of one; white space beside a tag is dropped."""
    found = None
    yield from blank(reader)
    try:
        found = yield from marker(reader, (OPEN, CLOSE) if inside else (OPEN,))
    except Broken:
        reader.release(Thought if inside else Said)
    if found == OPEN:
        inside = True
        yield from blank(reader)
        reader.drop()
    if inside and (found == CLOSE or (yield from text(reader, (CLOSE,), Thought))):
        reader.drop()
        yield from blank(reader)
        reader.drop()
