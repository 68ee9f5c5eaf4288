"""Arguments between tags: each text becomes JSON of the type that the tool's schema has, a string while it comes."""

import json
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .calls import OPENS, new_id, value
from .pieces import Arguments, Said
from .reader import Broken, Reader, blank, marker
from .schema_types import as_json, is_text, properties_of


@dataclass(frozen=True)
class Tag:
    """How one parameter is written, and the first text behind all of them, and those after it."""

    parts: tuple[tuple[str, str], ...]
    tail: str
    closing: tuple[str, ...]

    @property
    def start(self) -> str:
        return self.parts[0][1].split()[0]

    @property
    def before(self) -> str:
        """The text before the value."""
        return self.parts[[hole for hole, _ in self.parts].index("value") - 1][1]

    @property
    def after(self) -> str:
        return self.parts[-1][1]

    @property
    def ends(self) -> frozenset[str]:
        """What ends a value: its own tag, and the tags that stand behind it where that was left out."""
        return frozenset({self.after.split()[0], self.start, *self.closing})


def parameters(reader: Reader, tag: Tag, name: str, schema: Mapping[str, Any]) -> Iterator[None]:
    """Begin the call where a parameter or the end of them stands, and pass each on as a member of an object."""
    yield from blank(reader)
    found = yield from marker(reader, (tag.start, tag.tail))
    if not found:
        raise Broken
    reader.begin(name, new_id())
    reader.held.extend(found)  # text, if the parameter breaks before its value
    reader.add(Arguments, "{")
    reader.argued = True
    count = 0
    try:
        while found == tag.start:
            found = yield from parameter(reader, tag, schema, count)
            count += 1
            if found not in (tag.start, *tag.closing):
                yield from blank(reader)
                found = yield from marker(reader, (tag.start, *tag.closing))
    except Broken:
        found = None
    if not found and not reader.char:  # the answer was cut off
        reader.drop()
        return
    reader.add(Arguments, "}")
    reader.drop() if found else reader.release(Said)


def parameter(reader: Reader, tag: Tag, schema: Mapping[str, Any], index: int) -> Generator[None, None, str | None]:
    """A member of the object, from behind the first text of its tag; the text that ended the value."""
    key, told = "", None
    rest = tag.parts[0][1].split()[1:]
    for i, (hole, written) in enumerate(tag.parts):
        if not hole:
            for each in rest if i == 0 else written.split():
                yield from blank(reader)
                if not (yield from marker(reader, (each,))):
                    raise Broken
        elif hole == "value":
            break
        else:
            found = yield from held_until(reader, tag.parts[i + 1][1].strip()[0])
            key, told = (key, found) if hole == "kind" else (found, told)
    reader.drop()
    own = properties_of(schema).get(key)
    begun = f"{', ' if index else ''}{json.dumps(key, ensure_ascii=False)}: "
    trims = tag.before.endswith("\n")
    if trims and reader.char == "\n":
        yield
    if told == "true" or (told is None and is_text(own, schema)):
        reader.add(Arguments, begun + '"')
        ended = yield from raw(reader, tag.ends, lambda text: reader.add(Arguments, escaped(text)), trims)
        if ended:
            reader.add(Arguments, '"')
    else:
        parts: list[str] = []
        if reader.char.isspace() and told is None:
            yield from kept_blank(reader, parts)
        if reader.char in OPENS:  # within JSON a tag is text
            with suppress(Broken):
                yield from value(reader, lambda: parts.append(reader.char))
        after_json = len(parts)
        ended = yield from raw(reader, tag.ends, parts.append, trims)
        if ended:
            text = "".join(parts)  # of what is no JSON after all, `value` has kept the last line break
            text = text.removesuffix("\n") if trims and len(parts) == after_json else text
            reader.add(Arguments, begun + as_json(text, own, schema))
    if ended:
        reader.drop()
    return ended


def kept_blank(reader: Reader, parts: list[str]) -> Iterator[None]:
    while reader.char.isspace():
        parts.append(reader.char)
        yield


def held_until(reader: Reader, end: str) -> Generator[None, None, str]:
    start = len(reader.held)
    while reader.char != end:
        if not reader.char or reader.char in "\r\n":
            raise Broken
        reader.hold()
        yield
    return "".join(reader.held[start:]).strip()


def raw(
    reader: Reader, ends: Collection[str], keep: Callable[[str], None], trims: bool
) -> Generator[None, None, str | None]:
    """Keep text up to one of `ends`, which is held; None at the end of the answer. `trims` a last line break."""
    heads = {each[:length] for each in ends for length in range(1, len(each))}
    head = ""
    while reader.char:
        head += reader.char
        if head in ends:
            reader.hold()
            yield
            return head
        if head in heads:
            reader.hold()
        elif len(head) > 1:
            flush(reader, keep)
            head = ""
            continue
        else:
            head = ""
            flush(reader, keep)
            if trims and reader.char == "\n":
                reader.hold()
            else:
                keep(reader.char)
        yield
    reader.drop()  # the head of a tag, perhaps
    return None


def flush(reader: Reader, keep: Callable[[str], None]) -> None:
    if reader.held:
        keep("".join(reader.held))
        reader.drop()


def escaped(text: str) -> str:
    """A text between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
