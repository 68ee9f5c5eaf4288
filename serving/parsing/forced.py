"""Answers that were constrained to the arguments of one function."""

from .calls import new_id
from .pieces import Arguments, CallStart, Piece


class Forced:
    """Parser of an answer whose whole text is the arguments, because its form was fixed."""

    keeps_special = False

    def __init__(self, name: str):
        self.name = name
        self.begun = False

    def push(self, text: str) -> list[Piece]:
        begin: list[Piece] = [] if self.begun else [CallStart(0, new_id(), self.name)]
        self.begun = True
        return [*begin, Arguments(0, text)]

    def finish(self) -> list[Piece]:
        return []
