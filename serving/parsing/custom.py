"""Calls of tools that take a text instead of arguments."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

from .parser import Parser
from .pieces import Arguments, CallStart, Piece, Said


class CustomCalls:
    """Passes such a call on when all of its text is known, and as text for the reader if it has not its form.

    The model sees a function with one argument; where the form of the answer was fixed, it writes the text `bare`.
    """

    def __init__(self, parser: Parser, argument: str, tools: Mapping[str, Callable[[str], bool]], bare: bool = False):
        """`tools`: by the name of each tool whether a text has its form."""
        self.parser, self.argument, self.tools, self.bare = parser, argument, tools, bare
        self.keeps_special = parser.keeps_special
        self.call: CallStart | None = None  # the one whose text is not all there
        self.texts: list[str] = []
        self.untrue = 0  # calls so far that turned out to be text

    def push(self, text: str) -> list[Piece]:
        return self._through(self.parser.push(text))

    def finish(self) -> list[Piece]:
        return [*self._through(self.parser.finish()), *self._settled()]

    def _through(self, pieces: list[Piece]) -> list[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Arguments) and self.call is not None:
                self.texts.append(piece.text)
                continue
            found += self._settled()
            if isinstance(piece, CallStart) and piece.name in self.tools:
                self.call = piece
            elif isinstance(piece, CallStart | Arguments):
                found.append(replace(piece, index=piece.index - self.untrue))
            else:
                found.append(piece)
        return found

    def _settled(self) -> list[Piece]:
        """The call that is over, if there is one."""
        call, written = self.call, "".join(self.texts)
        self.call, self.texts = None, []
        if call is None:
            return []
        text = written if self.bare else self._text_of(written)
        if text is None or not self.tools[call.name](text):
            self.untrue += 1
            return [Said(written if text is None else text)]
        index = call.index - self.untrue
        return [replace(call, index=index), Arguments(index, text)]

    def _text_of(self, written: str) -> str | None:
        try:
            found = json.loads(written)
        except (ValueError, RecursionError):
            return None
        text = found.get(self.argument) if isinstance(found, dict) else None
        return text if isinstance(text, str) else None
