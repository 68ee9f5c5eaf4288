"""What the text of an answer turns out to be, piece by piece."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Said:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; `index` counts those of the answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of a call, as JSON text."""

    index: int
    text: str


Piece = Said | Thought | CallStart | Arguments
