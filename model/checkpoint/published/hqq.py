"""HQQ checkpoints as transformers saves them: groups of a matrix's numbers, one after the other, that share a scale.

weight = (code - zero) * scale, and `zero` need be no whole number. Groups are neighbouring inputs (axis 1), or numbers
that lie `out * in / group_size` apart (axis 0). What is packed together lies a part of the groups' axis apart.

    W_q          uint8 [groups * nbits / 8, group_size], or [group_size * nbits / 8, groups] of axis 0; the first codes
                 in the high bits. Of 3 bits int32, ten codes a word. It may be called by a wider type.
    scale, zero  [groups, 1], or [1, groups]
    nbits, group_size, axis, shape, and more that says nothing of the weight
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....ops.quant import Rounded
from ....ops.quant.grouped import Grouped
from ...config import ModelError
from ...stored_format import StoredFormat, StoredGroup
from ..safetensors import Tensor
from .integers import FLOATS, GROUPS
from .keys import HERE, known, patterns, refusal
from .matrix import Matrix, check, take

TOP = {"quant_method": ("hqq",), "quant_config": ..., "skip_modules": ...}
PARAMS = {"weight_quant_params": ..., "scale_quant_params": (), "zero_quant_params": (), "offload_meta": (False,)}
WEIGHT = {
    "nbits": (8, 4, 3, 2, 1), "group_size": ..., "axis": (0, 1), "channel_wise": (True,), "view_as_float": ...,
    "optimize": ..., "round_zero": ...,
}  # fmt: skip
ENDINGS = (".W_q", ".scale", ".zero", ".nbits", ".group_size", ".axis", ".shape")
UNUSED = (
    ".packing", ".unpack_view_dtype", ".view_as_float", ".compute_dtype", ".offload_meta", ".encoded_state_dict",
    ".stores_quant_config", ".channel_wise", ".optimize", ".round_zero",
)  # fmt: skip
STORAGE = ("uint8", "int32", "float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Groups:
    """How the codes lie."""

    bits: int
    size: int
    axis: int

    def count(self, shape: tuple[int, int]) -> int:
        return math.prod(shape) // self.size

    def words(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The shape of what is packed, in bytes, or in int32 of three bits."""
        long, other = (self.count(shape), self.size) if self.axis == 1 else (self.size, self.count(shape))
        return (-(-long // 10) if self.bits == 3 else long * self.bits // 8), other

    def unpacked(self, data: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        """The codes [groups, size], or [size, groups]."""
        top = 30 if self.bits == 3 else 8
        parts = [data >> (top - self.bits * (i + 1)) & ((1 << self.bits) - 1) for i in range(top // self.bits)]
        long = self.count(shape) if self.axis == 1 else self.size
        return np.concatenate(parts)[:long].astype(np.uint8)


@dataclass(frozen=True)
class HqqMatrix(Matrix):
    def unpacked(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes, scales and zeros as they lie."""
        form = self.group.form
        assert isinstance(form, Groups)
        data, scale, zero = (self.tensors[ending].read() for ending in ENDINGS[:3])
        data = np.ascontiguousarray(data).view(np.int32 if form.bits == 3 else np.uint8)
        scale, zero = self.finite(scale.astype(np.float32)), zero.astype(np.float32)
        if not np.isfinite(zero).all():
            raise ModelError(f"tensor {self.tensors['.zero'].name!r} holds a zero that is no finite number")
        return form.unpacked(data, self.shape), scale, zero

    def read(self) -> np.ndarray:
        codes, scale, zero = self.unpacked()
        return ((codes - zero) * scale).reshape(self.shape)

    def fields_for(self, node: Rounded) -> dict[str, np.ndarray]:
        assert isinstance(node, Grouped)
        codes, scale, zero = self.unpacked()
        rows, again = self.shape[0], self.group.form.size // node.group
        if node.code == "int8":
            codes, zero = codes ^ 128, zero - 128
        return {
            "codes": codes.reshape(self.shape),
            "scale": scale.reshape(rows, -1).repeat(again, 1),
            "least": (zero * scale).reshape(rows, -1).repeat(again, 1),
        }


def stored_format(config: Mapping[str, Any]) -> StoredFormat:
    said = known(HERE, config, TOP)
    params = known(f"{HERE}.quant_config", said.get("quant_config"), PARAMS)
    where = f"{HERE}.quant_config.weight_quant_params"
    weight = known(where, params.get("weight_quant_params"), WEIGHT)
    size, bits, axis = weight.get("group_size"), weight.get("nbits"), weight.get("axis", 0)
    if type(size) is not int or size < 8 or size % 8:
        raise refusal(f"{where}.group_size", size, "a multiple of 8")
    if bits is None:
        raise refusal(f"{where}.nbits", bits, "8, 4, 3, 2 or 1")
    skipped = patterns(f"{HERE}.skip_modules", said.get("skip_modules", []))
    group = StoredGroup(kept(bits, size, axis), Groups(bits, size, axis), multiple=size)
    return StoredFormat("hqq", (group,), ("lm_head", "embed_tokens", *skipped), parts=True, rounds_head=False)


def kept(bits: int, size: int, axis: int) -> str | None:
    """The format of groups of neighbouring inputs."""
    within = next((group for group in GROUPS if size % group == 0), None)
    if axis != 1 or within is None:
        return None
    return f"int8-weights-{within}-least" if bits == 8 else f"int4-{within}-least"


def gather(tensors: dict[str, Tensor], stored: StoredFormat) -> dict[str, Tensor | Matrix]:
    found: dict[str, Any] = dict(tensors)
    (group,) = stored.groups
    for stem in [name.removesuffix(".W_q") for name in tensors if name.endswith(".W_q")]:
        for ending in UNUSED:
            found.pop(stem + ending, None)
        found[f"{stem}.weight"] = matrix(stem, take(found, stem, ".W_q", ENDINGS), group)
    return found


def matrix(stem: str, tensors: dict[str, Tensor], group: StoredGroup) -> Matrix:
    """One matrix, the shapes and dtypes of its tensors checked."""
    form = group.form
    assert isinstance(form, Groups)
    for ending, right in ((".nbits", form.bits), (".group_size", form.size), (".axis", form.axis)):
        check(tensors[ending], ("int32", "int64"), (), (1,))
        if (value := int(tensors[ending].read().reshape(()))) != right:
            raise ModelError(f"tensor {tensors[ending].name!r} holds {value}, and {HERE}.quant_config says {right}")
    check(tensors[".shape"], ("int32", "int64"), (2,))
    rows, columns = (int(size) for size in tensors[".shape"].read())
    if min(rows, columns) < 1 or rows * columns % (8 * form.size):
        raise ModelError(f"tensor {tensors['.shape'].name!r} holds {[rows, columns]}, which fill no groups")
    codes, (words, other) = tensors[".W_q"], form.words((rows, columns))
    wide = 4 if form.bits == 3 else 1
    check(codes, STORAGE, (words, other * wide // codes.dtype.itemsize))
    count = form.count((rows, columns))
    for ending in (".scale", ".zero"):
        check(tensors[ending], FLOATS, (count, 1) if form.axis == 1 else (1, count))
    return HqqMatrix(f"{stem}.weight", (rows, columns), group, tensors)
