"""How a model writes tool calls: one description, from which calls are read and a grammar of them is written."""

import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .calls import BEGINS, arguments, attempt, call, new_id
from .pieces import Said
from .python_values import keywords
from .quoted_fields import fields
from .reader import Broken, Reader, blank, marker, text
from .tags import Tag, parameters
from .unmarked import unmarked_calls

HOLE = re.compile(r"\{(\w+)\}")
PLACES = frozenset("name id object arguments parameters keywords fields key value kind".split())
IN_NAME = frozenset("_-.")  # beside letters and digits
Part = tuple[str, str]  # ("", a text) or (a hole, "")
Tools = Mapping[str, Mapping[str, Any]]  # the schema of each function's arguments


@dataclass(frozen=True)
class Form:
    """What a model writes, with holes: `begin`, then calls with `between` between them, then `end`.

    White space stands here as models write it; that which is missing or more is read too. A call has one of the holes

        {object}      {"name": ..., "arguments": {...}}
        {arguments}   a JSON object, after a {name} or an {id}, which is functions.NAME:NUMBER
        {parameters}  any number of `parameter`, with {key}, {value} and perhaps {kind}: whether the value is a text
        {keywords}    Python's: key='text', other=[1, None]
        {fields}      {key:<quote>text<quote>,other:[1,null]}, the `quote` round texts
    """

    call: str
    begin: str = ""
    between: str = ""
    end: str = ""
    parameter: str = ""
    quote: str = ""
    keys: tuple[str, str] = ("name", "arguments")  # of {object}
    also: tuple[str, ...] = ()  # texts in what stands before the name, from which on a call is known too
    bare: bool = False  # no text stands before calls
    prefixes: tuple[str, ...] = ()  # of bare calls, not always there
    suffixes: tuple[str, ...] = ()  # the same, behind `end`
    unmarked: bool = False  # calls that begin the answer may lack the marks, in a fence or without

    def __post_init__(self):
        if strange := {hole for each in (self.call, self.parameter) for hole in HOLE.findall(each)} - PLACES:
            raise ValueError(f"{self.call!r} has {strange}; holes are {', '.join(sorted(PLACES))}")

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return parts_of(self.call)

    @property
    def main(self) -> int:
        """The place of the hole that has the arguments."""
        return next(i for i, (hole, _) in enumerate(self.parts) if hole not in ("", "name", "id"))

    @property
    def listed(self) -> bool:
        """Whether calls follow each other without a mark of their own."""
        return bool(self.between or self.parts[0][0])

    @cached_property
    def head(self) -> tuple[str, ...]:
        """The texts before a call's first hole, `begin` among them."""
        return tuple(self.begin.split()) + (() if self.listed else tuple(self.parts[0][1].split()))

    @cached_property
    def closing(self) -> tuple[str, ...]:
        """The texts after the arguments of a call, or after all of a list."""
        after = () if self.listed else self.tail
        return tuple(dict.fromkeys([*after, *self.end.split(), *self.suffixes]))

    @cached_property
    def tail(self) -> tuple[str, ...]:
        """The texts of a call after its arguments."""
        return tuple("".join(text for _, text in self.parts[self.main + 1 :]).split())

    @cached_property
    def tag(self) -> Tag:
        parts = parts_of(self.parameter)
        return Tag(parts, self.tail[0], self.closing)

    def read(self, reader: Reader, tools: Tools) -> Iterator[None]:
        if self.bare:
            yield from blank(reader)
            if (yield from self.read_list(reader, self.begin.split(), tools)):
                yield from self.read_closing(reader)
            return
        if self.unmarked and tools:
            yield from unmarked_calls(reader, tools)
        start = len(self.begin.split()) if not self.listed else 0  # of the call itself in the head
        openings = {self.head[0], *self.also}
        awaited: tuple[str, ...] = ()  # closing texts that are syntax wherever they stand, after a call
        while found := (yield from text(reader, {*openings, self.head[start], *awaited} if awaited else openings)):
            if found in awaited:
                reader.drop()
                awaited = () if found == self.closing[-1] else awaited
                continue
            rest = self.head[self.head.index(found) + 1 :]
            if not self.listed:
                called = yield from attempt(reader, self.read_call(reader, rest, tools))
                awaited = self.closing if called else awaited
            elif (yield from self.read_list(reader, rest, tools)):
                awaited = yield from self.read_closing(reader)

    def read_list(self, reader: Reader, rest: Sequence[str], tools: Tools) -> Generator[None, None, bool]:
        """Calls that follow each other, the first behind the texts of `rest`; whether there was one."""
        between, called = self.between.strip(), False
        begins = {each[0] for each in (*self.prefixes, self.parts[0][1] or "{")}
        while (yield from attempt(reader, self.read_listed(reader, () if called else rest, tools))):
            called = True
            yield from blank(reader)
            if between and reader.char == between:
                reader.drop()
                yield
                yield from blank(reader)
            if not (reader.char.isidentifier() if self.parts[0][0] == "name" else reader.char in begins):
                break
        return called

    def read_listed(self, reader: Reader, rest: Sequence[str], tools: Tools) -> Iterator[None]:
        """A call, with what may stand before it."""
        found = (yield from marker(reader, self.prefixes)) if self.prefixes else None
        yield from literals(reader, rest)
        yield from self.read_call(reader, (), tools, self.bare and found is None)

    def read_closing(self, reader: Reader) -> Generator[None, None, tuple[str, ...]]:
        """Drop the closing texts that stand here, in their order; those that may come later."""
        left = self.closing
        try:
            for at, each in enumerate(self.closing):
                yield from blank(reader)
                if (yield from marker(reader, (each,))):
                    reader.drop()
                    left = self.closing[at + 1 :]
        except Broken:
            reader.release(Said)
        return tuple(each for each in left if len(each) > 1)

    def read_call(self, reader: Reader, rest: Sequence[str], tools: Tools, bare: bool = False) -> Iterator[None]:
        """A call from behind what was read of its head; `bare` it is one only with its arguments."""
        yield from literals(reader, rest)
        name = call_id = ""
        for i, (hole, written) in enumerate(self.parts):
            if not hole:
                if i or self.listed:
                    yield from literals(reader, written.split())
            elif hole == "name":
                name, call_id = (yield from held_name(reader, IN_NAME)), new_id()
            elif hole == "id":
                call_id = yield from held_name(reader, IN_NAME | {":"})
                name = call_id.partition(":")[0].removeprefix("functions.")
                if not name:
                    raise Broken
            elif hole == "object":
                yield from call(reader, new_id(), bare, self.keys)
                return
            elif hole == "arguments":
                yield from blank(reader)
                if reader.char not in BEGINS:
                    raise Broken
                reader.begin(name, call_id)
                yield from arguments(reader)
                if self.listed:
                    yield from literals(reader, self.tail)
                return
            else:
                schema = tools.get(name, {})
                if hole == "parameters":
                    yield from parameters(reader, self.tag, name, schema)
                elif hole == "keywords":
                    yield from keywords(reader, name, self.tail[0])
                else:
                    yield from fields(reader, name, self.quote, schema)
                return


def parts_of(template: str) -> tuple[Part, ...]:
    """The texts and the holes of a template."""
    found = HOLE.split(template)
    both = [(found[i], "") if i % 2 else ("", found[i]) for i in range(len(found))]
    return tuple(part for part in both if part != ("", ""))


def literals(reader: Reader, wanted: Sequence[str]) -> Iterator[None]:
    """Hold these texts, which must stand here, and the white space before each."""
    for each in wanted:
        yield from blank(reader)
        if not (yield from marker(reader, (each,))):
            raise Broken


def held_name(reader: Reader, others: frozenset[str]) -> Generator[None, None, str]:
    """Hold the name that must stand here."""
    yield from blank(reader)
    start = len(reader.held)
    while reader.char.isalnum() or reader.char in others:
        reader.hold()
        yield
    if len(reader.held) == start:
        raise Broken
    return "".join(reader.held[start:])
