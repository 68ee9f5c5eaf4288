"""Integer codes with scales and zero points, as in AWQ and GPTQ: weight = (code - zero) * scale."""

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
from .keys import CONFIG_KEY, unsupported_value
from .matrix import Matrix

FLOATS = ("float16", "bfloat16", "float32")
GROUPS = (128, 64, 32)  # group sizes of int4; a multiple is split into groups with equal scales


@dataclass(frozen=True)
class IntegerLayout:
    """The layout of the codes."""

    bits: int
    group: int  # inputs that share a scale; -1: all
    centred: bool = False  # all zero points are the middle code
    ordered: bool = True  # groups are contiguous inputs
    version: int = 2  # 1: zero points are stored less one


@dataclass(frozen=True)
class IntegerMatrix(Matrix):
    """A matrix of integer codes, whose tensors a subclass unpacks."""

    def unpacked(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """(codes [in, out], scales, zeros [groups, out], each input's group if not in order)."""
        raise NotImplementedError

    @property
    def symmetry_setting(self) -> str:
        """The config setting that makes zero points the middle code, for error messages."""
        return "sym = True"

    @property
    def form(self) -> IntegerLayout:
        assert isinstance(self.group.form, IntegerLayout)
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
                f"tensor {self.name!r} has permuted inputs, and config.json says desc_act = False"
            )
        middle = 1 << self.form.bits - 1
        if self.form.centred and (zeros != middle).any():
            raise ModelError(
                f"tensor {self.name!r} has a zero point other than {middle}, and "
                f"quantization_config says {self.symmetry_setting}"
            )
        stored_format = self.format
        if isinstance(stored_format, Int8):
            return {
                "codes": (codes.T ^ 128).view(np.int8),
                "scale": self.finite(scales.astype(np.float32)).T,
            }
        assert isinstance(stored_format, Int4 | Grouped)
        repeats = len(codes) // len(scales) // stored_format.group
        if isinstance(stored_format, Grouped):
            scale = self.finite(scales.astype(np.float32))
            shared = {"scale": scale} | (
                {}
                if stored_format.least is None
                else {"least": (zeros - np.float32(middle)) * scale}
            )
            fields = {"codes": codes.T ^ 128} | {
                name: value.T.repeat(repeats, 1) for name, value in shared.items()
            }
            return self.widened(fields, node)
        shared = {"scale": self.finite(scales)} | (
            {} if stored_format.zero is None else {"zero": zeros}
        )
        fields = {"nibbles": codes.T} | {
            name: value.T.repeat(repeats, 1) for name, value in shared.items()
        }
        return self.widened(fields, node)


def make_group(form: IntegerLayout) -> StoredGroup:
    """The format for such codes: int4 (also for fewer bits) or int8; None if neither holds them."""
    if form.bits == 8:
        return StoredGroup(int8_format(form), form)
    size = next((size for size in GROUPS if form.group % size == 0), None)  # None for -1
    if size is None or not form.ordered:
        return StoredGroup(None, form)
    middle = form.centred and form.bits == 4  # fewer bits have a smaller middle code
    return StoredGroup(f"int4-{size}{'' if middle else '-zero'}", form)


def int8_format(form: IntegerLayout) -> str | None:
    """The format for 8-bit codes."""
    if not form.ordered:
        return None
    if form.group == -1:
        return "int8-weights" if form.centred else None
    size = next((size for size in (*GROUPS, 16) if form.group % size == 0), None)
    return None if size is None else f"int8-weights-{size}{'' if form.centred else '-least'}"


def packed_shape(codes: Tensor) -> tuple[int, int]:
    """The shape of the packed codes, which must be a matrix of int32."""
    if len(codes.shape) != 2 or not all(codes.shape) or codes.dtype.name != "int32":
        raise ModelError(
            f"tensor {codes.name!r} is {list(codes.shape)} of {codes.dtype.name}; it must be a "
            "matrix of int32"
        )
    return codes.shape[0], codes.shape[1]


def count_groups(codes: Tensor, columns: int, group: StoredGroup) -> int:
    """The number of groups in the inputs of a matrix."""
    form = group.form
    assert isinstance(form, IntegerLayout)
    if form.group == -1:
        return 1
    if columns % form.group:
        raise ModelError(
            f"tensor {codes.name!r} has {columns} inputs, which do not divide by "
            f"{CONFIG_KEY}.group_size = {form.group}"
        )
    return columns // form.group


def checked_int(config: Mapping[str, Any], key: str, *right: int) -> int:
    """The value of a key that must be one of these integers."""
    value = config.get(key)
    if type(value) is not int or value not in right:
        raise unsupported_value(f"{CONFIG_KEY}.{key}", value, " or ".join(map(str, right)))
    return value


def checked_bool(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key, default)
    if type(value) is not bool:
        raise unsupported_value(f"{CONFIG_KEY}.{key}", value, "true or false")
    return value


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack codes [n * 32 / bits, ...] from words [n, ...], the first in the lowest bits."""
    if 32 % bits == 0:
        shifts = np.arange(0, 32, bits, dtype=np.uint32).reshape(1, -1, *[1] * (words.ndim - 1))
        codes = words.view(np.uint32)[:, None] >> shifts & np.uint32((1 << bits) - 1)
        return codes.astype(np.uint8).reshape(-1, *words.shape[1:])
    data = np.ascontiguousarray(words.T, "<i4").view(np.uint8)
    code_bits = np.unpackbits(data, axis=1, bitorder="little").reshape(len(data), -1, bits)
    return (code_bits << np.arange(bits, dtype=np.uint8)).sum(2, dtype=np.uint8).T


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `unpack`, for 4-bit and 8-bit codes."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32).reshape(1, -1, *[1] * (codes.ndim - 1))
    grouped = codes.astype(np.uint32).reshape(-1, 32 // bits, *codes.shape[1:])
    return np.bitwise_or.reduce(grouped << shifts, axis=1).view(np.int32)


def unpack_node(node: Rounded) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The inverse of `fields_for`: codes [in, out], float16 scales and zeros [groups, out]."""
    (columns,) = node.into
    if isinstance(node, Int4):
        codes = four_bits.split(node.nibbles, columns)
        return (
            codes,
            node.scale,
            np.full_like(node.scale, MIDDLE, np.uint8) if node.zero is None else node.zero,
        )
    assert isinstance(node, Grouped) and node.code == "int8"
    return node.codes ^ 128, node.scale.astype(np.float16), np.full(node.scale.shape, 128, np.uint8)


def checked_sizes(name: str, shape: tuple[int, ...], form: IntegerLayout) -> tuple[int, int, int]:
    """(outputs, inputs, groups) of a matrix to write; sizes that cannot be packed are an error."""
    rows, columns = shape
    size = form.group
    if columns % size:
        alternatives = [candidate for candidate in GROUPS if columns % candidate == 0]
        remedy = f"; it could be {' or '.join(map(str, alternatives))}" if alternatives else ""
        raise ModelError(
            f"tensor {name!r} has {columns} inputs, which do not divide by the group of "
            f"{size}{remedy}"
        )
    if rows * form.bits % 32:
        raise ModelError(
            f"tensor {name!r} has {rows} outputs, and {32 // form.bits} of them share a word in "
            "this layout; layout compressed-tensors has no such bound"
        )
    return rows, columns, columns // size
