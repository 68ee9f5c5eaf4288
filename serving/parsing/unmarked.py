"""Reader of calls that start an answer without their format's markers: an object, or objects in a
fence.

Qwen2.5-Coder writes calls like that. An object is a call if the function exists and the arguments
fit its schema; anything else is emitted as text as soon as it cannot be a call any more.
"""

import json
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from .calls import decode_string, expect, hold_string, hold_value, new_id
from .pieces import Arguments, TextPiece
from .python_values import refuse
from .reader import FormatError, Reader, hold_blank, hold_marker
from .schema_fit import fits

FENCE = "```"
LANGUAGES = ("", "json")  # of a fence
ARGUMENTS = ("arguments", "parameters")
KEYS = ("name", *ARGUMENTS, "type", "id")  # of a call


def unmarked_calls(reader: Reader, tools: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Read the calls at the start of the answer, if any."""
    yield from hold_blank(reader)
    while reader.char in ("{", FENCE[0]):
        try:
            calls = yield from hold_block(reader, tools)
        except FormatError:
            reader.release(TextPiece)
            return
        for name, arguments in calls:
            reader.begin(name, new_id())
            reader.add(Arguments, arguments)
            reader.has_arguments = True
        yield from hold_blank(reader)


def hold_block(
    reader: Reader, tools: Mapping[str, Mapping[str, Any]]
) -> Generator[None, None, list[tuple[str, str]]]:
    """Hold an object to the end of its line, or a fence with objects; return (name, arguments)
    pairs.
    """
    if reader.char == "{":
        found_call = yield from hold_call(reader, tools)
        while reader.char in (" ", "\t"):
            reader.hold()
            yield
        if reader.char not in ("", "\n", "{"):
            raise FormatError
        return [found_call]
    yield from hold_marker(reader, (FENCE,))
    start = len(reader.held)
    while reader.char.isalnum():
        reader.hold()
        yield
    if "".join(reader.held[start:]) not in LANGUAGES:
        raise FormatError
    calls: list[tuple[str, str]] = []
    yield from hold_blank(reader)
    while reader.char == "{":
        calls.append((yield from hold_call(reader, tools)))
        yield from hold_blank(reader)
    if not calls or (reader.char and not (yield from hold_marker(reader, (FENCE,)))):
        raise FormatError
    return calls


def hold_call(
    reader: Reader, tools: Mapping[str, Mapping[str, Any]]
) -> Generator[None, None, tuple[str, str]]:
    """Hold {"name": ..., "arguments": {...}}, which must be a call of one of the tools."""
    name = arguments = None
    yield from expect(reader, "{")
    while True:
        key = decode_string((yield from hold_string(reader)))
        is_repeated = (key == "name" and name is not None) or (
            key in ARGUMENTS and arguments is not None
        )
        if key not in KEYS or is_repeated:
            raise FormatError
        yield from expect(reader, ":")
        if key in ARGUMENTS:
            if reader.char != "{":
                raise FormatError
            arguments = yield from hold_value(reader)
        else:
            text = decode_string((yield from hold_string(reader)))
            name = text if key == "name" else name
        if name is not None and name not in tools:
            raise FormatError
        yield from hold_blank(reader)
        if reader.char != ",":
            break
        yield from expect(reader, ",")
    if (
        reader.char != "}"
        or name is None
        or arguments is None
        or not is_fitting(arguments, tools[name])
    ):
        raise FormatError
    reader.hold()
    yield
    return name, arguments


def is_fitting(arguments: str, schema: Mapping[str, Any]) -> bool:
    try:
        value = json.loads(arguments, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return fits(value, schema)
