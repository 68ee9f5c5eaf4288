"""The interface of parsers of answers, and a chain of parsers."""

from collections.abc import Sequence
from typing import Protocol

from .pieces import Piece, TextPiece


class Parser(Protocol):
    """Turns the text of one answer, in slices, into pieces.

    The joined pieces do not depend on how the text was sliced.
    """

    @property
    def keeps_special(self) -> bool:
        """Whether the text must be decoded with special tokens."""
        ...

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that are now certain."""
        ...

    def finish(self) -> list[Piece]:
        """Return the pieces that were held back; no more text follows."""
        ...


class ParserChain:
    """Passes the text of each parser to the next one."""

    def __init__(self, parsers: Sequence[Parser]):
        self.parsers = parsers
        self.keeps_special = any(parser.keeps_special for parser in parsers)

    def push(self, text: str) -> list[Piece]:
        return self._through(0, [TextPiece(text)] if text else [])

    def finish(self) -> list[Piece]:
        out: list[Piece] = []
        for i, parser in enumerate(self.parsers):
            out += self._through(i + 1, parser.finish())
        return out

    def _through(self, start: int, pieces: list[Piece]) -> list[Piece]:
        for parser in self.parsers[start:]:
            pieces = [
                new
                for old in pieces
                for new in (parser.push(old.text) if isinstance(old, TextPiece) else [old])
            ]
        return pieces
