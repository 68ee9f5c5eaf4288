"""What a GGUF file has before its tensors: values and texts, each length held against the file's size before use."""

import struct
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError

NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
BOOL, TEXT, ARRAY = 7, 8, 9
DEPTH = 8  # of arrays in arrays
LENGTH = struct.Struct("<Q")


class Header:
    """The bytes of a file, and how far they have been read."""

    def __init__(self, path: Path, data: memoryview):
        self.path = path
        self.data = data
        self.at = 0

    def check(self, count: int, nbytes: int, what: str) -> None:
        """Refuse so many things of at least so many bytes if the file has no place for them."""
        if count * nbytes > len(self.data) - self.at:
            raise ModelError(
                f"{self.path} is truncated or damaged: {what} would end at byte {self.at + count * nbytes} of "
                f"{len(self.data)}"
            )

    def take(self, nbytes: int, what: str) -> memoryview:
        self.check(1, nbytes, what)
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def number(self, form: str, what: str) -> Any:
        """A number of numpy's `form`."""
        return np.frombuffer(self.take(np.dtype(form).itemsize, what), form)[0].item()

    def text(self, what: str) -> str:
        return self.texts(1, what)[0]

    def texts(self, count: int, what: str) -> list[str]:
        """Texts with their lengths before them; a vocabulary has hundreds of thousands."""
        self.check(count, LENGTH.size, what)
        data, at, begin, out = self.data, self.at, self.at, []
        try:
            for _ in range(count):
                begin = at + LENGTH.size
                at = begin + LENGTH.unpack_from(data, at)[0]
                out.append(str(data[begin:at], "utf-8"))  # at most what there is: a slice ends with the data
                if at > len(data):
                    break
        except struct.error:  # no place for a length
            at = at + LENGTH.size
        except UnicodeDecodeError:
            if at <= len(data):
                found = bytes(data[begin:at][:100])
                raise ModelError(f"{self.path}: {what} holds {found!r}; it must be UTF-8") from None
        if at > len(data):
            raise ModelError(f"{self.path} is truncated or damaged: {what} would end at byte {at} of {len(data)}")
        self.at = at
        return out

    def metadata(self, count: int) -> dict[str, Any]:
        """So many keys and values. Arrays of numbers are numpy's, of texts and of arrays lists."""
        self.check(count, LENGTH.size + 4 + 1, f"metadata of {count} keys")
        found: dict[str, Any] = {}
        for index in range(count):
            key = self.text(f"the name of key {index}")
            if key in found:
                raise ModelError(f"{self.path} has the key {key!r:.200} twice; a key must be unique")
            what = f"the key {key!r:.200}"
            found[key] = self.value(self.number("<u4", what), what)
        return found

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        """A value of a type, by its number."""
        if kind == TEXT:
            return self.text(what)
        if kind == ARRAY:
            return self.array(what, depth + 1)
        return self.numbers(kind, 1, what)[0].item()

    def array(self, what: str, depth: int) -> Any:
        if depth > DEPTH:
            raise ModelError(f"{self.path}: {what} has arrays in arrays, {depth} deep; {DEPTH} is the most")
        kind, count = self.number("<u4", what), self.number("<u8", what)
        if kind == TEXT:
            return self.texts(count, what)
        if kind == ARRAY:
            self.check(count, 4 + LENGTH.size, what)
            return [self.array(what, depth + 1) for _ in range(count)]
        return self.numbers(kind, count, what)

    def numbers(self, kind: int, count: int, what: str) -> np.ndarray:
        if kind not in (*NUMBERS, BOOL):
            raise ModelError(f"{self.path}: {what} has a value of type {kind}; types are from 0 to 12")
        form = NUMBERS.get(kind, "u1")
        found = np.frombuffer(self.take(count * np.dtype(form).itemsize, what), form)
        if kind != BOOL:
            return found.copy()
        if (found > 1).any():
            raise ModelError(f"{self.path}: {what} holds {found.max()} as a truth value; it must be 0 or 1")
        return found.astype(bool)
