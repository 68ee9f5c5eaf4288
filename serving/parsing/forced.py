"""An answer that was made to be the arguments of one function."""

from .calls import new_id
from .pieces import Arguments, CallStart, Piece


class Forced:
    """All of its text is the arguments: the form of the answer was fixed."""

    keeps_special = False

    def __init__(self, name: str):
        self.name, self.begun = name, False

    def push(self, text: str) -> list[Piece]:
        begin: list[Piece] = [] if self.begun else [CallStart(0, new_id(), self.name)]
        self.begun = True
        return [*begin, Arguments(0, text)]

    def finish(self) -> list[Piece]:
        return []
