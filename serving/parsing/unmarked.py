"""Calls that begin an answer without their format's marks: an object, or objects in a fence.

Qwen2.5-Coder writes them so. They are calls where the function exists and the arguments fit its schema; anything else
is text, and comes out as soon as it cannot be a call any more.
"""

import json
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from .calls import decoded, held_string, held_value, new_id, sign
from .pieces import Arguments, Said
from .python_values import refuse
from .reader import Broken, Reader, blank, marker
from .schema_fit import fits

FENCE = "```"
LANGUAGES = ("", "json")  # of a fence
ARGUMENTS = ("arguments", "parameters")
KEYS = ("name", *ARGUMENTS, "type", "id")  # of a call


def unmarked_calls(reader: Reader, tools: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Read the calls that the answer begins with, if any."""
    yield from blank(reader)
    while reader.char in ("{", FENCE[0]):
        try:
            calls = yield from held_block(reader, tools)
        except Broken:
            reader.release(Said)
            return
        for name, arguments in calls:
            reader.begin(name, new_id())
            reader.add(Arguments, arguments)
            reader.argued = True
        yield from blank(reader)


def held_block(reader: Reader, tools: Mapping[str, Mapping[str, Any]]) -> Generator[None, None, list[tuple[str, str]]]:
    """Hold one object to the end of its line, or a fence with objects; their (name, arguments)."""
    if reader.char == "{":
        found = yield from held_call(reader, tools)
        while reader.char in (" ", "\t"):
            reader.hold()
            yield
        if reader.char not in ("", "\n", "{"):
            raise Broken
        return [found]
    yield from marker(reader, (FENCE,))
    start = len(reader.held)
    while reader.char.isalnum():
        reader.hold()
        yield
    if "".join(reader.held[start:]) not in LANGUAGES:
        raise Broken
    calls: list[tuple[str, str]] = []
    yield from blank(reader)
    while reader.char == "{":
        calls.append((yield from held_call(reader, tools)))
        yield from blank(reader)
    if not calls or (reader.char and not (yield from marker(reader, (FENCE,)))):
        raise Broken
    return calls


def held_call(reader: Reader, tools: Mapping[str, Mapping[str, Any]]) -> Generator[None, None, tuple[str, str]]:
    """Hold {"name": ..., "arguments": {...}}, which must be a call of one of the tools."""
    name = arguments = None
    yield from sign(reader, "{")
    while True:
        key = decoded((yield from held_string(reader)))
        is_repeated = (key == "name" and name is not None) or (key in ARGUMENTS and arguments is not None)
        if key not in KEYS or is_repeated:
            raise Broken
        yield from sign(reader, ":")
        if key in ARGUMENTS:
            if reader.char != "{":
                raise Broken
            arguments = yield from held_value(reader)
        else:
            text = decoded((yield from held_string(reader)))
            name = text if key == "name" else name
        if name is not None and name not in tools:
            raise Broken
        yield from blank(reader)
        if reader.char != ",":
            break
        yield from sign(reader, ",")
    if reader.char != "}" or name is None or arguments is None or not is_fitting(arguments, tools[name]):
        raise Broken
    reader.hold()
    yield
    return name, arguments


def is_fitting(arguments: str, schema: Mapping[str, Any]) -> bool:
    try:
        value = json.loads(arguments, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return fits(value, schema)
