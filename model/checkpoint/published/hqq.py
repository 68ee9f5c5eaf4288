"""HQQ checkpoints as transformers saves them: groups of consecutive weights that share a scale.

weight = (code - zero) * scale, where `zero` need not be an integer. A group is neighbouring inputs
(axis 1), or weights that are `out * in / group_size` apart (axis 0). Codes packed in one word are a
fraction of the groups' axis apart.

    W_q          uint8 [groups * nbits / 8, group_size], for axis 0 [group_size * nbits / 8,
    groups];
                 the first codes in the high bits. 3 bits: int32, ten codes a word. The declared
                 dtype may be wider.
    scale, zero  [groups, 1], or [1, groups]
    nbits, group_size, axis, shape, and metadata that does not affect the weight
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
from .keys import CONFIG_KEY, checked_entries, checked_patterns, unsupported_value
from .matrix import Matrix, check, pop_tensors

TOP = {"quant_method": ("hqq",), "quant_config": ..., "skip_modules": ...}
PARAMS = {
    "weight_quant_params": ...,
    "scale_quant_params": (),
    "zero_quant_params": (),
    "offload_meta": (False,),
}
WEIGHT = {
    "nbits": (8, 4, 3, 2, 1),
    "group_size": ...,
    "axis": (0, 1),
    "channel_wise": (True,),
    "view_as_float": ...,
    "optimize": ...,
    "round_zero": ...,
}
ENDINGS = (".W_q", ".scale", ".zero", ".nbits", ".group_size", ".axis", ".shape")
UNUSED = (
    ".packing",
    ".unpack_view_dtype",
    ".view_as_float",
    ".compute_dtype",
    ".offload_meta",
    ".encoded_state_dict",
    ".stores_quant_config",
    ".channel_wise",
    ".optimize",
    ".round_zero",
)
STORAGE = ("uint8", "int32", "float16", "bfloat16", "float32")


@dataclass(frozen=True)
class HqqLayout:
    """The layout of the codes."""

    bits: int
    size: int
    axis: int

    def count(self, shape: tuple[int, int]) -> int:
        return math.prod(shape) // self.size

    def words(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The shape of the packed codes, in bytes or (3 bits) in int32."""
        packed_size, unpacked_size = (
            (self.count(shape), self.size) if self.axis == 1 else (self.size, self.count(shape))
        )
        return (
            -(-packed_size // 10) if self.bits == 3 else packed_size * self.bits // 8
        ), unpacked_size

    def unpacked(self, data: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        """Unpack codes [groups, size], or [size, groups]."""
        top = 30 if self.bits == 3 else 8
        slices = [
            data >> (top - self.bits * (i + 1)) & ((1 << self.bits) - 1)
            for i in range(top // self.bits)
        ]
        packed_size = self.count(shape) if self.axis == 1 else self.size
        return np.concatenate(slices)[:packed_size].astype(np.uint8)


@dataclass(frozen=True)
class HqqMatrix(Matrix):
    def unpacked(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes, scales and zero points in the stored layout."""
        form = self.group.form
        assert isinstance(form, HqqLayout)
        data, scale, zero = (self.tensors[ending].read() for ending in ENDINGS[:3])
        data = np.ascontiguousarray(data).view(np.int32 if form.bits == 3 else np.uint8)
        scale = self.finite(scale.astype(np.float32))
        zero = zero.astype(np.float32)
        if not np.isfinite(zero).all():
            raise ModelError(
                f"tensor {self.tensors['.zero'].name!r} holds a zero point that is not finite"
            )
        return form.unpacked(data, self.shape), scale, zero

    def read(self) -> np.ndarray:
        codes, scale, zero = self.unpacked()
        return ((codes - zero) * scale).reshape(self.shape)

    def fields_for(self, node: Rounded) -> dict[str, np.ndarray]:
        form = self.group.form
        assert isinstance(node, Grouped) and isinstance(form, HqqLayout)
        codes, scale, zero = self.unpacked()
        rows = self.shape[0]
        repeats = form.size // node.group
        if node.code == "int8":
            codes = codes ^ 128
            zero = zero - 128
        return {
            "codes": codes.reshape(self.shape),
            "scale": scale.reshape(rows, -1).repeat(repeats, 1),
            "least": (zero * scale).reshape(rows, -1).repeat(repeats, 1),
        }


def stored_format(config: Mapping[str, Any]) -> StoredFormat:
    settings = checked_entries(CONFIG_KEY, config, TOP)
    params = checked_entries(f"{CONFIG_KEY}.quant_config", settings.get("quant_config"), PARAMS)
    key_path = f"{CONFIG_KEY}.quant_config.weight_quant_params"
    weight = checked_entries(key_path, params.get("weight_quant_params"), WEIGHT)
    size = weight.get("group_size")
    bits = weight.get("nbits")
    axis = weight.get("axis", 0)
    if type(size) is not int or size < 8 or size % 8:
        raise unsupported_value(f"{key_path}.group_size", size, "a multiple of 8")
    if bits is None:
        raise unsupported_value(f"{key_path}.nbits", bits, "8, 4, 3, 2 or 1")
    skipped = checked_patterns(f"{CONFIG_KEY}.skip_modules", settings.get("skip_modules", []))
    group = StoredGroup(format_name(bits, size, axis), HqqLayout(bits, size, axis), multiple=size)
    return StoredFormat(
        "hqq",
        (group,),
        ("lm_head", "embed_tokens", *skipped),
        match_substrings=True,
        rounds_head=False,
    )


def format_name(bits: int, size: int, axis: int) -> str | None:
    """The format for groups of neighbouring inputs; None if no format holds them."""
    group_size = next((group for group in GROUPS if size % group == 0), None)
    if axis != 1 or group_size is None:
        return None
    return f"int8-weights-{group_size}-least" if bits == 8 else f"int4-{group_size}-least"


def gather(tensors: dict[str, Tensor], stored: StoredFormat) -> dict[str, Tensor | Matrix]:
    gathered: dict[str, Any] = dict(tensors)
    (group,) = stored.groups
    for stem in [name.removesuffix(".W_q") for name in tensors if name.endswith(".W_q")]:
        for ending in UNUSED:
            gathered.pop(stem + ending, None)
        gathered[f"{stem}.weight"] = matrix(
            stem, pop_tensors(gathered, stem, ".W_q", ENDINGS), group
        )
    return gathered


def matrix(stem: str, tensors: dict[str, Tensor], group: StoredGroup) -> Matrix:
    """One matrix, with the shapes and dtypes of its tensors checked."""
    form = group.form
    assert isinstance(form, HqqLayout)
    for ending, expected in (
        (".nbits", form.bits),
        (".group_size", form.size),
        (".axis", form.axis),
    ):
        check(tensors[ending], ("int32", "int64"), (), (1,))
        if (value := int(tensors[ending].read().reshape(()))) != expected:
            raise ModelError(
                f"tensor {tensors[ending].name!r} holds {value}, and {CONFIG_KEY}.quant_config "
                f"says {expected}"
            )
    check(tensors[".shape"], ("int32", "int64"), (2,))
    rows, columns = (int(size) for size in tensors[".shape"].read())
    if min(rows, columns) < 1 or rows * columns % (8 * form.size):
        raise ModelError(
            f"tensor {tensors['.shape'].name!r} holds {[rows, columns]}, which fill no groups"
        )
    codes = tensors[".W_q"]
    words, unpacked_size = form.words((rows, columns))
    word_bytes = 4 if form.bits == 3 else 1
    check(codes, STORAGE, (words, unpacked_size * word_bytes // codes.dtype.itemsize))
    count = form.count((rows, columns))
    for ending in (".scale", ".zero"):
        check(tensors[ending], FLOATS, (count, 1) if form.axis == 1 else (1, count))
    return HqqMatrix(f"{stem}.weight", (rows, columns), group, tensors)
