"""Arguments as Gemma writes them: {key:<quote>text<quote>,other:[1,null]}. They become JSON while they come."""

import json
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from .calls import new_id
from .python_values import argue
from .reader import Broken, Reader, blank, marker, separator
from .schema_types import as_json, is_text, kinds, properties_of
from .tags import escaped, raw

MAX_DEPTH = 64
ENDS = frozenset(",}]")
UNKNOWN: Mapping[str, Any] = {}


def fields(reader: Reader, name: str, quote: str, schema: Mapping[str, Any]) -> Iterator[None]:
    """Begin the call where its fields begin, and pass them on as an object."""
    yield from blank(reader)
    if reader.char != "{":
        raise Broken
    reader.begin(name, new_id())
    yield from members(reader, quote, schema, 0)


def members(reader: Reader, quote: str, schema: Mapping[str, Any], depth: int) -> Iterator[None]:
    """The fields of an object; `schema` is that of a call's arguments, nothing is known of objects in them."""
    yield
    argue(reader, "{")
    yield from blank(reader)
    count = 0
    while reader.char != "}":
        key = yield from field_name(reader, quote)
        argue(reader, f"{', ' if count else ''}{json.dumps(key, ensure_ascii=False)}: ")
        yield from value(reader, quote, properties_of(schema).get(key), schema, depth)
        yield from separator(reader, "}")
        count += 1
    argue(reader, "}")
    reader.drop()
    yield


def field_name(reader: Reader, quote: str) -> Generator[None, None, str]:
    reader.drop()
    if reader.char == quote[0] and (yield from marker(reader, (quote,))):
        reader.drop()
        parts: list[str] = []
        if not (yield from raw(reader, (quote,), parts.append, False)):
            raise Broken
        key = "".join(parts)
        yield from blank(reader)
    else:
        while reader.char != ":":
            if not reader.char or reader.char in ENDS:
                raise Broken
            reader.hold()
            yield
        key = "".join(reader.held).strip()
    if reader.char != ":":
        raise Broken
    reader.drop()
    yield
    yield from blank(reader)
    reader.drop()
    return key


def value(reader: Reader, quote: str, own: Any, schema: Mapping[str, Any], depth: int) -> Iterator[None]:
    """Pass a value on: what is quoted as a text, unless the schema has none."""
    reader.drop()
    if reader.char == "{" and depth < MAX_DEPTH:
        yield from members(reader, quote, UNKNOWN, depth + 1)
    elif reader.char == "[" and depth < MAX_DEPTH:
        yield
        argue(reader, "[")
        yield from blank(reader)
        count = 0
        while reader.char != "]":
            argue(reader, ", " if count else "")
            yield from value(reader, quote, None, UNKNOWN, depth + 1)
            yield from separator(reader, "]")
            count += 1
        argue(reader, "]")
        reader.drop()
        yield
    elif reader.char == quote[0]:
        if not (yield from marker(reader, (quote,))):
            raise Broken
        reader.drop()
        streams = is_text(own, schema) or "string" in kinds(own, schema)
        parts: list[str] = []
        argue(reader, '"' if streams else "")
        keep = (lambda text: argue(reader, escaped(text))) if streams else parts.append
        if not (yield from raw(reader, (quote,), keep, False)):
            raise Broken
        reader.drop()
        argue(reader, '"' if streams else as_json("".join(parts), own, schema))
    else:
        argue(reader, (yield from plain(reader)))


def plain(reader: Reader) -> Generator[None, None, str]:
    """What stands there without quotes, as JSON; a text where it is none."""
    written = ""
    while reader.char and reader.char not in ENDS:
        written += reader.char
        yield
    if not reader.char or not written.strip():  # more may have been to come
        raise Broken
    return as_json(written.strip(), {"type": ["number", "boolean", "null"]}, UNKNOWN)
