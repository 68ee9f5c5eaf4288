"""The pieces into which an answer is parsed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Visible text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """Reasoning text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Start of a tool call; `index` counts the calls of the answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of a call's arguments, as JSON text."""

    index: int
    text: str


Piece = TextPiece | ReasoningPiece | CallStart | Arguments
