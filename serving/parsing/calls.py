"""Incremental reader of tool calls written as JSON. Arguments are emitted as they arrive."""

import json
import re
import secrets
import string
from collections.abc import Callable, Generator, Iterator

from .pieces import Arguments, TextPiece
from .reader import FormatError, Reader, hold_blank

BEGINS = frozenset('{"')  # starts arguments: an object, or a string that holds one
OPENS = frozenset("{[")
CLOSES = frozenset("}]")
LITERAL = frozenset(string.ascii_letters + string.digits + "+-.")  # numbers, true, false, null
BETWEEN = LITERAL | frozenset(",: \t\r\n")  # outside of strings and brackets
FIRST_HALF = re.compile(r"\\u[dD][89abAB]..")  # the escape of a high surrogate
HALF = re.compile("[\ud800-\udfff]")


def new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def try_call(reader: Reader, steps: Iterator[None]) -> Generator[None, None, bool]:
    """Run the steps that read a call; return whether it was one.

    If the format breaks before the call has begun, the text read so far is released as text.
    """
    calls = reader.calls
    try:
        yield from steps
    except FormatError:
        if reader.calls == calls:
            reader.release(TextPiece)
            return False
    else:
        if not reader.has_arguments:
            reader.add(Arguments, "{}")
    reader.drop()
    return True


def read_call_object(
    reader: Reader,
    call_id: str,
    requires_arguments: bool = False,
    keys: tuple[str, str] = ("name", "arguments"),
) -> Iterator[None]:
    """Read {"name": ..., "arguments": {...}}.

    The call begins when its name is known and its arguments start, which may come before the name.

    Args:
        requires_arguments: The object is a call only if it has arguments.
    """
    name = arguments = None
    calls = reader.calls
    yield from expect(reader, "{")
    while reader.char != "}":
        key = decode_string((yield from hold_string(reader)))
        yield from expect(reader, ":")
        if key == keys[0]:
            name = decode_string((yield from hold_string(reader)))
        elif key in (keys[1], "arguments", "parameters") and arguments is None:
            if name and reader.char in BEGINS:
                reader.begin(name, call_id)
                yield from read_arguments(reader)
                arguments = ""
            else:
                arguments = arguments_text((yield from hold_value(reader)))
        else:
            yield from hold_value(reader)
        if name and arguments and reader.calls == calls:
            reader.begin(name, call_id)
            reader.add(Arguments, arguments)
            reader.has_arguments = True
        yield from hold_blank(reader)
        if reader.char == ",":
            yield from expect(reader, ",")
        elif reader.char != "}":
            raise FormatError
    if not name or (requires_arguments and arguments is None):
        raise FormatError
    if reader.calls == calls:
        reader.begin(name, call_id)
    yield


def read_arguments(reader: Reader) -> Iterator[None]:
    """Emit the arguments of the call: an object as it is, a string decoded."""
    if reader.char == "{":
        yield from read_value(reader, reader.emit_argument)
        return
    high_surrogate = ""
    yield
    while reader.char != '"':
        if not reader.char:
            raise FormatError
        unit = (yield from read_escape(reader)) if reader.char == "\\" else reader.char
        complete, high_surrogate = (
            (high_surrogate, unit) if FIRST_HALF.fullmatch(unit) else (high_surrogate + unit, "")
        )
        reader.add(Arguments, decode_string(complete))
        reader.has_arguments = True
        yield
    reader.add(Arguments, decode_string(high_surrogate))
    yield


def read_value(reader: Reader, keep: Callable[[], None]) -> Iterator[None]:
    """Read a JSON value, calling `keep` for each character. Only brackets are checked."""
    if reader.char in LITERAL:
        while reader.char in LITERAL:
            keep()
            yield
        return
    depth = 0
    while True:
        if reader.char == '"':
            yield from read_string(reader, keep)
        elif reader.char in OPENS:
            depth += 1
        elif reader.char in CLOSES and depth:
            depth -= 1
        elif not depth or reader.char not in BETWEEN:
            raise FormatError
        keep()
        yield
        if not depth:
            return


def read_string(reader: Reader, keep: Callable[[], None]) -> Iterator[None]:
    """Read a string, up to its closing quote."""
    escaped = True  # the first quote ends nothing
    while escaped or reader.char != '"':
        escaped = reader.char == "\\" and not escaped
        keep()
        yield
        if not reader.char:
            raise FormatError


def read_escape(reader: Reader) -> Generator[None, None, str]:
    """Read an escape, up to its last character."""
    raw = "\\"
    while len(raw) < 2 or (raw[1] == "u" and len(raw) < 6):
        yield
        if not reader.char:
            raise FormatError
        raw += reader.char
    return raw


def expect(reader: Reader, char: str) -> Iterator[None]:
    """Hold a character that must come next, with the white space around it."""
    yield from hold_blank(reader)
    if reader.char != char:
        raise FormatError
    reader.hold()
    yield
    yield from hold_blank(reader)


def hold_value(reader: Reader) -> Generator[None, None, str]:
    start = len(reader.held)
    yield from read_value(reader, reader.hold)
    return "".join(reader.held[start:])


def hold_string(reader: Reader) -> Generator[None, None, str]:
    """Hold a string and return the text between its quotes, undecoded."""
    if reader.char != '"':
        raise FormatError
    return (yield from hold_value(reader))[1:-1]


def arguments_text(raw: str) -> str:
    """Return the arguments that a held JSON value contains."""
    if raw.startswith("{"):
        return raw
    if raw.startswith('"'):
        return decode_string(raw[1:-1])
    if raw == "null":
        return ""
    raise FormatError


def decode_string(raw: str) -> str:
    """Decode the text between the quotes of a JSON string; a lone surrogate stays an escape."""
    if "\\" not in raw:
        return raw
    try:
        text = json.loads(f'"{raw}"', strict=False)
    except ValueError:
        raise FormatError from None
    return HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)
