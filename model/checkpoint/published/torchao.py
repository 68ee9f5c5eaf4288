"""Checkpoints of torchao as transformers saves them: the parts of each quantised tensor, side by side.

Those of `name.weight` are called `name._weight_qdata` and so on, or `name.weight:qdata`, as torchao 0.14 wrote them.

    Float8Tensor               qdata float8_e4m3fn [out, in]; scale one, [out, 1] or [out / 128, in / 128]
    Int8Tensor                 qdata int8 [out, in]; scale one, [out, 1] or [out, in / group]; zero_point alike, or none
    IntxUnpackedToInt8Tensor   the same, codes of fewer bits too
    Int4Tensor                 qdata int8 or uint8 [out, in / 2], signed codes, the even input in the low half; scale
                               and zero_point [in / group, out]: weight = code * scale + zero_point
    Int4TilePackedTo4dTensor   qdata int32 [out / 8, in / 128, 32, 4], codes from zero as tensor cores take them;
                               scale_and_zero [in / group, out, 2]: weight = (code - 8) * scale + zero. Outputs are
                               filled up to 8, inputs to 1024; the file's metadata has the true shape

quant_type names a config of torchao, of which what decides how weights are kept is read. Rows become codes where the
format here does so; other roundings of rows are left out, which is closer.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ...config import ModelError
from ...stored_format import StoredFormat, StoredGroup
from ..safetensors import Tensor, read_metadata
from . import fp8
from .forms import split_pairs
from .integers import FLOATS, GROUPS, IntegerMatrix, Integers, group_of
from .keys import HERE, known, patterns, refusal
from .matrix import Matrix, check

TOP = {
    "quant_method": ("torchao",), "quant_type": ..., "quant_type_kwargs": ({},), "modules_to_not_convert": ...,
    "include_input_output_embeddings": ..., "untie_embedding_weights": ...,
}  # fmt: skip
OBJECT = {"_type": ..., "_version": ..., "_data": ...}
COMMON = {"version": ..., "set_inductor_config": ..., "layout": ...}
ROWS = {"act_mapping_type": ..., "activation_dtype": ..., "activation_value_lb": ..., "activation_value_ub": ...}
FLOAT8 = COMMON | {
    "weight_dtype": ..., "granularity": ..., "mm_config": ..., "kernel_preference": ..., "packing_format": ...,
    "alg_id": ...,
}  # fmt: skip
INT4 = COMMON | {
    "group_size": ..., "int4_packing_format": ..., "packing_format": ..., "int4_choose_qparams_algorithm": ...,
    "int4_tile_packed_ntile": ...,
}  # fmt: skip
INTX = COMMON | {
    "weight_dtype": ..., "granularity": ..., "mapping_type": ..., "scale_dtype": ..., "packing_format": ...,
    "intx_packing_format": ..., "intx_choose_qparams_algorithm": ...,
}  # fmt: skip
LISTS = ("fqn_to_config", "module_fqn_to_config")  # of configs, by module
DEFAULT = "_default"
PLAIN, TILED = "PLAIN", "TILE_PACKED_TO_4D"  # how codes of four bits lie
NAMINGS = ("._weight_", ".weight:")
ASIDE = ("act_quant_scale", "act_quant_zero_point", "output_quant_scale")  # measured for rows
BLOCK = [fp8.SIDE, fp8.SIDE]
TILE = (8, 1024)  # outputs and inputs that a packed matrix has multiples of


@dataclass(frozen=True)
class Fours:
    """Codes of four bits in groups, with numbers that are added."""

    group: int
    tiled: bool


def stored_format(config: Mapping[str, Any]) -> StoredFormat:
    said = known(HERE, config, TOP)
    where, table = f"{HERE}.quant_type", said.get("quant_type")
    if not isinstance(table, dict) or [*table] != ["default"]:
        raise refusal(where, table, "an object `default` with a config of torchao, as it is beside safetensors")
    where = f"{where}.default"
    ignore = [*patterns(f"{HERE}.modules_to_not_convert", said.get("modules_to_not_convert", []))]
    kind, data = typed(where, table["default"])
    if kind not in ("FqnToConfig", "ModuleFqnToConfig"):
        groups = [group(where, kind, data, ("Linear",))]
    else:
        groups, spared = by_module(f"{where}._data", data)
        ignore += spared
    return StoredFormat("torchao", tuple(groups), ("lm_head", "embed_tokens", *ignore), parts=True, rounds_head=False)


def by_module(where: str, data: Any) -> tuple[list[StoredGroup], list[str]]:
    """The groups of configs that modules have by name, by a pattern or otherwise; and the modules that have none."""
    said = known(where, data, dict.fromkeys(LISTS, ...) | {"version": ...})
    key = next((key for key in LISTS if key in said), LISTS[0])
    where, table = f"{where}.{key}", data.get(key)
    if not isinstance(table, dict) or not table:
        raise refusal(where, table, "an object of modules")
    groups, ignore = [], []
    for name, config in sorted(table.items(), key=lambda item: (item[0] == DEFAULT, item[0].startswith("re:"))):
        targets = ("Linear",) if name == DEFAULT else tuple(map(whole_name, patterns(where, [name])))
        if config is not None:
            groups.append(group(f"{where}.{name}", *typed(f"{where}.{name}", config), targets))
        elif name != DEFAULT:
            ignore += targets
    return groups, ignore


def whole_name(name: str) -> str:
    """A module by its name, or by that of its weight; patterns match whole names."""
    name = name.removesuffix(".weight").removesuffix("\\")
    return f"re:(?:{name[3:]})$" if name.startswith("re:") else name


def typed(where: str, table: Any) -> tuple[str, Any]:
    """The type of an object of torchao's, and what it holds."""
    said = known(where, table, OBJECT)
    if not isinstance(said.get("_type"), str):
        raise refusal(f"{where}._type", said.get("_type"), "the name of a type of torchao")
    return said["_type"], said.get("_data", {})


def choice(where: str, said: Mapping[str, Any], default: str, *right: str) -> str:
    """The value of an enumeration, or a dtype."""
    key = where.rpartition(".")[2]
    given = said.get(key, default)
    value = given.upper() if isinstance(given, str) and default.isupper() else given  # some are written by their values
    value = typed(where, given)[1] if isinstance(given, dict) else value
    if value not in right:
        raise refusal(where, value, " or ".join(map(repr, right)))
    return value


def group(where: str, kind: str, data: Any, targets: tuple[str, ...]) -> StoredGroup:
    """How the weights of one config are kept."""
    if kind not in KINDS:
        raise refusal(f"{where}._type", kind, " or ".join(map(repr, KINDS)))
    keys, read = KINDS[kind]
    kept = read(f"{where}._data", known(f"{where}._data", data, keys))
    return StoredGroup(kept.quant, kept.form, targets)


def float8(name: str) -> Callable[[str, dict[str, Any]], StoredGroup]:
    def read(where: str, said: dict[str, Any]) -> StoredGroup:
        choice(f"{where}.weight_dtype", said, "float8_e4m3fn", "float8_e4m3fn")
        choice(f"{where}.packing_format", said, "PLAIN", "PLAIN")
        if "granularity" not in said:
            return StoredGroup(name, "outputs")
        kind, data = of_weights(f"{where}.granularity", said["granularity"])
        if kind in ("PerRow", "PerTensor"):
            return StoredGroup(name, "outputs")
        if (kind, data) != ("PerBlock", {"block_size": BLOCK}):
            raise refusal(f"{where}.granularity", said["granularity"], f"PerRow, PerTensor or PerBlock of {BLOCK}")
        return StoredGroup("fp8-weights-128", "blocks")

    return read


def int8(where: str, said: dict[str, Any]) -> StoredGroup:
    size = said.get("group_size")
    if size is not None and (type(size) is not int or size < 1):
        raise refusal(f"{where}.group_size", size, "null or a whole number")
    return group_of(Integers(8, size or shared(f"{where}.granularity", said, -1), centred=True))


def int8_rows(where: str, said: dict[str, Any]) -> StoredGroup:
    found = int8(where, said)
    return StoredGroup("int8", found.form) if found.quant == "int8-weights" else found


def int4(where: str, said: dict[str, Any]) -> StoredGroup:
    forms = {choice(f"{where}.{key}", said, PLAIN, PLAIN, TILED) for key in ("int4_packing_format", "packing_format")}
    if TILED in forms and said.get("int4_tile_packed_ntile") not in (None, TILE[0]):
        raise refusal(f"{where}.int4_tile_packed_ntile", said["int4_tile_packed_ntile"], f"null or {TILE[0]}")
    size = said.get("group_size", 128)
    within = next((group for group in GROUPS if type(size) is int and size > 0 and size % group == 0), None)
    if within is None:
        raise refusal(f"{where}.group_size", size, "a multiple of 32")
    return StoredGroup(f"int4-{within}-least", Fours(size, TILED in forms))


def intx(prefix: str) -> Callable[[str, dict[str, Any]], StoredGroup]:
    """Signed codes of some bits: those of up to four fit into four."""

    def read(where: str, said: dict[str, Any]) -> StoredGroup:
        for key in ("intx_packing_format", "packing_format"):
            choice(f"{where}.{key}", said, "UNPACKED_TO_INT8", "UNPACKED_TO_INT8")
        dtype = choice(f"{where}.weight_dtype", said, "int8", *(f"int{bits}" for bits in range(1, 9)))
        mapping = choice(
            f"{where}.{prefix}mapping_type", said, "SYMMETRIC", "SYMMETRIC", "SYMMETRIC_NO_CLIPPING_ERR", "ASYMMETRIC"
        )
        size = shared(f"{where}.{prefix}granularity", said, 32 if prefix else -1)
        bits = 4 if int(dtype.removeprefix("int")) <= 4 else 8
        return group_of(Integers(bits, size, centred=mapping != "ASYMMETRIC"))

    return read


def of_weights(where: str, granularity: Any) -> tuple[str, Any]:
    """The granularity of weights, where that of rows may stand before it."""
    return typed(where, granularity[-1] if isinstance(granularity, list) and granularity else granularity)


def shared(where: str, said: Mapping[str, Any], default: int) -> int:
    """How many inputs share a scale; -1: all."""
    key = where.rpartition(".")[2]
    if key not in said:
        return default
    kind, data = of_weights(where, said[key])
    size = data.get("group_size") if isinstance(data, dict) else None
    if kind == "PerGroup" and type(size) is int and size > 0:
        return size
    if kind not in ("PerRow", "PerTensor") and (kind, data) != ("PerAxis", {"axis": 0}):
        raise refusal(where, said[key], "PerRow, PerTensor, PerAxis with axis 0, or PerGroup with a group_size")
    return -1


KINDS: dict[str, tuple[dict[str, Any], Callable[[str, dict[str, Any]], StoredGroup]]] = {
    "Float8WeightOnlyConfig": (FLOAT8, float8("fp8-weights")),
    "Float8DynamicActivationFloat8WeightConfig": (FLOAT8 | ROWS, float8("fp8")),
    "Int8WeightOnlyConfig": (COMMON | {"group_size": ..., "granularity": ...}, int8),
    "Int8DynamicActivationInt8WeightConfig": (
        COMMON | ROWS | {"granularity": ..., "weight_only_decode": (False,), "reduce_range": ...}, int8_rows,
    ),
    "Int4WeightOnlyConfig": (INT4, int4),
    "Float8DynamicActivationInt4WeightConfig": (INT4, int4),
    "IntxWeightOnlyConfig": (INTX, intx("")),
    "Int8DynamicActivationIntxWeightConfig": (
        INTX | ROWS | {"weight_granularity": ..., "weight_mapping_type": ..., "weight_scale_dtype": ...},
        intx("weight_"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Bytes(IntegerMatrix):
    @property
    def middled(self) -> str:
        return "that codes are symmetric"

    def unpacked(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, None]:
        parts = {name: tensor.read() for name, tensor in self.tensors.items()}
        groups = 1 if self.form.group == -1 else self.shape[1] // self.form.group
        scale, zeros = (
            np.broadcast_to(values.reshape(-1, groups), (self.shape[0], groups))
            for values in (parts["scale"], parts.get("zero_point", np.zeros((1, groups), np.int8)))
        )
        return self.above("qdata", parts["qdata"]).T, scale.T, self.above("zero_point", zeros).T, None

    def above(self, part: str, values: np.ndarray) -> np.ndarray:
        """Signed numbers as those from zero."""
        middle = 1 << self.form.bits - 1
        if middle < 128 and (values.min() < -middle or values.max() >= middle):
            raise ModelError(
                f"tensor {self.tensors[part].name!r} holds {int(values[(values < -middle) | (values >= middle)][0])}, "
                f"which are more than {self.form.bits} bits"
            )
        return (values.astype(np.int16) + middle).astype(np.uint8)


@dataclass(frozen=True)
class Halves(Matrix):
    def fields(self, parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        codes, scale, added = self.unpacked(parts)
        scale, added = (self.finite(value.astype(np.float32)).T for value in (scale, added))
        again = self.group.form.group // self.format.shared()
        shared = {"scale": scale, "least": 8 * scale - added}
        return {"codes": codes} | {name: value.repeat(again, 1) for name, value in shared.items()}

    def unpacked(self, parts: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes from zero [out, in]; what multiplies codes from the middle and what is added [in / group, out]."""
        codes, scale, added = parts.values()
        return split_pairs(codes.view(np.uint8)) ^ 8, scale, added


@dataclass(frozen=True)
class Tiles(Halves):
    def unpacked(self, parts: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        words, shared = parts.values()
        rows, columns = self.shape
        # Axes: outputs by 8, inputs by 128; output, pair of inputs, inputs by 32; which of a pair, inputs by 8.
        codes = words.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
        tiles, spans = words.shape[:2]
        codes = codes.astype(np.uint8).reshape(tiles, spans, 8, 4, 4, 2, 4)
        codes = codes.transpose(0, 2, 1, 4, 6, 3, 5).reshape(8 * tiles, 128 * spans)
        shared = shared[: columns // self.group.form.group, :rows]
        return codes[:rows, :columns], shared[..., 0], shared[..., 1]


def gather(tensors: dict[str, Tensor], stored: StoredFormat) -> dict[str, Tensor | Matrix]:
    about = cache(read_metadata)
    found: dict[str, Any] = {}
    parts: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        naming = next((naming for naming in NAMINGS if naming in name), None)
        if naming is None:
            found[name] = tensor
        else:
            stem, _, part = name.partition(naming)
            parts.setdefault((stem, naming), {})[part] = tensor
    for (stem, naming), each in parts.items():
        found[f"{stem}.weight"] = matrix(stem, stem + naming, each, stored, about)
    return found


def matrix(
    stem: str, before: str, parts: dict[str, Tensor], stored: StoredFormat, about: Callable[[Path], dict[str, Any]]
) -> Matrix:
    """One matrix, the shapes and dtypes of its tensors checked; `about` gives a file's metadata."""
    group = next((each for each in stored.groups if "Linear" in each.targets or stem in each.aimed), None)
    if group is None:
        raise ModelError(f"tensor {before + [*parts][0]!r} is quantised, and {HERE} says nothing of {stem!r}")
    parts = {name: tensor for name, tensor in parts.items() if name not in ASIDE}
    tiled = isinstance(group.form, Fours) and group.form.tiled
    zeros = isinstance(group.form, Fours) or (isinstance(group.form, Integers) and "zero_point" in parts)
    needed = ["qdata", "scale_and_zero"] if tiled else ["qdata", "scale"] + ["zero_point"] * zeros
    if missing := [name for name in needed if name not in parts]:
        others = ", ".join(sorted(parts))
        raise ModelError(f"the checkpoint lacks the tensor {before + missing[0]!r}; of {stem!r} it has {others}")
    if extra := sorted(parts.keys() - {*needed}):
        raise ModelError(f"tensor {before + extra[0]!r} is of a form of torchao that is not supported")
    if tiled:
        return tiles(stem, {name: parts[name] for name in needed}, group, about)
    codes, scale = parts["qdata"], parts["scale"]
    if len(codes.shape) != 2 or not all(codes.shape):
        raise ModelError(f"tensor {codes.name!r} is {list(codes.shape)} of {codes.dtype.name}; it must be a matrix")
    if isinstance(group.form, str):
        return fp8.matrix(stem, {".weight": codes, ".weight_scale": scale}, group)
    tensors = {name: parts[name] for name in needed}
    if isinstance(group.form, Fours):
        return halves(stem, tensors, group)
    assert isinstance(group.form, Integers)
    rows, columns = codes.shape
    check(codes, ("int8",), codes.shape)
    size = columns if group.form.group == -1 else group.form.group
    if columns % size:
        raise uneven(codes, columns, size)
    shapes = [(rows, columns // size)] + [(), (1,), (1, 1), (rows,)] * (size == columns)
    check(scale, FLOATS, *shapes)
    if "zero_point" in tensors:
        check(tensors["zero_point"], ("int8",), *shapes)
    return Bytes(f"{stem}.weight", (rows, columns), group, tensors)


def halves(stem: str, tensors: dict[str, Tensor], group: StoredGroup) -> Matrix:
    codes, scale, added = tensors.values()
    rows, columns, size = codes.shape[0], 2 * codes.shape[1], group.form.group
    check(codes, ("int8", "uint8"), codes.shape)
    if columns % size:
        raise uneven(codes, columns, size)
    for tensor in (scale, added):
        check(tensor, FLOATS, (columns // size, rows))
    return Halves(f"{stem}.weight", (rows, columns), group, tensors)


def tiles(stem: str, tensors: dict[str, Tensor], group: StoredGroup, about: Callable[[Path], dict[str, Any]]) -> Matrix:
    codes, shared = tensors.values()
    if len(codes.shape) != 4 or not all(codes.shape):
        raise ModelError(f"tensor {codes.name!r} is {list(codes.shape)}; it must be [out / 8, in / 128, 32, 4]")
    rows, columns = true_shape(f"{stem}.weight", about(codes.file)) or (8 * codes.shape[0], 128 * codes.shape[1])
    whole, size = [-(-n // tile) * tile for n, tile in zip((rows, columns), TILE, strict=True)], group.form.group
    if columns % size:
        raise uneven(codes, columns, size)
    check(codes, ("int32",), (whole[0] // 8, whole[1] // 128, 32, 4))
    check(shared, FLOATS, (whole[1] // size, whole[0], 2))
    return Tiles(f"{stem}.weight", (rows, columns), group, tensors)


def true_shape(name: str, metadata: Mapping[str, Any]) -> tuple[int, int] | None:
    """Of a matrix that is filled up; None where the file does not say it."""
    try:
        rows, columns = json.loads(metadata[name])["_data"]["shape"]
    except (KeyError, TypeError, ValueError):
        return None
    return (rows, columns) if type(rows) is type(columns) is int and rows > 0 and columns > 0 else None


def uneven(codes: Tensor, columns: int, size: int) -> ModelError:
    return ModelError(f"tensor {codes.name!r} has {columns} inputs, which do not divide by the group of {size}")
