"""An answer read one character at a time, so that its pieces do not depend on how it was cut."""

from collections.abc import Callable, Collection, Generator, Iterator

from .pieces import Arguments, CallStart, Piece, Said, Thought

Text = type[Said] | type[Thought]


class Broken(Exception):
    """The text is not what its format asks for."""


class Reader:
    """A parser made of steps: a generator that looks at `char`, holds it or passes it on, and yields for the next one.

        answer   |-------- passed on --------|--- held ---| char | to come

    What is held waits until it is known what it belongs to: white space, the head of a marker, a call without a
    name yet. Then it is passed on as text or dropped as syntax. `char` is empty when the answer has ended, and no
    step may yield after that. If the steps return before, the rest of the answer is text.
    """

    def __init__(self, steps: Callable[["Reader"], Iterator[None]], keeps_special: bool = False):
        self.keeps_special = keeps_special
        self.char = ""
        self.held: list[str] = []
        self.calls = 0
        self.argued = False  # whether the last call has arguments
        self._pieces: list[Piece] = []
        self._kind: type[Piece] | None = None  # of what was passed on last
        self._parts: list[str] = []  # of a piece of that kind
        self._steps = steps(self)

    def push(self, text: str) -> list[Piece]:
        """What is certain now."""
        for at, char in enumerate(text):
            if not self._step(char):
                self.release(Said)
                self.add(Said, text[at:])
                break
        return self._finished()

    def finish(self) -> list[Piece]:
        """What was held, for nothing more comes."""
        self._step("")
        self.settle(Said)
        return self._finished()

    def hold(self) -> None:
        self.held.append(self.char)

    def drop(self) -> None:
        self.held.clear()

    def release(self, kind: Text) -> None:
        """What is held is text."""
        if self.held:
            self.add(kind, "".join(self.held))
            self.held.clear()

    def settle(self, kind: Text) -> None:
        """What is held is text at the end of the answer; white space after something else is not."""
        if self._kind in (None, kind) or "".join(self.held).strip():
            self.release(kind)
        self.held.clear()

    def say(self, kind: Text) -> None:
        """The character is text, and so is what is held."""
        self.release(kind)
        self.add(kind, self.char)

    def begin(self, name: str, call_id: str) -> None:
        """What is held was the head of a call."""
        self.held.clear()
        self._close()
        self._kind, self.argued = CallStart, False
        self._pieces.append(CallStart(self.calls, call_id, name))
        self.calls += 1

    def argue(self) -> None:
        """The character belongs to the arguments of the last call."""
        self.add(Arguments, self.char)
        self.argued = True

    def add(self, kind: type[Piece], text: str) -> None:
        if kind is not self._kind:
            self._close()
            self._kind = kind
        self._parts.append(text)

    def _step(self, char: str) -> bool:
        """Whether there was a step that took the character."""
        self.char = char
        return next(self._steps, False) is None

    def _close(self) -> None:
        text = "".join(self._parts)
        self._parts = []
        if text and self._kind is Arguments:
            self._pieces.append(Arguments(self.calls - 1, text))
        elif text:
            self._pieces.append(self._kind(text))  # type: ignore[misc]

    def _finished(self) -> list[Piece]:
        self._close()
        finished, self._pieces = self._pieces, []
        return finished


def blank(reader: Reader) -> Iterator[None]:
    """Hold white space."""
    while reader.char.isspace():
        reader.hold()
        yield


def separator(reader: Reader, end: str) -> Iterator[None]:
    """Pass the comma after a value, or stop before the end."""
    yield from blank(reader)
    if reader.char == ",":
        yield
        yield from blank(reader)
    elif reader.char != end:
        raise Broken


def marker(reader: Reader, markers: Collection[str]) -> Generator[None, None, str | None]:
    """Hold the marker that stands here; None if there is none, Broken if there is only the head of one."""
    head = ""
    while head not in markers:
        if not reader.char or not any(each.startswith(head + reader.char) for each in markers):
            if head:
                raise Broken
            return None
        head += reader.char
        reader.hold()
        yield
    return head


def text(reader: Reader, markers: Collection[str], kind: Text = Said) -> Generator[None, None, str | None]:
    """Pass text on up to the first marker, which is held with the white space before it; None at the end.

    No marker has its first character twice, so that a head that fails has none in it.
    """
    heads = {each[:length] for each in markers for length in range(1, len(each))}
    head = ""
    while reader.char:
        head += reader.char
        if head in heads:
            reader.hold()
        elif head in markers:
            reader.hold()
            yield
            return head
        elif len(head) > 1:
            reader.release(kind)
            head = ""
            continue  # this character may begin a marker
        else:
            head = ""
            if reader.char.isspace():
                reader.hold()
            else:
                reader.say(kind)
        yield
    reader.settle(kind)
    return None
