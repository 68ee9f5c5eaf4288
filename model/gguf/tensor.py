"""One tensor of a GGUF file: where its blocks lie, and what they stand for."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...sharding.spec import empty
from ..errors import ModelError
from .blocks import BlockType

STRIP = 1 << 17  # elements that are decoded at a time: what lies between stays in the cache


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """Where one tensor lies on disk. Its last axis is the one that neighbours in a block stand along."""

    name: str  # as the file has it
    file: Path
    kind: BlockType
    shape: tuple[int, ...]  # as numpy has it: ggml's sizes, the last first
    start: int

    @property
    def dtype(self) -> Any:
        """Of what `read` gives."""
        return self.kind.dtype

    @property
    def nbytes(self) -> int:
        """Of its blocks."""
        return math.prod(self.shape) // self.kind.elements * self.kind.nbytes

    def blocks(self) -> np.ndarray:
        """Its blocks uint8 [rows..., blocks, bytes of a block], mapped: only what is touched is read."""
        *rows, columns = self.shape or (1,)
        return self.map(np.uint8, (*rows, columns // self.kind.elements, self.kind.nbytes))

    def mapped(self) -> np.ndarray:
        """The tensor, mapped where it is stored as numpy has it, else decoded."""
        return self.map(self.dtype, self.shape) if self.kind.plain else self.read()

    def map(self, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """Its bytes as an array."""
        try:
            return np.asarray(np.memmap(self.file, dtype, "r", self.start, shape))
        except OSError as error:
            raise ModelError(f"{self.file} cannot be read: {error.strerror}") from None
        except ValueError:  # the file has become shorter
            raise self.truncated() from None

    def read(self) -> np.ndarray:
        """The elements, read rather than mapped: mapped pages would take memory a second time while the model loads."""
        out = empty(self.shape, self.dtype)
        try:
            with open(self.file, "rb", buffering=0) as file:
                file.seek(self.start)
                if self.kind.plain:
                    self.fill(file, out.reshape(-1).view(np.uint8))
                    return out
                rest = out.reshape(-1, self.kind.elements)
                strip = np.empty((min(len(rest), STRIP // self.kind.elements), self.kind.nbytes), np.uint8)
                while len(rest):
                    blocks = strip[: len(rest)]
                    self.fill(file, blocks.reshape(-1))
                    rest[: len(blocks)] = self.kind.decode(blocks)
                    rest = rest[len(blocks) :]
        except OSError as error:
            raise ModelError(f"{self.file} cannot be read: {error.strerror}") from None
        return out

    def fill(self, file: Any, out: np.ndarray) -> None:
        """The next bytes of the file, as many as `out` has."""
        rest = memoryview(out)
        while rest and (count := file.readinto(rest)):
            rest = rest[count:]
        if rest:
            raise self.truncated()

    def truncated(self) -> ModelError:
        end = self.start + self.nbytes
        return ModelError(f"{self.file} is truncated: tensor {self.name!r:.200} would end at byte {end}")

    def cut(self, index: int) -> "BlockTensor":
        """One element of its first axis; the axis stays, with size 1."""
        if len(self.shape) < 2 and not self.kind.plain:
            raise ModelError(
                f"{self.file}: tensor {self.name!r:.200} of type {self.kind.name} has the shape {self.shape}; it needs "
                f"two axes or more to be cut, since {self.kind.elements} elements are a block"
            )
        one = replace(self, shape=(1, *self.shape[1:]))
        return replace(one, start=self.start + index * one.nbytes)
