"""Calls of custom tools, which take a text instead of arguments."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

from .parser import Parser
from .pieces import Arguments, CallStart, Piece, TextPiece


class CustomCalls:
    """Emits such a call when its text is complete, or as text if it lacks the required form.

    The model sees a function with one argument. Where the form of the answer was fixed, it writes
    the argument's text `bare`.
    """

    def __init__(
        self,
        parser: Parser,
        argument: str,
        tools: Mapping[str, Callable[[str], bool]],
        is_bare: bool = False,
    ):
        """Args:
        tools: Tool name -> a check whether a text has the tool's form.
        bare: The answer is the text itself, not an object with the argument.
        """
        self.parser = parser
        self.argument = argument
        self.tools = tools
        self.bare = is_bare
        self.keeps_special = parser.keeps_special
        self.call: CallStart | None = None  # the call whose text is incomplete
        self.texts: list[str] = []
        self.untrue = 0  # calls so far that became text

    def push(self, text: str) -> list[Piece]:
        return self._through(self.parser.push(text))

    def finish(self) -> list[Piece]:
        return [*self._through(self.parser.finish()), *self._settled()]

    def _through(self, pieces: list[Piece]) -> list[Piece]:
        output: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Arguments) and self.call is not None:
                self.texts.append(piece.text)
                continue
            output += self._settled()
            if isinstance(piece, CallStart) and piece.name in self.tools:
                self.call = piece
            elif isinstance(piece, CallStart | Arguments):
                output.append(replace(piece, index=piece.index - self.untrue))
            else:
                output.append(piece)
        return output

    def _settled(self) -> list[Piece]:
        """Return the call that ended, if there is one."""
        call = self.call
        written = "".join(self.texts)
        self.call = None
        self.texts = []
        if call is None:
            return []
        text = written if self.bare else self._text_of(written)
        if text is None or not self.tools[call.name](text):
            self.untrue += 1
            return [TextPiece(written if text is None else text)]
        index = call.index - self.untrue
        return [replace(call, index=index), Arguments(index, text)]

    def _text_of(self, written: str) -> str | None:
        try:
            arguments = json.loads(written)
        except (ValueError, RecursionError):
            return None
        text = arguments.get(self.argument) if isinstance(arguments, dict) else None
        return text if isinstance(text, str) else None
