"""Formats of tool calls: one description, from which calls are read and a grammar is written."""

import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .calls import BEGINS, new_id, read_arguments, read_call_object, try_call
from .pieces import TextPiece
from .python_values import read_keywords
from .quoted_fields import read_fields
from .reader import FormatError, Reader, hold_blank, hold_marker, read_text
from .tags import Tag, read_parameters
from .unmarked import unmarked_calls

HOLE = re.compile(r"\{(\w+)\}")
HOLES = frozenset("name id object arguments parameters keywords fields key value kind".split())
IN_NAME = frozenset("_-.")  # besides letters and digits
TemplatePart = tuple[str, str]  # ("", a text) or (a hole, "")
Tools = Mapping[str, Mapping[str, Any]]  # the schema of each function's arguments


@dataclass(frozen=True)
class Form:
    """A template of tool calls: `begin`, then calls joined by `separator`, then `end`.

    White space stands as models write it; missing or additional white space is accepted. A call has
    one of the holes

        {object}      {"name": ..., "arguments": {...}} {arguments}   a JSON object, after a {name}
        or an {id}, which is functions.NAME:NUMBER {parameters}  any number of `parameter`, with
        {key}, {value} and perhaps {kind} (is it a text?) {keywords}    Python's: key='text',
        other=[1, None] {fields}      {key:<quote>text<quote>,other:[1,null]}, with `quote` around
        texts
    """

    call: str
    begin: str = ""
    separator: str = ""
    end: str = ""
    parameter: str = ""
    quote: str = ""
    keys: tuple[str, str] = ("name", "arguments")  # for {object}
    # Markers before the name by which a call is recognised too.
    other_openings: tuple[str, ...] = ()
    starts_answer: bool = False  # calls are recognised only at the start of the answer
    prefixes: tuple[str, ...] = ()  # optional, before calls that start the answer
    suffixes: tuple[str, ...] = ()  # optional, behind `end`
    unmarked: bool = False  # calls at the start of the answer may lack the markers, also in a fence

    def __post_init__(self):
        if (
            strange := {
                hole for template in (self.call, self.parameter) for hole in HOLE.findall(template)
            }
            - HOLES
        ):
            raise ValueError(f"{self.call!r} has {strange}; holes are {', '.join(sorted(HOLES))}")

    @cached_property
    def parts(self) -> tuple[TemplatePart, ...]:
        return split_template(self.call)

    @property
    def arguments_index(self) -> int:
        """Index of the part that holds the arguments."""
        return next(i for i, (hole, _) in enumerate(self.parts) if hole not in ("", "name", "id"))

    @property
    def is_list(self) -> bool:
        """Whether calls follow each other without a marker of their own."""
        return bool(self.separator or self.parts[0][0])

    @cached_property
    def head(self) -> tuple[str, ...]:
        """Markers before a call's first hole, including `begin`."""
        return tuple(self.begin.split()) + (() if self.is_list else tuple(self.parts[0][1].split()))

    @cached_property
    def closing(self) -> tuple[str, ...]:
        """Markers after the arguments of a call, or after a list of calls."""
        tail = () if self.is_list else self.tail
        return tuple(dict.fromkeys([*tail, *self.end.split(), *self.suffixes]))

    @cached_property
    def tail(self) -> tuple[str, ...]:
        """Markers of a call after its arguments."""
        return tuple("".join(text for _, text in self.parts[self.arguments_index + 1 :]).split())

    @cached_property
    def tag(self) -> Tag:
        template = split_template(self.parameter)
        return Tag(template, self.tail[0], self.closing)

    def read(self, reader: Reader, tools: Tools) -> Iterator[None]:
        if self.starts_answer:
            yield from hold_blank(reader)
            if (yield from self.read_list(reader, self.begin.split(), tools)):
                yield from self.read_closing(reader)
            return
        if self.unmarked and tools:
            yield from unmarked_calls(reader, tools)
        # Offset of the call's own markers in `head`.
        start = len(self.begin.split()) if not self.is_list else 0
        openings = {self.head[0], *self.other_openings}
        # Closing markers, which after a call are syntax wherever they stand.
        awaited: tuple[str, ...] = ()
        while opening := (
            yield from read_text(
                reader, {*openings, self.head[start], *awaited} if awaited else openings
            )
        ):
            if opening in awaited:
                reader.drop()
                awaited = () if opening == self.closing[-1] else awaited
                continue
            markers = self.head[self.head.index(opening) + 1 :]
            if not self.is_list:
                called = yield from try_call(reader, self.read_call(reader, markers, tools))
                awaited = self.closing if called else awaited
            elif (yield from self.read_list(reader, markers, tools)):
                awaited = yield from self.read_closing(reader)

    def read_list(
        self, reader: Reader, markers: Sequence[str], tools: Tools
    ) -> Generator[None, None, bool]:
        """Read calls that follow each other, the first after `markers`; return whether there was
        one.
        """
        separator = self.separator.strip()
        called = False
        first_chars = {opener[0] for opener in (*self.prefixes, self.parts[0][1] or "{")}
        while (
            yield from try_call(reader, self.read_listed(reader, () if called else markers, tools))
        ):
            called = True
            yield from hold_blank(reader)
            if separator and reader.char == separator:
                reader.drop()
                yield
                yield from hold_blank(reader)
            if not (
                reader.char.isidentifier()
                if self.parts[0][0] == "name"
                else reader.char in first_chars
            ):
                break
        return called

    def read_listed(self, reader: Reader, markers: Sequence[str], tools: Tools) -> Iterator[None]:
        """Read a call of a list, with optional markers before it."""
        prefix = (yield from hold_marker(reader, self.prefixes)) if self.prefixes else None
        yield from hold_literals(reader, markers)
        yield from self.read_call(reader, (), tools, self.starts_answer and prefix is None)

    def read_closing(self, reader: Reader) -> Generator[None, None, tuple[str, ...]]:
        """Drop the closing markers that come next, in order; return those that may come later."""
        pending = self.closing
        try:
            for index, closing_marker in enumerate(self.closing):
                yield from hold_blank(reader)
                if (yield from hold_marker(reader, (closing_marker,))):
                    reader.drop()
                    pending = self.closing[index + 1 :]
        except FormatError:
            reader.release(TextPiece)
        return tuple(closing_marker for closing_marker in pending if len(closing_marker) > 1)

    def read_call(
        self, reader: Reader, markers: Sequence[str], tools: Tools, requires_arguments: bool = False
    ) -> Iterator[None]:
        """Read a call after the `markers` of its head."""
        yield from hold_literals(reader, markers)
        name = call_id = ""
        for i, (hole, written) in enumerate(self.parts):
            if not hole:
                if i or self.is_list:
                    yield from hold_literals(reader, written.split())
            elif hole == "name":
                name = yield from hold_name(reader, IN_NAME)
                call_id = new_id()
            elif hole == "id":
                call_id = yield from hold_name(reader, IN_NAME | {":"})
                name = call_id.partition(":")[0].removeprefix("functions.")
                if not name:
                    raise FormatError
            elif hole == "object":
                yield from read_call_object(reader, new_id(), requires_arguments, self.keys)
                return
            elif hole == "arguments":
                yield from hold_blank(reader)
                if reader.char not in BEGINS:
                    raise FormatError
                reader.begin(name, call_id)
                yield from read_arguments(reader)
                if self.is_list:
                    yield from hold_literals(reader, self.tail)
                return
            else:
                schema = tools.get(name, {})
                if hole == "parameters":
                    yield from read_parameters(reader, self.tag, name, schema)
                elif hole == "keywords":
                    yield from read_keywords(reader, name, self.tail[0])
                else:
                    yield from read_fields(reader, name, self.quote, schema)
                return


def split_template(template: str) -> tuple[TemplatePart, ...]:
    """Split a template into its texts and holes."""
    pieces = HOLE.split(template)
    texts_and_holes = [(pieces[i], "") if i % 2 else ("", pieces[i]) for i in range(len(pieces))]
    return tuple(template_part for template_part in texts_and_holes if template_part != ("", ""))


def hold_literals(reader: Reader, texts: Sequence[str]) -> Iterator[None]:
    """Hold texts that must come next, with the white space before each."""
    for text in texts:
        yield from hold_blank(reader)
        if not (yield from hold_marker(reader, (text,))):
            raise FormatError


def hold_name(reader: Reader, punctuation: frozenset[str]) -> Generator[None, None, str]:
    """Hold a name, which must come next."""
    yield from hold_blank(reader)
    start = len(reader.held)
    while reader.char.isalnum() or reader.char in punctuation:
        reader.hold()
        yield
    if len(reader.held) == start:
        raise FormatError
    return "".join(reader.held[start:])
