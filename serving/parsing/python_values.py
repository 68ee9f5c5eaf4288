"""Arguments as Python writes them: key='text', other=[1, None]. They become JSON while they come."""

import json
import string
from collections.abc import Generator, Iterator

from .calls import new_id
from .pieces import Arguments
from .reader import Broken, Reader, blank, marker, separator

WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": "",
    "\\": "\\", "'": "'", '"': '"', "/": "/",
}  # fmt: skip
CODES = {"x": 2, "u": 4, "U": 8}
OPENS = {"[": "]", "(": ")", "{": "}"}
IN_NUMBER = frozenset(string.ascii_letters + string.digits + "+-._")
MAX_DEPTH = 64


def keywords(reader: Reader, name: str, end: str) -> Iterator[None]:
    """Begin the call where its first keyword or its `end` stands, and pass the keywords on as an object."""
    key = yield from keyword(reader, end)
    reader.begin(name, new_id())
    argue(reader, "{")
    count = 0
    while key:
        argue(reader, f"{', ' if count else ''}{json.dumps(key, ensure_ascii=False)}: ")
        yield from value(reader, 0)
        yield from blank(reader)
        if reader.char == ",":
            reader.hold()
            yield
        elif reader.char != end:
            raise Broken
        reader.drop()
        key = yield from keyword(reader, end)
        count += 1
    argue(reader, "}")
    reader.drop()


def keyword(reader: Reader, end: str) -> Generator[None, None, str]:
    """The name before a `=`; empty where the `end` stands."""
    yield from blank(reader)
    if (yield from marker(reader, (end,))):
        return ""
    start = len(reader.held)
    while reader.char.isidentifier() or reader.char.isdecimal():
        reader.hold()
        yield
    key = "".join(reader.held[start:])
    yield from blank(reader)
    if not key or not (yield from marker(reader, ("=",))):
        raise Broken
    yield from blank(reader)
    return key


def argue(reader: Reader, text: str) -> None:
    reader.add(Arguments, text)
    reader.argued = True


def value(reader: Reader, depth: int) -> Iterator[None]:
    """Pass a value on."""
    reader.drop()
    if reader.char in ("'", '"'):
        yield from quoted(reader)
    elif reader.char in OPENS and depth < MAX_DEPTH:
        yield from several(reader, depth)
    else:
        argue(reader, (yield from plain(reader)))


def several(reader: Reader, depth: int) -> Iterator[None]:
    """A list, a tuple or a dict. What a brace begins is known at its first colon: a set is refused."""
    end = OPENS[reader.char]
    yield
    yield from blank(reader)
    argue(reader, "{" if end == "}" else "[")
    count = 0
    while reader.char != end:
        argue(reader, ", " if count else "")
        if end == "}":
            if reader.char not in ("'", '"'):
                raise Broken
            yield from quoted(reader)
            yield from blank(reader)
            if reader.char != ":":
                raise Broken
            yield
            yield from blank(reader)
            argue(reader, ": ")
        yield from value(reader, depth + 1)
        yield from separator(reader, end)
        count += 1
    argue(reader, "}" if end == "}" else "]")
    reader.drop()
    yield


def quoted(reader: Reader) -> Iterator[None]:
    """Pass a string on."""
    end, half = reader.char, ""
    argue(reader, '"')
    yield
    while reader.char != end:
        if not reader.char:
            raise Broken
        found = (yield from escape(reader)) if reader.char == "\\" else reader.char
        if "\ud800" <= found <= "\udbff":  # JSON's way to write a character in two halves
            argue(reader, escaped(half))
            half = found
        else:
            argue(reader, escaped(half + found))
            half = ""
        yield
    argue(reader, escaped(half) + '"')
    yield


def escaped(text: str) -> str:
    """Between the quotes of JSON; half a character stays an escape."""
    try:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        return json.dumps(text)[1:-1]
    return json.dumps(text, ensure_ascii=False)[1:-1]


def escape(reader: Reader) -> Generator[None, None, str]:
    """What an escape means, up to its last character; one that Python does not know stands for itself."""
    yield
    char = reader.char
    if not char:
        raise Broken
    if char not in CODES:
        return ESCAPES.get(char, "\\" + char)
    digits = ""
    while len(digits) < CODES[char]:
        yield
        digits += reader.char
        if not reader.char or reader.char not in string.hexdigits:
            raise Broken
    if int(digits, 16) > 0x10FFFF:
        raise Broken
    return chr(int(digits, 16))


def plain(reader: Reader) -> Generator[None, None, str]:
    """A word or a number, as JSON."""
    written = ""
    while reader.char and reader.char in IN_NUMBER:
        written += reader.char
        yield
    if not reader.char:  # more may have been to come
        raise Broken
    return WORDS.get(written) or number(written)


def number(written: str) -> str:
    """A number of Python's as JSON."""
    sign, digits = ("-" if written.startswith("-") else ""), written.lstrip("+-").replace("_", "")
    if len(written) - len(written.lstrip("+-")) > 1:
        raise Broken
    if digits.isascii() and digits.isdigit():
        return sign + (digits.lstrip("0") or "0")
    try:
        if digits[:2].lower() in ("0x", "0o", "0b"):
            return f"{sign}{int(digits, 0)}"
        whole, dot, more = digits.partition(".")
        found = f"{sign}{(whole.lstrip('0') or '0') if dot else whole}{dot}{more}"
        found = found + "0" if found.endswith(".") else found.replace(".e", ".0e").replace(".E", ".0E")
        json.loads(found, parse_constant=refuse)
    except ValueError:
        raise Broken from None
    return found


def refuse(text: str) -> None:
    raise ValueError(text)
