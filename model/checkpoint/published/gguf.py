"""GGUF checkpoints: tensors as llama.cpp stores them, in blocks of many types."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ....ops.quant.grouped import CODES, SHARED
from ....ops.quant.int4 import Int4
from ...config import ModelError
from ...gguf.fields import Fields
from ...gguf.file import read_file
from ...gguf.origin import Origin, TensorSlice
from ...gguf.tensor import BlockTensor
from ...stored_format import StoredFormat, StoredGroup
from ..gguf_folder import KEPT, describe
from ..safetensors import Tensor
from .keys import CONFIG_KEY, checked_entries, checked_patterns, unsupported_value
from .matrix import Matrix


@dataclass(frozen=True, eq=False)
class AssembledTensor:
    """A checkpoint tensor, assembled from the tensors of a GGUF file when it is read."""

    name: str
    origin: Origin
    tensors: Mapping[str, BlockTensor]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.origin.shape

    @property
    def dtype(self) -> Any:
        return np.dtype(self.tensors[self.origin.parts[0].name].dtype)

    @property
    def quantised(self) -> bool:
        return not all(
            self.tensors[origin_part.name].kind.is_plain for origin_part in self.origin.parts
        )

    def read(self) -> np.ndarray:
        arrays = [self.numbers(origin_part) for origin_part in self.origin.parts]
        turn = self.origin.transform
        value = turn(*arrays) if turn else arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return value.reshape(self.shape)

    def numbers(self, origin_part: TensorSlice) -> np.ndarray:
        tensor = self.tensors[origin_part.name]
        value = (
            tensor.read()
            if origin_part.expert is None
            else tensor.cut(origin_part.expert).read()[0]
        )
        return value if origin_part.rows is None else value[origin_part.rows]

    def mapped(self) -> np.ndarray:
        return self.read()

    def cut(self, index: int) -> "TensorElement":
        """One element of the first axis, which stays with size 1."""
        return TensorElement(self, index)

    def fields(self) -> Fields:
        """The codes [rows, columns] of all parts and the values that their groups share."""
        fields_by_part = [self.fields_of(origin_part) for origin_part in self.origin.parts]
        if len(fields_by_part) == 1:
            return fields_by_part[0]
        joined = {
            name: None
            if getattr(fields_by_part[0], name) is None
            else np.concatenate([getattr(part_fields, name) for part_fields in fields_by_part])
            for name in ("codes", *SHARED)
        }
        return replace(fields_by_part[0], **joined)

    def fields_of(self, origin_part: TensorSlice) -> Fields:
        tensor = self.tensors[origin_part.name]
        blocks = (
            tensor.blocks()
            if origin_part.expert is None
            else tensor.cut(origin_part.expert).blocks()[0]
        )
        blocks = blocks if origin_part.rows is None else blocks[origin_part.rows]
        rows = len(blocks)
        fields = tensor.kind.fields(np.ascontiguousarray(blocks).reshape(-1, tensor.kind.nbytes))
        shaped = {
            name: None if (value := getattr(fields, name)) is None else value.reshape(rows, -1)
            for name in ("codes", *SHARED)
        }
        return replace(fields, **shaped)


@dataclass(frozen=True)
class TensorElement:
    """One element of a tensor's first axis."""

    tensor: AssembledTensor
    index: int

    def read(self) -> np.ndarray:
        return self.tensor.read()[self.index : self.index + 1]


@dataclass(frozen=True)
class BlockMatrix(Matrix):
    """A matrix that keeps its GGUF codes."""

    tensor: AssembledTensor

    def read(self) -> np.ndarray:
        return self.tensor.read()

    def fields_for(self, node: Any) -> dict[str, np.ndarray]:
        stored = self.tensor.fields()
        for super_values in (stored.super_scale, stored.super_least):
            if super_values is not None:
                self.finite(super_values)
        if isinstance(node, Int4):
            return {"nibbles": stored.codes, "scale": self.finite(stored.scale)}
        if node.levels:
            return self.two_level_fields(stored, node)
        repeats = stored.group // node.group
        scale, least = stored.scales()
        fields = {
            "codes": stored.codes,
            "scale": (self.finite(scale) * np.float32(self.times)).repeat(repeats, 1),
        }
        if node.code == "int8":
            fields["codes"] = (
                (stored.codes.astype(np.int16) - stored.zero).astype(np.int8).view(np.uint8)
            )
        if node.least is not None:
            least = np.zeros_like(scale) if least is None else self.finite(least)
            fields["least"] = least.repeat(repeats, 1)
        return fields

    def two_level_fields(self, stored: Fields, node: Any) -> dict[str, np.ndarray]:
        """The fields of a node with two-level scales."""
        assert stored.super_scale is not None
        repeats = stored.group // node.group
        fields: dict[str, np.ndarray] = {
            "codes": stored.codes,
            "scale": stored.scale.repeat(repeats, 1),
            "super_scale": stored.super_scale,
        }
        if node.least is not None:
            # A zero point common to all codes becomes a minimum of that many scales.
            pair = (stored.scale, stored.super_scale.astype(np.float32) * stored.zero)
            least, super_least = (
                pair if stored.least is None else (stored.least, stored.super_least)
            )
            assert super_least is not None
            fields |= {"least": least.repeat(repeats, 1), "super_least": super_least}
        elif stored.table is None:
            middle = -int(CODES[node.code].numbers[0])
            fields["codes"] = stored.codes + np.uint8(middle - stored.zero)
        return fields

    @property
    def times(self) -> float:
        """The factor for the file's scales: GGUF counts MXFP4 values in halves."""
        return 2 if self.group.quant == "mxfp4" else 1

    @property
    def scales(self) -> str:
        return self.name


def stored_format(config: Mapping[str, Any]) -> StoredFormat:
    modules = checked_entries(CONFIG_KEY, config, {"quant_method": ("gguf",), "modules": ...}).get(
        "modules"
    )
    if not isinstance(modules, dict) or not {*modules} <= {*KEPT.values()}:
        raise unsupported_value(
            f"{CONFIG_KEY}.modules", modules, "an object of formats and the names of modules"
        )
    groups = [
        StoredGroup(kind, None, checked_patterns(f"{CONFIG_KEY}.modules.{kind}", names))
        for kind, names in modules.items()
    ]
    return StoredFormat("gguf", tuple(groups), rounds_head=False)


def find_tensors(file: Path) -> dict[str, Any]:
    """The checkpoint tensors in a GGUF file."""
    gguf = read_file(file)
    _, origin_by_name = describe(gguf)
    return {
        name: AssembledTensor(name, origin, gguf.tensors) for name, origin in origin_by_name.items()
    }


def gather(tensors: dict[str, Tensor], stored: StoredFormat) -> dict[str, Tensor | Matrix]:
    gathered: dict[str, Any] = dict(tensors)
    for name, tensor in gathered.items():
        group = stored.group_of(name.removesuffix(".weight"))
        if group is None:
            continue
        if not isinstance(tensor, AssembledTensor):
            raise ModelError(
                f"{CONFIG_KEY}.quant_method = 'gguf', and the weights are in no GGUF file"
            )
        if len(tensor.shape) == 2:
            gathered[name] = BlockMatrix(name, tensor.shape, group, {}, tensor)
    return gathered
