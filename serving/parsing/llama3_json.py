"""Calls as Llama 3 writes them: an answer that is {"name": ..., "parameters": {...}}, or several with `;` between."""

from collections.abc import Iterator

from .calls import attempt, call, new_id
from .reader import Reader, blank, marker

KEEPS_SPECIAL = True
TAG = "<|python_tag|>"


def read(reader: Reader) -> Iterator[None]:
    yield from blank(reader)
    while reader.char in ("{", TAG[0]) and (yield from attempt(reader, tagged(reader))):
        yield from blank(reader)
        if reader.char == ";":
            reader.drop()
            yield
            yield from blank(reader)


def tagged(reader: Reader) -> Iterator[None]:
    """An object without a tag may be an answer in JSON: it is a call only with its arguments."""
    tag = yield from marker(reader, (TAG,))
    yield from call(reader, new_id(), bare=tag is None)
