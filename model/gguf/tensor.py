"""One tensor of a GGUF file: its location, and how its blocks are decoded."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...sharding.spec import empty
from ..errors import ModelError
from .blocks import BlockType

STRIP = 1 << 17  # elements decoded at a time, so that intermediates stay in the CPU's cache


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """The location of a tensor on disk. Blocks run along its last axis."""

    name: str  # in the file
    file: Path
    kind: BlockType
    shape: tuple[int, ...]  # in NumPy's order: ggml's sizes reversed
    start: int  # offset in the file, in bytes

    @property
    def dtype(self) -> Any:
        """The dtype of the array that `read` returns."""
        return self.kind.dtype

    @property
    def nbytes(self) -> int:
        """The size of its blocks."""
        return math.prod(self.shape) // self.kind.elements * self.kind.nbytes

    def blocks(self) -> np.ndarray:
        """Its blocks, memory-mapped: uint8 [rows..., blocks, bytes of a block]."""
        *rows, columns = self.shape or (1,)
        return self.map(np.uint8, (*rows, columns // self.kind.elements, self.kind.nbytes))

    def mapped(self) -> np.ndarray:
        """The tensor, memory-mapped if its type is plain, else decoded."""
        return self.map(self.dtype, self.shape) if self.kind.is_plain else self.read()

    def map(self, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """Its bytes, memory-mapped as an array."""
        try:
            return np.asarray(np.memmap(self.file, dtype, "r", self.start, shape))
        except OSError as error:
            raise ModelError(f"{self.file} cannot be read: {error.strerror}") from None
        except ValueError:  # the file has become shorter
            raise self.truncated() from None

    def read(self) -> np.ndarray:
        """Read and decode the tensor. It is not memory-mapped: mapped pages would take memory twice
        during loading.
        """
        out = empty(self.shape, self.dtype)
        try:
            with open(self.file, "rb", buffering=0) as file:
                file.seek(self.start)
                if self.kind.is_plain:
                    self.fill(file, out.reshape(-1).view(np.uint8))
                    return out
                pending = out.reshape(-1, self.kind.elements)
                strip = np.empty(
                    (min(len(pending), STRIP // self.kind.elements), self.kind.nbytes), np.uint8
                )
                while len(pending):
                    blocks = strip[: len(pending)]
                    self.fill(file, blocks.reshape(-1))
                    pending[: len(blocks)] = self.kind.decode(blocks)
                    pending = pending[len(blocks) :]
        except OSError as error:
            raise ModelError(f"{self.file} cannot be read: {error.strerror}") from None
        return out

    def fill(self, file: Any, out: np.ndarray) -> None:
        """Fill `out` with the next bytes of the file."""
        pending = out.data
        while pending and (count := file.readinto(pending)):
            pending = pending[count:]
        if pending:
            raise self.truncated()

    def truncated(self) -> ModelError:
        end = self.start + self.nbytes
        return ModelError(
            f"{self.file} is truncated: tensor {self.name!r:.200} would end at byte {end}"
        )

    def cut(self, index: int) -> "BlockTensor":
        """The slice at `index` of the first axis, which stays with size 1."""
        if len(self.shape) < 2 and not self.kind.is_plain:
            raise ModelError(
                f"{self.file}: tensor {self.name!r:.200} of type {self.kind.name} has the shape "
                f"{self.shape}; it needs two axes or more to be cut, since {self.kind.elements} "
                "elements are a block"
            )
        single = replace(self, shape=(1, *self.shape[1:]))
        return replace(single, start=self.start + index * single.nbytes)
