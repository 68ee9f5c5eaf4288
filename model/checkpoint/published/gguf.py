"""GGUF files: the tensors of a checkpoint as llama.cpp keeps them, in blocks of many types."""

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
from ...gguf.origin import Origin, Part
from ...gguf.tensor import BlockTensor
from ...stored_format import StoredFormat, StoredGroup
from ..gguf_folder import KEPT, described
from ..safetensors import Tensor
from .keys import HERE, known, patterns, refusal
from .matrix import Matrix


@dataclass(frozen=True, eq=False)
class Made:
    """A tensor of the checkpoint, made of those of the file when it is read."""

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
        return not all(self.tensors[part.name].kind.plain for part in self.origin.parts)

    def read(self) -> np.ndarray:
        parts = [self.numbers(part) for part in self.origin.parts]
        turn = self.origin.turn
        made = turn(*parts) if turn else parts[0] if len(parts) == 1 else np.concatenate(parts)
        return made.reshape(self.shape)

    def numbers(self, part: Part) -> np.ndarray:
        tensor = self.tensors[part.name]
        whole = tensor.read() if part.expert is None else tensor.cut(part.expert).read()[0]
        return whole if part.rows is None else whole[part.rows]

    def mapped(self) -> np.ndarray:
        return self.read()

    def cut(self, index: int) -> "Cut":
        """One element of the first axis; the axis stays, with size 1."""
        return Cut(self, index)

    def fields(self) -> Fields:
        """The codes [rows, columns] of all parts, and what their groups share."""
        found = [self.fields_of(part) for part in self.origin.parts]
        if len(found) == 1:
            return found[0]
        joined = {
            name: None if getattr(found[0], name) is None else np.concatenate([getattr(one, name) for one in found])
            for name in ("codes", *SHARED)
        }
        return replace(found[0], **joined)

    def fields_of(self, part: Part) -> Fields:
        tensor = self.tensors[part.name]
        blocks = tensor.blocks() if part.expert is None else tensor.cut(part.expert).blocks()[0]
        blocks = blocks if part.rows is None else blocks[part.rows]
        rows, each = len(blocks), tensor.kind.fields(np.ascontiguousarray(blocks).reshape(-1, tensor.kind.nbytes))
        shaped = {
            name: None if (value := getattr(each, name)) is None else value.reshape(rows, -1)
            for name in ("codes", *SHARED)
        }
        return replace(each, **shaped)


@dataclass(frozen=True)
class Cut:
    """One element of a tensor's first axis."""

    whole: Made
    index: int

    def read(self) -> np.ndarray:
        return self.whole.read()[self.index : self.index + 1]


@dataclass(frozen=True)
class BlockMatrix(Matrix):
    """A matrix whose codes are kept."""

    made: Made

    def read(self) -> np.ndarray:
        return self.made.read()

    def fields_for(self, node: Any) -> dict[str, np.ndarray]:
        found = self.made.fields()
        for above in (found.super_scale, found.super_least):
            if above is not None:
                self.finite(above)
        if isinstance(node, Int4):
            return {"nibbles": found.codes, "scale": self.finite(found.scale)}
        if node.levels:
            return self.leveled(found, node)
        again, (scale, least) = found.group // node.group, found.scales()
        fields = {"codes": found.codes, "scale": (self.finite(scale) * np.float32(self.times)).repeat(again, 1)}
        if node.code == "int8":
            fields["codes"] = (found.codes.astype(np.int16) - found.zero).astype(np.int8).view(np.uint8)
        if node.least is not None:
            least = np.zeros_like(scale) if least is None else self.finite(least)
            fields["least"] = least.repeat(again, 1)
        return fields

    def leveled(self, found: Fields, node: Any) -> dict[str, np.ndarray]:
        """The fields of a node whose scales have two levels."""
        assert found.super_scale is not None
        again = found.group // node.group
        fields = {"codes": found.codes, "scale": found.scale.repeat(again, 1), "super_scale": found.super_scale}
        if node.least is not None:
            # A zero of all codes becomes what is subtracted: so many scales.
            pair = (found.scale, found.super_scale.astype(np.float32) * found.zero)
            least, above = pair if found.least is None else (found.least, found.super_least)
            fields |= {"least": least.repeat(again, 1), "super_least": above}
        elif found.table is None:
            middle = -int(CODES[node.code].numbers[0])
            fields["codes"] = found.codes + np.uint8(middle - found.zero)
        return fields

    @property
    def times(self) -> float:
        """What the file's scales are to be multiplied with: its floats of four bits are counted in halves."""
        return 2 if self.group.quant == "mxfp4" else 1

    @property
    def scales(self) -> str:
        return self.name


def stored_format(config: Mapping[str, Any]) -> StoredFormat:
    modules = known(HERE, config, {"quant_method": ("gguf",), "modules": ...}).get("modules")
    if not isinstance(modules, dict) or not {*modules} <= {*KEPT.values()}:
        raise refusal(f"{HERE}.modules", modules, "an object of formats and the names of modules")
    groups = [StoredGroup(kind, None, patterns(f"{HERE}.modules.{kind}", names)) for kind, names in modules.items()]
    return StoredFormat("gguf", tuple(groups), rounds_head=False)


def find(file: Path) -> dict[str, Any]:
    """The tensors of the checkpoint that a file holds."""
    gguf = read_file(file)
    _, where = described(gguf)
    return {name: Made(name, origin, gguf.tensors) for name, origin in where.items()}


def gather(tensors: dict[str, Tensor], stored: StoredFormat) -> dict[str, Tensor | Matrix]:
    found: dict[str, Any] = dict(tensors)
    for name, made in found.items():
        group = stored.group_of(name.removesuffix(".weight"))
        if group is None:
            continue
        if not isinstance(made, Made):
            raise ModelError(f"{HERE}.quant_method = 'gguf', and the weights are in no GGUF file")
        found[name] = BlockMatrix(name, made.shape, group, {}, made)
    return found
