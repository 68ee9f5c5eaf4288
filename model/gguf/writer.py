"""Writes a GGUF file tensor by tensor; `file.py` reads it."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .blocks import BlockType
from .file import ALIGNMENT, MAGIC
from .header import ARRAY, BOOL, LENGTH, NUMBER_DTYPES, TEXT

VERSION = 3
TYPE_CODES = {dtype: code for code, dtype in NUMBER_DTYPES.items()}
SCALAR_TYPES = {
    bool: BOOL,
    int: TYPE_CODES["<u4"],
    float: TYPE_CODES["<f4"],
    str: TEXT,
}  # of scalars, as llama.cpp expects them
ENTRY_TYPES = SCALAR_TYPES | {int: TYPE_CODES["<i4"]}  # of list entries


def write_file(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[BlockType, tuple[int, ...]]],
    values: Iterable[np.ndarray],
) -> None:
    """Write a GGUF file.

    Args:
        tensors: the type and shape of each tensor.
        values: the blocks (uint8) of each tensor, in the same order, one tensor at a time.
    """
    head = (
        MAGIC
        + VERSION.to_bytes(4, "little")
        + LENGTH.pack(len(tensors))
        + LENGTH.pack(len(metadata))
    )
    head += b"".join(encode_text(key) + encode_value(value) for key, value in metadata.items())
    offset = 0
    for name, (kind, shape) in tensors.items():
        sizes = b"".join(LENGTH.pack(size) for size in reversed(shape))
        head += (
            encode_text(name)
            + encode_number(len(shape), "<u4")
            + sizes
            + encode_number(kind.number, "<u4")
            + LENGTH.pack(offset)
        )
        offset += padded_size(nbytes_of(kind, shape))
    with open(path, "wb") as file:
        file.write(head.ljust(padded_size(len(head)), b"\0"))
        for (name, (kind, shape)), value in zip(tensors.items(), values, strict=True):
            size = nbytes_of(kind, shape)
            assert (value.dtype, value.size) == (np.uint8, size), name
            file.write(np.ascontiguousarray(value).reshape(-1).data)
            file.write(bytes(padded_size(size) - size))


def nbytes_of(kind: BlockType, shape: tuple[int, ...]) -> int:
    return math.prod(shape) // kind.elements * kind.nbytes


def padded_size(size: int) -> int:
    """The size rounded up to the alignment of tensors."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def encode_text(value: str) -> bytes:
    data = value.encode()
    return LENGTH.pack(len(data)) + data


def encode_number(value: Any, dtype: str) -> bytes:
    return np.array(value, dtype).tobytes()


def encode_value(value: Any) -> bytes:
    """A value after the code of its type."""
    if isinstance(value, list):
        kind = ENTRY_TYPES[type(value[0])]
        return (
            encode_number(ARRAY, "<u4")
            + encode_number(kind, "<u4")
            + LENGTH.pack(len(value))
            + encode_entries(value, kind)
        )
    kind = SCALAR_TYPES[type(value)]
    return encode_number(kind, "<u4") + encode_entries([value], kind)


def encode_entries(values: list[Any], kind: int) -> bytes:
    if kind == TEXT:
        return b"".join(map(encode_text, values))
    return encode_number(values, NUMBER_DTYPES.get(kind, "u1"))
