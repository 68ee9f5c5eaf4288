"""What a checkpoint's tensor is made of, in a GGUF file."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import ModelError

MOST_ROWS = 1 << 24  # of a tensor whose rows are put in another order
Turn = Callable[..., np.ndarray]


@dataclass(frozen=True, eq=False)
class Part:
    """A tensor of the file, or one expert of a stack, or some of its rows."""

    name: str
    expert: int | None = None
    rows: np.ndarray | None = None  # which, in this order; None: all as they come

    def of(self, numbers: np.ndarray) -> np.ndarray:
        """The part of the whole tensor, in numbers."""
        found = numbers if self.expert is None else numbers[self.expert]
        return found if self.rows is None else found[self.rows]


@dataclass(frozen=True, eq=False)
class Origin:
    """Where a tensor of a checkpoint comes from: its parts' rows follow one another, unless there is a `turn`."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    turn: Turn | None = None  # from the parts in numbers to the tensor; None: the rows can be taken as they are stored

    def made(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """The tensor; `read` gives those of the file in numbers."""
        whole = {name: read(name) for name in {part.name for part in self.parts}}
        parts = [part.of(whole[part.name]) for part in self.parts]
        made = self.turn(*parts) if self.turn else parts[0] if len(parts) == 1 else np.concatenate(parts)
        return made.reshape(self.shape)


@dataclass(frozen=True, eq=False)
class Change:
    """What is to be undone of what llama.cpp did to a tensor."""

    rows: np.ndarray | None = None  # take these rows, in this order
    numbers: Turn | None = None  # then, of the decoded numbers
    back: Turn | None = None  # what a writer does to the numbers: the inverse of `numbers`


def halves_apart(heads: int, size: int) -> np.ndarray:
    """The order of rows that undoes llama.cpp's: in each head it has row 0, row size/2, row 1, and so on."""
    if size % 2 or heads * size > MOST_ROWS:
        raise ModelError(f"GGUF: {heads} heads of {size}; their size must be even, and at most {MOST_ROWS} rows in all")
    return np.arange(heads * size).reshape(heads, size // 2, 2).swapaxes(1, 2).reshape(-1)
