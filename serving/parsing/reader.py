"""Character-by-character parser of answers, whose pieces do not depend on how the text was
sliced.
"""

from collections.abc import Callable, Collection, Generator, Iterator

from .pieces import Arguments, CallStart, Piece, ReasoningPiece, TextPiece

Text = type[TextPiece] | type[ReasoningPiece]


class FormatError(Exception):
    """The text does not follow its format."""


class Reader:
    """A parser made of steps: a generator that looks at `char`, holds or emits it, and yields for
    the next one.

    answer   |--------- emitted ---------|--- held ---| char | to come

    Characters are held until their meaning is known: white space, the start of a marker, a call
    whose name is incomplete. Then they are released as text or dropped as syntax. `char` is empty
    when the answer has ended, and no step may yield after that. If the steps return earlier, the
    rest of the answer is text.
    """

    def __init__(self, steps: Callable[["Reader"], Iterator[None]], keeps_special: bool = False):
        self.keeps_special = keeps_special
        self.char = ""
        self.held: list[str] = []
        self.calls = 0
        self.has_arguments = False  # whether the last call has arguments
        self._pieces: list[Piece] = []
        self._kind: type[Piece] | None = None  # of the last emitted text
        self._texts: list[str] = []  # of a piece of that kind
        self._steps = steps(self)

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that are now certain."""
        for index, char in enumerate(text):
            if not self._step(char):
                self.release(TextPiece)
                self.add(TextPiece, text[index:])
                break
        return self._finished()

    def finish(self) -> list[Piece]:
        """Return the pieces that were held back; no more text follows."""
        self._step("")
        self.flush_end(TextPiece)
        return self._finished()

    def hold(self) -> None:
        self.held.append(self.char)

    def drop(self) -> None:
        self.held.clear()

    def release(self, kind: Text) -> None:
        """Emit the held characters as text."""
        if self.held:
            self.add(kind, "".join(self.held))
            self.held.clear()

    def flush_end(self, kind: Text) -> None:
        """Emit the held characters at the end of the answer, unless they are only white space after
        another piece.
        """
        if self._kind in (None, kind) or "".join(self.held).strip():
            self.release(kind)
        self.held.clear()

    def emit(self, kind: Text) -> None:
        """Emit the held characters and the current one as text."""
        self.release(kind)
        self.add(kind, self.char)

    def begin(self, name: str, call_id: str) -> None:
        """Begin a call; the held characters were its head."""
        self.held.clear()
        self._close()
        self._kind = CallStart
        self.has_arguments = False
        self._pieces.append(CallStart(self.calls, call_id, name))
        self.calls += 1

    def emit_argument(self) -> None:
        """Emit the current character as part of the last call's arguments."""
        self.add(Arguments, self.char)
        self.has_arguments = True

    def add(self, kind: type[Piece], text: str) -> None:
        if kind is not self._kind:
            self._close()
            self._kind = kind
        self._texts.append(text)

    def _step(self, char: str) -> bool:
        """Run one step; return whether it took the character."""
        self.char = char
        return next(self._steps, False) is None

    def _close(self) -> None:
        text = "".join(self._texts)
        self._texts = []
        if text and self._kind is Arguments:
            self._pieces.append(Arguments(self.calls - 1, text))
        elif text:
            self._pieces.append(self._kind(text))  # type: ignore[misc]

    def _finished(self) -> list[Piece]:
        self._close()
        finished = self._pieces
        self._pieces = []
        return finished


def hold_blank(reader: Reader) -> Iterator[None]:
    """Hold white space."""
    while reader.char.isspace():
        reader.hold()
        yield


def skip_separator(reader: Reader, end: str) -> Iterator[None]:
    """Skip the comma after a value, or stop at `end`."""
    yield from hold_blank(reader)
    if reader.char == ",":
        yield
        yield from hold_blank(reader)
    elif reader.char != end:
        raise FormatError


def hold_marker(reader: Reader, markers: Collection[str]) -> Generator[None, None, str | None]:
    """Hold the marker at this position; return None if there is none.

    Raises FormatError after an incomplete marker.
    """
    prefix = ""
    while prefix not in markers:
        if not reader.char or not any(
            candidate.startswith(prefix + reader.char) for candidate in markers
        ):
            if prefix:
                raise FormatError
            return None
        prefix += reader.char
        reader.hold()
        yield
    return prefix


def read_text(
    reader: Reader, markers: Collection[str], kind: Text = TextPiece
) -> Generator[None, None, str | None]:
    """Emit text up to the first marker; hold it with the white space before it. None at the end.

    No marker contains its first character twice, so a failed head does not contain a marker's
    start.
    """
    prefixes = {candidate[:length] for candidate in markers for length in range(1, len(candidate))}
    prefix = ""
    while reader.char:
        prefix += reader.char
        if prefix in prefixes:
            reader.hold()
        elif prefix in markers:
            reader.hold()
            yield
            return prefix
        elif len(prefix) > 1:
            reader.release(kind)
            prefix = ""
            continue  # this character may start a marker
        else:
            prefix = ""
            if reader.char.isspace():
                reader.hold()
            else:
                reader.emit(kind)
        yield
    reader.flush_end(kind)
    return None
