"""Codes of a few bits with scales and zeros, as AWQ and GPTQ make them: weight = (code - zero) * scale."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....ops.quant import Rounded, four_bits
from ....ops.quant.grouped import Grouped
from ....ops.quant.int4 import MIDDLE, Int4
from ....ops.quant.int8 import Int8
from ...config import ModelError
from ...stored_format import StoredGroup
from ..safetensors import Tensor
from .keys import HERE, refusal
from .matrix import Matrix

FLOATS = ("float16", "bfloat16", "float32")
GROUPS = (128, 64, 32)  # of int4; a larger group that one of them divides is several with the same scale


@dataclass(frozen=True)
class Integers:
    """How the codes lie."""

    bits: int
    group: int  # inputs that share a scale; -1: all
    centred: bool = False  # whether zero is the middle code everywhere
    ordered: bool = True  # whether a group's inputs are neighbours
    version: int = 2  # 1: zeros are stored less one


@dataclass(frozen=True)
class IntegerMatrix(Matrix):
    """A matrix of such codes, whose tensors a subclass unpacks."""

    def unpacked(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """Codes [in, out], scales and zeros [groups, out], and the group of each input where they are not in order."""
        raise NotImplementedError

    @property
    def middled(self) -> str:
        """How a config says that zero is the middle code."""
        return "sym = True"

    @property
    def form(self) -> Integers:
        assert isinstance(self.group.form, Integers)
        return self.group.form

    def read(self) -> np.ndarray:
        """The matrix in float32."""
        codes, scales, zeros, groups = self.unpacked()
        scales = self.finite(scales.astype(np.float32))
        if groups is None:
            groups = np.arange(len(codes)) // (len(codes) // len(scales))
        return ((codes.astype(np.float32) - zeros[groups]) * scales[groups]).T

    def fields_for(self, node: Rounded) -> dict[str, np.ndarray]:
        codes, scales, zeros, groups = self.unpacked()
        if groups is not None:
            raise ModelError(
                f"tensor {self.name!r} has inputs in an order of their own, and config.json says desc_act = False"
            )
        middle = 1 << self.form.bits - 1
        if self.form.centred and (zeros != middle).any():
            raise ModelError(
                f"tensor {self.name!r} has a zero point other than {middle}, and quantization_config says "
                f"{self.middled}"
            )
        own = self.format
        if isinstance(own, Int8):
            return {"codes": (codes.T ^ 128).view(np.int8), "scale": self.finite(scales.astype(np.float32)).T}
        assert isinstance(own, Int4 | Grouped)
        again = len(codes) // len(scales) // own.group  # of a group that is several
        if isinstance(own, Grouped):
            scale = self.finite(scales.astype(np.float32))
            shared = {"scale": scale} | ({} if own.least is None else {"least": (zeros - np.float32(middle)) * scale})
            fields = {"codes": codes.T ^ 128} | {name: value.T.repeat(again, 1) for name, value in shared.items()}
            return self.widened(fields, node)
        shared = {"scale": self.finite(scales)} | ({} if own.zero is None else {"zero": zeros})
        fields = {"nibbles": codes.T} | {name: value.T.repeat(again, 1) for name, value in shared.items()}
        return self.widened(fields, node)


def group_of(form: Integers) -> StoredGroup:
    """What such codes are kept as: int4, whose codes hold fewer bits too, or int8; widened where neither holds them."""
    if form.bits == 8:
        return StoredGroup(bytes_of(form), form)
    size = next((size for size in GROUPS if form.group % size == 0), None)  # -1 has none
    if size is None or not form.ordered:
        return StoredGroup(None, form)
    middle = form.centred and form.bits == 4  # fewer bits have another middle
    return StoredGroup(f"int4-{size}{'' if middle else '-zero'}", form)


def bytes_of(form: Integers) -> str | None:
    """The format of codes of eight bits."""
    if not form.ordered:
        return None
    if form.group == -1:
        return "int8-weights" if form.centred else None
    size = next((size for size in (*GROUPS, 16) if form.group % size == 0), None)
    return None if size is None else f"int8-weights-{size}{'' if form.centred else '-least'}"


def sides(codes: Tensor) -> tuple[int, int]:
    """The shape of the words of the codes."""
    if len(codes.shape) != 2 or not all(codes.shape) or codes.dtype.name != "int32":
        raise ModelError(
            f"tensor {codes.name!r} is {list(codes.shape)} of {codes.dtype.name}; it must be a matrix of int32"
        )
    return codes.shape[0], codes.shape[1]


def groups_of(codes: Tensor, columns: int, group: StoredGroup) -> int:
    """How many groups the inputs of a matrix are."""
    form = group.form
    assert isinstance(form, Integers)
    if form.group == -1:
        return 1
    if columns % form.group:
        raise ModelError(
            f"tensor {codes.name!r} has {columns} inputs, which do not divide by {HERE}.group_size = {form.group}"
        )
    return columns // form.group


def whole_number(config: Mapping[str, Any], key: str, *right: int) -> int:
    """The value of a key that must be one of these numbers."""
    value = config.get(key)
    if type(value) is not int or value not in right:
        raise refusal(f"{HERE}.{key}", value, " or ".join(map(str, right)))
    return value


def truth(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key, default)
    if type(value) is not bool:
        raise refusal(f"{HERE}.{key}", value, "true or false")
    return value


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """The codes [words * 32 / bits, ...] in words [words, ...]: one after the other, the first in the lowest bits."""
    if 32 % bits == 0:
        shifts = np.arange(0, 32, bits, dtype=np.uint32).reshape(1, -1, *[1] * (words.ndim - 1))
        codes = words.view(np.uint32)[:, None] >> shifts & np.uint32((1 << bits) - 1)
        return codes.astype(np.uint8).reshape(-1, *words.shape[1:])
    data = np.ascontiguousarray(words.T, "<i4").view(np.uint8)
    each = np.unpackbits(data, axis=1, bitorder="little").reshape(len(data), -1, bits)
    return (each << np.arange(bits, dtype=np.uint8)).sum(2, dtype=np.uint8).T


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """The words of `unpack`, of codes of 4 or 8 bits."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32).reshape(1, -1, *[1] * (codes.ndim - 1))
    each = codes.astype(np.uint32).reshape(-1, 32 // bits, *codes.shape[1:])
    return np.bitwise_or.reduce(each << shifts, axis=1).view(np.int32)


def numbers_of(node: Rounded) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `unpacked` gives of a matrix, of its node: codes [in, out], scales float16 and zeros [groups, out]."""
    (columns,) = node.into
    if isinstance(node, Int4):
        codes = four_bits.split(node.nibbles, columns)
        return codes, node.scale, np.full_like(node.scale, MIDDLE, np.uint8) if node.zero is None else node.zero
    assert isinstance(node, Grouped) and node.code == "int8"
    return node.codes ^ 128, node.scale.astype(np.float16), np.full(node.scale.shape, 128, np.uint8)


def sizes_of(name: str, shape: tuple[int, ...], form: Integers) -> tuple[int, int, int]:
    """Outputs, inputs and groups of a matrix whose zeros are to be packed along its outputs, or an error."""
    (rows, columns), size = shape, form.group
    if columns % size:
        others = [other for other in GROUPS if columns % other == 0]
        remedy = f"; it could be {' or '.join(map(str, others))}" if others else ""
        raise ModelError(f"tensor {name!r} has {columns} inputs, which do not divide by the group of {size}{remedy}")
    if rows * form.bits % 32:
        raise ModelError(
            f"tensor {name!r} has {rows} outputs, and {32 // form.bits} of them share a word in this layout; layout "
            "compressed-tensors has no such bound"
        )
    return rows, columns, columns // size
