"""How a checkpoint's tensor is assembled from the tensors of a GGUF file."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import ModelError

MAX_ROWS = 1 << 24  # of a tensor whose rows are reordered
Transform = Callable[..., np.ndarray]


@dataclass(frozen=True, eq=False)
class TensorSlice:
    """A tensor of the file, one expert of a stack, or a selection of rows."""

    name: str
    expert: int | None = None
    rows: np.ndarray | None = None  # row indices in order; None: all rows

    def select(self, tensor: np.ndarray) -> np.ndarray:
        """The slice of the decoded tensor."""
        selected = tensor if self.expert is None else tensor[self.expert]
        return selected if self.rows is None else selected[self.rows]


@dataclass(frozen=True, eq=False)
class Origin:
    """How a checkpoint's tensor is assembled: its slices are concatenated by rows, unless there is
    a `transform`.
    """

    shape: tuple[int, ...]
    parts: tuple[TensorSlice, ...]
    transform: Transform | None = None  # of decoded slices; None: stored rows are used as they are

    def build(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Assemble the tensor; `read` returns a decoded tensor of the file."""
        tensors_by_name = {name: read(name) for name in {item.name for item in self.parts}}
        arrays = [item.select(tensors_by_name[item.name]) for item in self.parts]
        tensor = (
            self.transform(*arrays)
            if self.transform
            else arrays[0]
            if len(arrays) == 1
            else np.concatenate(arrays)
        )
        return tensor.reshape(self.shape)


@dataclass(frozen=True, eq=False)
class Change:
    """How to undo a change that llama.cpp made to a tensor."""

    rows: np.ndarray | None = None  # row indices, in order
    transform: Transform | None = None  # applied after that to the decoded values
    inverse: Transform | None = None  # the inverse of `transform`, for the writer


def unpaired_rows(heads: int, size: int) -> np.ndarray:
    """The row order that undoes llama.cpp's interleaving: in each head it stores row 0, row size/2,
    row 1, and so on.
    """
    if size % 2 or heads * size > MAX_ROWS:
        raise ModelError(
            f"GGUF: {heads} heads of {size}; their size must be even, and at most {MAX_ROWS} "
            "rows in all"
        )
    return np.arange(heads * size).reshape(heads, size // 2, 2).swapaxes(1, 2).reshape(-1)
