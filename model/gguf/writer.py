"""A GGUF file, written tensor by tensor; `file.py` reads it."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .blocks import BlockType
from .file import ALIGNMENT, MAGIC
from .header import ARRAY, BOOL, LENGTH, NUMBERS, TEXT

VERSION = 3
CODES = {form: code for code, form in NUMBERS.items()}
FORMS = {bool: BOOL, int: CODES["<u4"], float: CODES["<f4"], str: TEXT}  # of single values, as llama.cpp expects them
ENTRIES = FORMS | {int: CODES["<i4"]}  # of lists


def write_file(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[BlockType, tuple[int, ...]]],
    values: Iterable[np.ndarray],
) -> None:
    """`tensors` gives types and shapes, `values` their blocks uint8 in that order, one tensor at a time."""
    head = MAGIC + VERSION.to_bytes(4, "little") + LENGTH.pack(len(tensors)) + LENGTH.pack(len(metadata))
    head += b"".join(text(key) + typed(value) for key, value in metadata.items())
    at = 0
    for name, (kind, shape) in tensors.items():
        sizes = b"".join(LENGTH.pack(size) for size in reversed(shape))
        head += text(name) + number(len(shape), "<u4") + sizes + number(kind.number, "<u4") + LENGTH.pack(at)
        at += filled(nbytes_of(kind, shape))
    with open(path, "wb") as file:
        file.write(head.ljust(filled(len(head)), b"\0"))
        for (name, (kind, shape)), value in zip(tensors.items(), values, strict=True):
            size = nbytes_of(kind, shape)
            assert (value.dtype, value.size) == (np.uint8, size), name
            file.write(np.ascontiguousarray(value).reshape(-1))
            file.write(bytes(filled(size) - size))


def nbytes_of(kind: BlockType, shape: tuple[int, ...]) -> int:
    return math.prod(shape) // kind.elements * kind.nbytes


def filled(size: int) -> int:
    """Up to where the next tensor begins."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def text(value: str) -> bytes:
    data = value.encode()
    return LENGTH.pack(len(data)) + data


def number(value: Any, form: str) -> bytes:
    return np.array(value, form).tobytes()


def typed(value: Any) -> bytes:
    """A value behind the number of its type."""
    if isinstance(value, list):
        kind = ENTRIES[type(value[0])]
        return number(ARRAY, "<u4") + number(kind, "<u4") + LENGTH.pack(len(value)) + entries(value, kind)
    kind = FORMS[type(value)]
    return number(kind, "<u4") + entries([value], kind)


def entries(values: list[Any], kind: int) -> bytes:
    if kind == TEXT:
        return b"".join(map(text, values))
    return number(values, NUMBERS.get(kind, "u1"))
