"""The formats of Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}] or
[TOOL_CALLS]name[ARGS]{...}.
"""

import secrets
from collections.abc import Collection, Generator, Iterator

from .calls import BEGINS, read_arguments, read_call_object, try_call
from .form import Form, Tools
from .reader import FormatError, Reader, hold_blank, hold_marker, read_text

LISTED = Form("{object}", "[TOOL_CALLS][", ", ", "]")
NAMED = Form("[TOOL_CALLS]{name}[ARGS]{arguments}")
CALLS = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"


def new_id() -> str:
    """Return a call id of nine characters, the only length that the chat templates accept."""
    return secrets.token_hex(5)[:9]


def call_form(specials: Collection[str]) -> Form:
    """Return the format of a model with these special tokens."""
    return NAMED if ARGS in specials else LISTED


def read(reader: Reader, tools: Tools) -> Iterator[None]:
    while (yield from read_text(reader, (CALLS,))):
        yield from hold_blank(reader)
        if reader.char == "[":
            yield from read_list(reader)
        else:
            yield from try_call(reader, read_named_call(reader))


def read_list(reader: Reader) -> Iterator[None]:
    """Read a list of calls."""
    while reader.char in ("[", ","):
        reader.hold()
        yield
        if not (yield from try_call(reader, read_call_object(reader, new_id()))):
            return
        yield from hold_blank(reader)
    if reader.char == "]":
        reader.drop()
        yield


def read_named_call(reader: Reader) -> Iterator[None]:
    """Read the name, an optional id, and the arguments."""
    name = yield from hold_until_bracket(reader)
    call_id = ""
    found_marker = yield from hold_marker(reader, (CALL_ID, ARGS))
    if found_marker == CALL_ID:
        call_id = yield from hold_until_bracket(reader)
        yield from hold_marker(reader, (ARGS,))
    yield from hold_blank(reader)
    if not name or reader.char not in BEGINS:
        raise FormatError
    reader.begin(name, call_id if len(call_id) == 9 and call_id.isalnum() else new_id())
    yield from read_arguments(reader)


def hold_until_bracket(reader: Reader) -> Generator[None, None, str]:
    start = len(reader.held)
    while reader.char and reader.char not in '[{"' and not reader.char.isspace():
        reader.hold()
        yield
    return "".join(reader.held[start:])
