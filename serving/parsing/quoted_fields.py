"""Incremental reader of Gemma's arguments ({key:<quote>text<quote>,other:[1,null]}), emitted as
JSON.
"""

import json
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from .calls import new_id
from .python_values import emit_arguments
from .reader import FormatError, Reader, hold_blank, hold_marker, skip_separator
from .schema_types import as_json, declared_properties, is_text, value_types
from .tags import escape_json, read_raw

MAX_DEPTH = 64
ENDS = frozenset(",}]")
UNKNOWN: Mapping[str, Any] = {}


def read_fields(reader: Reader, name: str, quote: str, schema: Mapping[str, Any]) -> Iterator[None]:
    """Begin the call at its fields, and emit them as an object."""
    yield from hold_blank(reader)
    if reader.char != "{":
        raise FormatError
    reader.begin(name, new_id())
    yield from read_members(reader, quote, schema, 0)


def read_members(
    reader: Reader, quote: str, schema: Mapping[str, Any], depth: int
) -> Iterator[None]:
    """Read the fields of an object. `schema` describes a call's arguments, not objects nested in
    them.
    """
    yield
    emit_arguments(reader, "{")
    yield from hold_blank(reader)
    count = 0
    while reader.char != "}":
        key = yield from read_field_name(reader, quote)
        emit_arguments(reader, f"{', ' if count else ''}{json.dumps(key, ensure_ascii=False)}: ")
        yield from read_value(reader, quote, declared_properties(schema).get(key), schema, depth)
        yield from skip_separator(reader, "}")
        count += 1
    emit_arguments(reader, "}")
    reader.drop()
    yield


def read_field_name(reader: Reader, quote: str) -> Generator[None, None, str]:
    reader.drop()
    if reader.char == quote[0] and (yield from hold_marker(reader, (quote,))):
        reader.drop()
        pieces: list[str] = []
        if not (yield from read_raw(reader, (quote,), pieces.append, False)):
            raise FormatError
        key = "".join(pieces)
        yield from hold_blank(reader)
    else:
        while reader.char != ":":
            if not reader.char or reader.char in ENDS:
                raise FormatError
            reader.hold()
            yield
        key = "".join(reader.held).strip()
    if reader.char != ":":
        raise FormatError
    reader.drop()
    yield
    yield from hold_blank(reader)
    reader.drop()
    return key


def read_value(
    reader: Reader, quote: str, value_schema: Any, schema: Mapping[str, Any], depth: int
) -> Iterator[None]:
    """Read a value and emit it. A quoted value is a text unless the schema accepts none."""
    reader.drop()
    if reader.char == "{" and depth < MAX_DEPTH:
        yield from read_members(reader, quote, UNKNOWN, depth + 1)
    elif reader.char == "[" and depth < MAX_DEPTH:
        yield
        emit_arguments(reader, "[")
        yield from hold_blank(reader)
        count = 0
        while reader.char != "]":
            emit_arguments(reader, ", " if count else "")
            yield from read_value(reader, quote, None, UNKNOWN, depth + 1)
            yield from skip_separator(reader, "]")
            count += 1
        emit_arguments(reader, "]")
        reader.drop()
        yield
    elif reader.char == quote[0]:
        if not (yield from hold_marker(reader, (quote,))):
            raise FormatError
        reader.drop()
        is_streamed = is_text(value_schema, schema) or "string" in value_types(value_schema, schema)
        pieces: list[str] = []
        emit_arguments(reader, '"' if is_streamed else "")
        keep = (
            (lambda text: emit_arguments(reader, escape_json(text)))
            if is_streamed
            else pieces.append
        )
        if not (yield from read_raw(reader, (quote,), keep, False)):
            raise FormatError
        reader.drop()
        emit_arguments(
            reader, '"' if is_streamed else as_json("".join(pieces), value_schema, schema)
        )
    else:
        emit_arguments(reader, (yield from read_scalar(reader)))


def read_scalar(reader: Reader) -> Generator[None, None, str]:
    """Read an unquoted value and return it as JSON, as a text if it is not JSON."""
    written = ""
    while reader.char and reader.char not in ENDS:
        written += reader.char
        yield
    if not reader.char or not written.strip():  # the value may be incomplete
        raise FormatError
    return as_json(written.strip(), {"type": ["number", "boolean", "null"]}, UNKNOWN)
