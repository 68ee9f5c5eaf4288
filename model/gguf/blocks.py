"""The block types of GGUF tensors: elements and bytes of a block, and how it is decoded and
written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from . import codebooks, fields, rounding
from .fields import Fields


@dataclass(frozen=True)
class BlockType:
    """A tensor type. A block holds `elements` neighbouring elements of a row in `nbytes` bytes."""

    name: str
    number: int  # ggml's
    elements: int  # of a block
    nbytes: int  # of a block
    dtype: Any  # of the decoded elements
    unpack: Callable[[np.ndarray], Fields] | None = None  # of types with codes and scales
    decode_codebook: Callable[[np.ndarray], np.ndarray] | None = None  # of types with codebooks
    quantize: Callable[[np.ndarray], np.ndarray] | None = None  # of types that can be written

    @property
    def is_plain(self) -> bool:
        """Whether a block is one element, stored as NumPy stores it."""
        return not self.unpack and not self.decode_codebook

    @property
    def has_scales(self) -> bool:
        """Whether `fields` can unpack it."""
        return self.unpack is not None

    def fields(self, blocks: np.ndarray) -> Fields:
        """Unpack the codes and scales of blocks uint8 [n, nbytes]; the type must have scales."""
        assert self.unpack, f"blocks of {self.name} have no codes and scales"
        with np.errstate(over="ignore", invalid="ignore"):  # scales may be infinite or NaN
            return self.unpack(blocks)

    def decode(self, blocks: np.ndarray) -> np.ndarray:
        """Decode blocks uint8 [n, nbytes] to elements [n, elements]."""
        if self.unpack:
            return self.fields(blocks).values()
        if not self.decode_codebook:
            return blocks.view(self.dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # scales may be infinite or NaN
            return self.decode_codebook(blocks)

    @property
    def can_encode(self) -> bool:
        """Whether `encode` supports the type."""
        return self.quantize is not None or self.number in (0, 1, 30)  # F32, F16, BF16

    def encode(self, numbers: np.ndarray) -> np.ndarray:
        """Quantise elements [n, elements] to blocks uint8 [n, nbytes], as llama.cpp does."""
        assert self.can_encode, f"{self.name} cannot be written"
        if self.quantize is not None:
            return self.quantize(numbers.astype(np.float32))
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(numbers.astype(self.dtype)).view(np.uint8)


def plain_type(name: str, number: int, dtype: Any) -> BlockType:
    return BlockType(name, number, 1, np.dtype(dtype).itemsize, np.dtype(dtype))


def coded_type(
    name: str,
    number: int,
    elements: int,
    nbytes: int,
    read: Callable[[np.ndarray], Fields],
    write: Callable[[np.ndarray], np.ndarray] | None = None,
) -> BlockType:
    return BlockType(
        name, number, elements, nbytes, np.dtype(np.float32), unpack=read, quantize=write
    )


def codebook_type(
    name: str, number: int, nbytes: int, read: Callable[[np.ndarray], np.ndarray]
) -> BlockType:
    return BlockType(name, number, 256, nbytes, np.dtype(np.float32), decode_codebook=read)


TYPES = {
    kind.number: kind
    for kind in (
        plain_type("F32", 0, np.float32),
        plain_type("F16", 1, np.float16),
        coded_type("Q4_0", 2, 32, 18, fields.q4_0, rounding.q4_0),
        coded_type("Q4_1", 3, 32, 20, fields.q4_1, rounding.q4_1),
        coded_type("Q5_0", 6, 32, 22, fields.q5_0, rounding.q5_0),
        coded_type("Q5_1", 7, 32, 24, fields.q5_1, rounding.q5_1),
        coded_type("Q8_0", 8, 32, 34, fields.q8_0, rounding.q8_0),
        coded_type("Q2_K", 10, 256, 84, fields.q2_k),
        coded_type("Q3_K", 11, 256, 110, fields.q3_k),
        coded_type("Q4_K", 12, 256, 144, fields.q4_k),
        coded_type("Q5_K", 13, 256, 176, fields.q5_k),
        coded_type("Q6_K", 14, 256, 210, fields.q6_k),
        codebook_type("IQ2_XXS", 16, 66, codebooks.iq2_xxs),
        codebook_type("IQ2_XS", 17, 74, codebooks.iq2_xs),
        codebook_type("IQ3_XXS", 18, 98, codebooks.iq3_xxs),
        codebook_type("IQ1_S", 19, 50, codebooks.iq1_s),
        coded_type("IQ4_NL", 20, 32, 18, fields.iq4_nl),
        codebook_type("IQ3_S", 21, 110, codebooks.iq3_s),
        codebook_type("IQ2_S", 22, 82, codebooks.iq2_s),
        coded_type("IQ4_XS", 23, 256, 136, fields.iq4_xs),
        plain_type("I8", 24, np.int8),
        plain_type("I16", 25, np.int16),
        plain_type("I32", 26, np.int32),
        plain_type("I64", 27, np.int64),
        plain_type("F64", 28, np.float64),
        codebook_type("IQ1_M", 29, 56, codebooks.iq1_m),
        plain_type("BF16", 30, ml_dtypes.bfloat16),
        coded_type("TQ1_0", 34, 256, 54, fields.tq1_0),
        coded_type("TQ2_0", 35, 256, 66, fields.tq2_0),
        coded_type("MXFP4", 39, 32, 17, fields.mxfp4, rounding.mxfp4),
        coded_type("NVFP4", 40, 64, 36, fields.nvfp4),
        coded_type("Q1_0", 41, 128, 18, fields.q1_0),
    )
}
WRITTEN = {kind.name: kind for kind in TYPES.values() if kind.can_encode}
