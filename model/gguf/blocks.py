"""The types of GGUF's tensors: how many elements a block has, in how many bytes, and what they stand for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from . import codebooks, fields, rounding
from .fields import Fields


@dataclass(frozen=True)
class BlockType:
    """One type. A row of a tensor is a row of blocks, each with a number of neighbouring elements in some bytes."""

    name: str
    number: int  # ggml's
    elements: int  # of a block
    nbytes: int  # of a block
    dtype: Any  # of the elements, decoded
    parts: Callable[[np.ndarray], Fields] | None = None  # of blocks that are codes and scales
    values: Callable[[np.ndarray], np.ndarray] | None = None  # of those that name rows of a codebook
    rounded: Callable[[np.ndarray], np.ndarray] | None = None  # blocks of numbers, where they are written

    @property
    def plain(self) -> bool:
        """Whether a block is one element, stored as numpy has it."""
        return not self.parts and not self.values

    @property
    def coded(self) -> bool:
        """Whether it has `fields`."""
        return self.parts is not None

    def fields(self, blocks: np.ndarray) -> Fields:
        """The codes and scales of blocks uint8 [n, nbytes], of a type that is `coded`."""
        assert self.parts, f"blocks of {self.name} are no codes and scales"
        with np.errstate(over="ignore", invalid="ignore"):  # of scales that are no numbers
            return self.parts(blocks)

    def decode(self, blocks: np.ndarray) -> np.ndarray:
        """The elements [n, elements] of blocks uint8 [n, nbytes]."""
        if self.parts:
            return self.fields(blocks).values()
        if not self.values:
            return blocks.view(self.dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # of scales that are no numbers
            return self.values(blocks)

    @property
    def written(self) -> bool:
        """Whether numbers can be rounded to it."""
        return self.rounded is not None or self.number in (0, 1, 30)  # F32, F16, BF16

    def encode(self, numbers: np.ndarray) -> np.ndarray:
        """The blocks uint8 [n, nbytes] of numbers [n, elements], each rounded as llama.cpp does it."""
        assert self.written, f"nothing is rounded to {self.name}"
        if self.rounded is not None:
            return self.rounded(numbers.astype(np.float32))
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(numbers.astype(self.dtype)).view(np.uint8)


def plain(name: str, number: int, dtype: Any) -> BlockType:
    return BlockType(name, number, 1, np.dtype(dtype).itemsize, np.dtype(dtype))


def coded(
    name: str,
    number: int,
    elements: int,
    nbytes: int,
    read: Callable[[np.ndarray], Fields],
    write: Callable[[np.ndarray], np.ndarray] | None = None,
) -> BlockType:
    return BlockType(name, number, elements, nbytes, np.dtype(np.float32), parts=read, rounded=write)


def looked_up(name: str, number: int, nbytes: int, read: Callable[[np.ndarray], np.ndarray]) -> BlockType:
    return BlockType(name, number, 256, nbytes, np.dtype(np.float32), values=read)


TYPES = {
    kind.number: kind
    for kind in (
        plain("F32", 0, np.float32),
        plain("F16", 1, np.float16),
        coded("Q4_0", 2, 32, 18, fields.q4_0, rounding.q4_0),
        coded("Q4_1", 3, 32, 20, fields.q4_1, rounding.q4_1),
        coded("Q5_0", 6, 32, 22, fields.q5_0, rounding.q5_0),
        coded("Q5_1", 7, 32, 24, fields.q5_1, rounding.q5_1),
        coded("Q8_0", 8, 32, 34, fields.q8_0, rounding.q8_0),
        coded("Q2_K", 10, 256, 84, fields.q2_k),
        coded("Q3_K", 11, 256, 110, fields.q3_k),
        coded("Q4_K", 12, 256, 144, fields.q4_k),
        coded("Q5_K", 13, 256, 176, fields.q5_k),
        coded("Q6_K", 14, 256, 210, fields.q6_k),
        looked_up("IQ2_XXS", 16, 66, codebooks.iq2_xxs),
        looked_up("IQ2_XS", 17, 74, codebooks.iq2_xs),
        looked_up("IQ3_XXS", 18, 98, codebooks.iq3_xxs),
        looked_up("IQ1_S", 19, 50, codebooks.iq1_s),
        coded("IQ4_NL", 20, 32, 18, fields.iq4_nl),
        looked_up("IQ3_S", 21, 110, codebooks.iq3_s),
        looked_up("IQ2_S", 22, 82, codebooks.iq2_s),
        coded("IQ4_XS", 23, 256, 136, fields.iq4_xs),
        plain("I8", 24, np.int8),
        plain("I16", 25, np.int16),
        plain("I32", 26, np.int32),
        plain("I64", 27, np.int64),
        plain("F64", 28, np.float64),
        looked_up("IQ1_M", 29, 56, codebooks.iq1_m),
        plain("BF16", 30, ml_dtypes.bfloat16),
        coded("TQ1_0", 34, 256, 54, fields.tq1_0),
        coded("TQ2_0", 35, 256, 66, fields.tq2_0),
        coded("MXFP4", 39, 32, 17, fields.mxfp4, rounding.mxfp4),
        coded("NVFP4", 40, 64, 36, fields.nvfp4),
        coded("Q1_0", 41, 128, 18, fields.q1_0),
    )
}
WRITTEN = {kind.name: kind for kind in TYPES.values() if kind.written}
