"""Incremental reader of Python keyword arguments (key='text', other=[1, None]), emitted as JSON."""

import json
import string
from collections.abc import Generator, Iterator

from .calls import new_id
from .pieces import Arguments
from .reader import FormatError, Reader, hold_blank, hold_marker, skip_separator

WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "0": "\0",
    "\n": "",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "/": "/",
}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
OPENS = {"[": "]", "(": ")", "{": "}"}
IN_NUMBER = frozenset(string.ascii_letters + string.digits + "+-._")
MAX_DEPTH = 64


def read_keywords(reader: Reader, name: str, end: str) -> Iterator[None]:
    """Begin the call at its first keyword or its `end`, and emit the keywords as an object."""
    key = yield from hold_keyword(reader, end)
    reader.begin(name, new_id())
    emit_arguments(reader, "{")
    count = 0
    while key:
        emit_arguments(reader, f"{', ' if count else ''}{json.dumps(key, ensure_ascii=False)}: ")
        yield from read_value(reader, 0)
        yield from hold_blank(reader)
        if reader.char == ",":
            reader.hold()
            yield
        elif reader.char != end:
            raise FormatError
        reader.drop()
        key = yield from hold_keyword(reader, end)
        count += 1
    emit_arguments(reader, "}")
    reader.drop()


def hold_keyword(reader: Reader, end: str) -> Generator[None, None, str]:
    """Hold the name before a `=` and return it; empty at `end`."""
    yield from hold_blank(reader)
    if (yield from hold_marker(reader, (end,))):
        return ""
    start = len(reader.held)
    while reader.char.isidentifier() or reader.char.isdecimal():
        reader.hold()
        yield
    key = "".join(reader.held[start:])
    yield from hold_blank(reader)
    if not key or not (yield from hold_marker(reader, ("=",))):
        raise FormatError
    yield from hold_blank(reader)
    return key


def emit_arguments(reader: Reader, text: str) -> None:
    reader.add(Arguments, text)
    reader.has_arguments = True


def read_value(reader: Reader, depth: int) -> Iterator[None]:
    """Read a value and emit it."""
    reader.drop()
    if reader.char in ("'", '"'):
        yield from read_string(reader)
    elif reader.char in OPENS and depth < MAX_DEPTH:
        yield from read_collection(reader, depth)
    else:
        emit_arguments(reader, (yield from read_scalar(reader)))


def read_collection(reader: Reader, depth: int) -> Iterator[None]:
    """Read a list, a tuple or a dict. The first colon shows that braces are a dict; sets are
    refused.
    """
    end = OPENS[reader.char]
    yield
    yield from hold_blank(reader)
    emit_arguments(reader, "{" if end == "}" else "[")
    count = 0
    while reader.char != end:
        emit_arguments(reader, ", " if count else "")
        if end == "}":
            if reader.char not in ("'", '"'):
                raise FormatError
            yield from read_string(reader)
            yield from hold_blank(reader)
            if reader.char != ":":
                raise FormatError
            yield
            yield from hold_blank(reader)
            emit_arguments(reader, ": ")
        yield from read_value(reader, depth + 1)
        yield from skip_separator(reader, end)
        count += 1
    emit_arguments(reader, "}" if end == "}" else "]")
    reader.drop()
    yield


def read_string(reader: Reader) -> Iterator[None]:
    """Read a string and emit it."""
    end = reader.char
    high_surrogate = ""
    emit_arguments(reader, '"')
    yield
    while reader.char != end:
        if not reader.char:
            raise FormatError
        character = (yield from read_escape(reader)) if reader.char == "\\" else reader.char
        if "\ud800" <= character <= "\udbff":  # JSON writes such a character as two surrogates
            emit_arguments(reader, escape_json(high_surrogate))
            high_surrogate = character
        else:
            emit_arguments(reader, escape_json(high_surrogate + character))
            high_surrogate = ""
        yield
    emit_arguments(reader, escape_json(high_surrogate) + '"')
    yield


def escape_json(text: str) -> str:
    """Escape a text for JSON without its quotes; a lone surrogate stays an escape."""
    try:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        return json.dumps(text)[1:-1]
    return json.dumps(text, ensure_ascii=False)[1:-1]


def read_escape(reader: Reader) -> Generator[None, None, str]:
    """Decode an escape, up to its last character; unknown escapes are kept, as in Python."""
    yield
    char = reader.char
    if not char:
        raise FormatError
    if char not in HEX_DIGITS:
        return ESCAPES.get(char, "\\" + char)
    digits = ""
    while len(digits) < HEX_DIGITS[char]:
        yield
        digits += reader.char
        if not reader.char or reader.char not in string.hexdigits:
            raise FormatError
    if int(digits, 16) > 0x10FFFF:
        raise FormatError
    return chr(int(digits, 16))


def read_scalar(reader: Reader) -> Generator[None, None, str]:
    """Read a word or a number and return it as JSON."""
    written = ""
    while reader.char and reader.char in IN_NUMBER:
        written += reader.char
        yield
    if not reader.char:  # the value may be incomplete
        raise FormatError
    return WORDS.get(written) or number(written)


def number(written: str) -> str:
    """Convert a Python number to JSON."""
    sign = "-" if written.startswith("-") else ""
    digits = written.lstrip("+-").replace("_", "")
    if len(written) - len(written.lstrip("+-")) > 1:
        raise FormatError
    if digits.isascii() and digits.isdigit():
        return sign + (digits.lstrip("0") or "0")
    try:
        if digits[:2].lower() in ("0x", "0o", "0b"):
            return f"{sign}{int(digits, 0)}"
        integer_digits, dot, fraction = digits.partition(".")
        converted = (
            f"{sign}{(integer_digits.lstrip('0') or '0') if dot else integer_digits}{dot}{fraction}"
        )
        converted = (
            converted + "0"
            if converted.endswith(".")
            else converted.replace(".e", ".0e").replace(".E", ".0E")
        )
        json.loads(converted, parse_constant=refuse)
    except ValueError:
        raise FormatError from None
    return converted


def refuse(text: str) -> None:
    raise ValueError(text)
