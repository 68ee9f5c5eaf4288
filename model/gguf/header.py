"""Reads the header of a GGUF file: every length is checked against the size of the file before
use.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError

NUMBER_DTYPES = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
BOOL = 7
TEXT = 8
ARRAY = 9
MAX_DEPTH = 8  # of nested arrays
LENGTH = struct.Struct("<Q")


class Header:
    """A cursor over the bytes of a GGUF file."""

    def __init__(self, path: Path, data: memoryview):
        self.path = path
        self.data = data
        self.offset = 0

    def check_size(self, count: int, nbytes: int, label: str) -> None:
        """Raise if `count` items of at least `nbytes` bytes each would end after the file."""
        if count * nbytes > len(self.data) - self.offset:
            raise ModelError(
                f"{self.path} is truncated or damaged: {label} would end at byte "
                f"{self.offset + count * nbytes} of {len(self.data)}"
            )

    def read_bytes(self, nbytes: int, label: str) -> memoryview:
        self.check_size(1, nbytes, label)
        self.offset += nbytes
        return self.data[self.offset - nbytes : self.offset]

    def read_number(self, dtype: str, label: str) -> Any:
        """Read one number of a NumPy dtype."""
        return np.frombuffer(self.read_bytes(np.dtype(dtype).itemsize, label), dtype)[0].item()

    def read_text(self, label: str) -> str:
        return self.read_texts(1, label)[0]

    def read_texts(self, count: int, label: str) -> list[str]:
        """Read `count` length-prefixed texts; a vocabulary has hundreds of thousands."""
        self.check_size(count, LENGTH.size, label)
        data = self.data
        end = start = self.offset
        texts: list[str] = []
        try:
            for _ in range(count):
                start = end + LENGTH.size
                end = start + LENGTH.unpack_from(data, end)[0]
                texts.append(str(data[start:end], "utf-8"))  # a slice ends with the data
                if end > len(data):
                    break
        except struct.error:  # the file ends within a length
            end = end + LENGTH.size
        except UnicodeDecodeError:
            if end <= len(data):
                raw_text = bytes(data[start:end][:100])
                raise ModelError(
                    f"{self.path}: {label} holds {raw_text!r}; it must be UTF-8"
                ) from None
        if end > len(data):
            raise ModelError(
                f"{self.path} is truncated or damaged: {label} would end at byte {end} of "
                f"{len(data)}"
            )
        self.offset = end
        return texts

    def read_metadata(self, count: int) -> dict[str, Any]:
        """Read `count` keys and values: arrays of numbers as NumPy arrays, other arrays as
        lists.
        """
        self.check_size(count, LENGTH.size + 4 + 1, f"metadata of {count} keys")
        values: dict[str, Any] = {}
        for index in range(count):
            key = self.read_text(f"the name of key {index}")
            if key in values:
                raise ModelError(
                    f"{self.path} has the key {key!r:.200} twice; a key must be unique"
                )
            label = f"the key {key!r:.200}"
            values[key] = self.read_value(self.read_number("<u4", label), label)
        return values

    def read_value(self, type_code: int, label: str, depth: int = 0) -> Any:
        """Read a value of the type that GGUF numbers `type_code`."""
        if type_code == TEXT:
            return self.read_text(label)
        if type_code == ARRAY:
            return self.read_array(label, depth + 1)
        return self.read_numbers(type_code, 1, label)[0].item()

    def read_array(self, label: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ModelError(
                f"{self.path}: {label} has arrays in arrays, {depth} deep; it can have at most "
                f"{MAX_DEPTH}"
            )
        type_code = self.read_number("<u4", label)
        count = self.read_number("<u8", label)
        if type_code == TEXT:
            return self.read_texts(count, label)
        if type_code == ARRAY:
            self.check_size(count, 4 + LENGTH.size, label)
            return [self.read_array(label, depth + 1) for _ in range(count)]
        return self.read_numbers(type_code, count, label)

    def read_numbers(self, type_code: int, count: int, label: str) -> np.ndarray:
        if type_code not in (*NUMBER_DTYPES, BOOL):
            raise ModelError(
                f"{self.path}: {label} has a value of type {type_code}; types are from 0 to 12"
            )
        dtype = NUMBER_DTYPES.get(type_code, "u1")
        values = np.frombuffer(self.read_bytes(count * np.dtype(dtype).itemsize, label), dtype)
        if type_code != BOOL:
            return values.copy()
        if (values > 1).any():
            raise ModelError(
                f"{self.path}: {label} holds {values.max()} as a boolean; it must be 0 or 1"
            )
        return values.astype(bool)
