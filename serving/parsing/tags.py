"""Incremental reader of tagged arguments, each converted to JSON of the type in the tool's schema.

Texts are emitted as they arrive.
"""

import json
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .calls import OPENS, new_id, read_value
from .pieces import Arguments, TextPiece
from .reader import FormatError, Reader, hold_blank, hold_marker
from .schema_types import as_json, declared_properties, is_text


@dataclass(frozen=True)
class Tag:
    """The template of a parameter, the first marker after all parameters, and closing markers."""

    template: tuple[tuple[str, str], ...]  # (hole, text), one of them empty
    tail: str
    closing: tuple[str, ...]

    @property
    def start(self) -> str:
        return self.template[0][1].split()[0]

    @property
    def before(self) -> str:
        """The text before the value."""
        return self.template[[hole for hole, _ in self.template].index("value") - 1][1]

    @property
    def after(self) -> str:
        return self.template[-1][1]

    @property
    def end_markers(self) -> frozenset[str]:
        """Markers that end a value: its own end tag, or a later tag if that was left out."""
        return frozenset({self.after.split()[0], self.start, *self.closing})


def read_parameters(
    reader: Reader, tag: Tag, name: str, schema: Mapping[str, Any]
) -> Iterator[None]:
    """Begin the call at a parameter or at the end of the parameters; emit them as an object."""
    yield from hold_blank(reader)
    found_marker = yield from hold_marker(reader, (tag.start, tag.tail))
    if not found_marker:
        raise FormatError
    reader.begin(name, new_id())
    reader.held.extend(found_marker)  # becomes text if the parameter breaks before its value
    reader.add(Arguments, "{")
    reader.has_arguments = True
    count = 0
    try:
        while found_marker == tag.start:
            found_marker = yield from read_parameter(reader, tag, schema, count)
            count += 1
            if found_marker not in (tag.start, *tag.closing):
                yield from hold_blank(reader)
                found_marker = yield from hold_marker(reader, (tag.start, *tag.closing))
    except FormatError:
        found_marker = None
    if not found_marker and not reader.char:  # the answer was cut off
        reader.drop()
        return
    reader.add(Arguments, "}")
    reader.drop() if found_marker else reader.release(TextPiece)


def read_parameter(
    reader: Reader, tag: Tag, schema: Mapping[str, Any], index: int
) -> Generator[None, None, str | None]:
    """Read a member of the object, after the first text of its tag; return what ended the value."""
    key = ""
    declared_kind = None
    opening_texts = tag.template[0][1].split()[1:]
    for i, (hole, text_before) in enumerate(tag.template):
        if not hole:
            for tag_text in opening_texts if i == 0 else text_before.split():
                yield from hold_blank(reader)
                if not (yield from hold_marker(reader, (tag_text,))):
                    raise FormatError
        elif hole == "value":
            break
        else:
            hole_text = yield from hold_until(reader, tag.template[i + 1][1].strip()[0])
            if hole == "kind":
                declared_kind = hole_text
            else:
                key = hole_text
    reader.drop()
    value_schema = declared_properties(schema).get(key)
    member_start = f"{', ' if index else ''}{json.dumps(key, ensure_ascii=False)}: "
    trims = tag.before.endswith("\n")
    if trims and reader.char == "\n":
        yield
    if declared_kind == "true" or (declared_kind is None and is_text(value_schema, schema)):
        reader.add(Arguments, member_start + '"')
        end_marker = yield from read_raw(
            reader, tag.end_markers, lambda text: reader.add(Arguments, escape_json(text)), trims
        )
        if end_marker:
            reader.add(Arguments, '"')
    else:
        pieces: list[str] = []
        if reader.char.isspace() and declared_kind is None:
            yield from keep_blank(reader, pieces)
        if reader.char in OPENS:  # within JSON a tag is text
            with suppress(FormatError):
                yield from read_value(reader, lambda: pieces.append(reader.char))
        after_json = len(pieces)
        end_marker = yield from read_raw(reader, tag.end_markers, pieces.append, trims)
        if end_marker:
            # If it is not JSON after all, `read_value` has kept the last line break.
            text = "".join(pieces)
            text = text.removesuffix("\n") if trims and len(pieces) == after_json else text
            reader.add(Arguments, member_start + as_json(text, value_schema, schema))
    if end_marker:
        reader.drop()
    return end_marker


def keep_blank(reader: Reader, pieces: list[str]) -> Iterator[None]:
    while reader.char.isspace():
        pieces.append(reader.char)
        yield


def hold_until(reader: Reader, end: str) -> Generator[None, None, str]:
    start = len(reader.held)
    while reader.char != end:
        if not reader.char or reader.char in "\r\n":
            raise FormatError
        reader.hold()
        yield
    return "".join(reader.held[start:]).strip()


def read_raw(
    reader: Reader, end_markers: Collection[str], keep: Callable[[str], None], trims: bool
) -> Generator[None, None, str | None]:
    """Pass text to `keep` up to one of `end_markers`, which is held; None at the end of the answer.

    With `trims`, a line break before the end marker is dropped.
    """
    prefixes = {
        end_marker[:length] for end_marker in end_markers for length in range(1, len(end_marker))
    }
    prefix = ""
    while reader.char:
        prefix += reader.char
        if prefix in end_markers:
            reader.hold()
            yield
            return prefix
        if prefix in prefixes:
            reader.hold()
        elif len(prefix) > 1:
            flush(reader, keep)
            prefix = ""
            continue
        else:
            prefix = ""
            flush(reader, keep)
            if trims and reader.char == "\n":
                reader.hold()
            else:
                keep(reader.char)
        yield
    reader.drop()  # perhaps an incomplete tag
    return None


def flush(reader: Reader, keep: Callable[[str], None]) -> None:
    if reader.held:
        keep("".join(reader.held))
        reader.drop()


def escape_json(text: str) -> str:
    """Escape a text for JSON, without its quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
