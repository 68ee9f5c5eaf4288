"""Calls as Mistral writes them: [TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]name[ARGS]{...}."""

import secrets
from collections.abc import Collection, Generator, Iterator

from .calls import BEGINS, arguments, attempt, call
from .form import Form, Tools
from .reader import Broken, Reader, blank, marker, text

LISTED, NAMED = Form("{object}", "[TOOL_CALLS][", ", ", "]"), Form("[TOOL_CALLS]{name}[ARGS]{arguments}")
CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def new_id() -> str:
    """Nine characters: the chat templates take no other length."""
    return secrets.token_hex(5)[:9]


def written(specials: Collection[str]) -> Form:
    """What a model with these special tokens writes."""
    return NAMED if ARGS in specials else LISTED


def read(reader: Reader, tools: Tools) -> Iterator[None]:
    while (yield from text(reader, (CALLS,))):
        yield from blank(reader)
        if reader.char == "[":
            yield from several(reader)
        else:
            yield from attempt(reader, named(reader))


def several(reader: Reader) -> Iterator[None]:
    """A list of calls."""
    while reader.char in ("[", ","):
        reader.hold()
        yield
        if not (yield from attempt(reader, call(reader, new_id()))):
            return
        yield from blank(reader)
    if reader.char == "]":
        reader.drop()
        yield


def named(reader: Reader) -> Iterator[None]:
    """The name, perhaps an id, and the arguments."""
    name, call_id = (yield from until_bracket(reader)), ""
    found = yield from marker(reader, (CALL_ID, ARGS))
    if found == CALL_ID:
        call_id = yield from until_bracket(reader)
        yield from marker(reader, (ARGS,))
    yield from blank(reader)
    if not name or reader.char not in BEGINS:
        raise Broken
    reader.begin(name, call_id if len(call_id) == 9 and call_id.isalnum() else new_id())
    yield from arguments(reader)


def until_bracket(reader: Reader) -> Generator[None, None, str]:
    start = len(reader.held)
    while reader.char and reader.char not in '[{"' and not reader.char.isspace():
        reader.hold()
        yield
    return "".join(reader.held[start:])
