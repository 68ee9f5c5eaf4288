"""Tool calls written as JSON: found while they are written, their arguments passed on as they stand."""

import json
import re
import secrets
import string
from collections.abc import Callable, Generator, Iterator

from .pieces import Arguments, Said
from .reader import Broken, Reader, blank

BEGINS = frozenset('{"')  # arguments: an object, or a string that holds one
OPENS, CLOSES = frozenset("{["), frozenset("}]")
LITERAL = frozenset(string.ascii_letters + string.digits + "+-.")  # numbers, true, false, null
BETWEEN = LITERAL | frozenset(",: \t\r\n")  # outside of strings and brackets
FIRST_HALF = re.compile(r"\\u[dD][89abAB]..")  # the escape of the first half of a character
HALF = re.compile("[\ud800-\udfff]")


def new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def attempt(reader: Reader, steps: Iterator[None]) -> Generator[None, None, bool]:
    """Take the steps that read a call; whether it was one. What breaks before it began is text."""
    calls = reader.calls
    try:
        yield from steps
    except Broken:
        if reader.calls == calls:
            reader.release(Said)
            return False
    else:
        if not reader.argued:
            reader.add(Arguments, "{}")
    reader.drop()
    return True


def call(
    reader: Reader, call_id: str, bare: bool = False, keys: tuple[str, str] = ("name", "arguments")
) -> Iterator[None]:
    """{"name": ..., "arguments": {...}}; a bare object is one only with its arguments.

    It begins when its name is known and its arguments begin, which may stand before the name.
    """
    name = given = None
    calls = reader.calls
    yield from sign(reader, "{")
    while reader.char != "}":
        key = decoded((yield from held_string(reader)))
        yield from sign(reader, ":")
        if key == keys[0]:
            name = decoded((yield from held_string(reader)))
        elif key in (keys[1], "arguments", "parameters") and given is None:
            if name and reader.char in BEGINS:
                reader.begin(name, call_id)
                yield from arguments(reader)
                given = ""
            else:
                given = inner((yield from held_value(reader)))
        else:
            yield from held_value(reader)
        if name and given and reader.calls == calls:
            reader.begin(name, call_id)
            reader.add(Arguments, given)
            reader.argued = True
        yield from blank(reader)
        if reader.char == ",":
            yield from sign(reader, ",")
        elif reader.char != "}":
            raise Broken
    if not name or (bare and given is None):
        raise Broken
    if reader.calls == calls:
        reader.begin(name, call_id)
    yield


def arguments(reader: Reader) -> Iterator[None]:
    """Pass the arguments of the call on: an object as it stands, of a string what it holds."""
    if reader.char == "{":
        yield from value(reader, reader.argue)
        return
    half = ""
    yield
    while reader.char != '"':
        if not reader.char:
            raise Broken
        unit = (yield from escape(reader)) if reader.char == "\\" else reader.char
        whole, half = (half, unit) if FIRST_HALF.fullmatch(unit) else (half + unit, "")
        reader.add(Arguments, decoded(whole))
        reader.argued = True
        yield
    reader.add(Arguments, decoded(half))
    yield


def value(reader: Reader, keep: Callable[[], None]) -> Iterator[None]:
    """Read a JSON value, `keep` taking each character; brackets are counted, no more."""
    if reader.char in LITERAL:
        while reader.char in LITERAL:
            keep()
            yield
        return
    depth = 0
    while True:
        if reader.char == '"':
            yield from quoted(reader, keep)
        elif reader.char in OPENS:
            depth += 1
        elif reader.char in CLOSES and depth:
            depth -= 1
        elif not depth or reader.char not in BETWEEN:
            raise Broken
        keep()
        yield
        if not depth:
            return


def quoted(reader: Reader, keep: Callable[[], None]) -> Iterator[None]:
    """Read a string up to its last quote."""
    escaped = True  # the first quote ends nothing
    while escaped or reader.char != '"':
        escaped = reader.char == "\\" and not escaped
        keep()
        yield
        if not reader.char:
            raise Broken


def escape(reader: Reader) -> Generator[None, None, str]:
    """Read an escape up to its last character."""
    raw = "\\"
    while len(raw) < 2 or (raw[1] == "u" and len(raw) < 6):
        yield
        if not reader.char:
            raise Broken
        raw += reader.char
    return raw


def sign(reader: Reader, char: str) -> Iterator[None]:
    """Hold a character that must stand here, with the white space around it."""
    yield from blank(reader)
    if reader.char != char:
        raise Broken
    reader.hold()
    yield
    yield from blank(reader)


def held_value(reader: Reader) -> Generator[None, None, str]:
    start = len(reader.held)
    yield from value(reader, reader.hold)
    return "".join(reader.held[start:])


def held_string(reader: Reader) -> Generator[None, None, str]:
    """What stands between the quotes."""
    if reader.char != '"':
        raise Broken
    return (yield from held_value(reader))[1:-1]


def inner(raw: str) -> str:
    """The arguments in a JSON value."""
    if raw.startswith("{"):
        return raw
    if raw.startswith('"'):
        return decoded(raw[1:-1])
    if raw == "null":
        return ""
    raise Broken


def decoded(raw: str) -> str:
    """What stands between the quotes of a JSON string, read; half a character stays the escape that it was."""
    if "\\" not in raw:
        return raw
    try:
        text = json.loads(f'"{raw}"', strict=False)
    except ValueError:
        raise Broken from None
    return HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)
