"""torchao checkpoints as transformers saves them: the components of each quantised tensor.

Components of `name.weight` are called `name._weight_qdata`, or `name.weight:qdata` by torchao 0.14.

    Float8Tensor               qdata float8_e4m3fn [out, in]; scale scalar, [out, 1] or
                               [out / 128, in / 128]
    Int8Tensor                 qdata int8 [out, in]; scale scalar, [out, 1] or [out, in / group];
                               zero_point alike, or none
    IntxUnpackedToInt8Tensor   the same, also with codes of fewer bits Int4Tensor
    qdata int8 or uint8 [out, in / 2], signed codes, the even input in the
                               low half; scale and zero_point [in / group, out]:
                               weight = code * scale + zero_point
    Int4TilePackedTo4dTensor   qdata int32 [out / 8, in / 128, 32, 4], unsigned codes in tensor-core
                               tiles; scale_and_zero [in / group, out, 2]: weight = (code - 8) *
                               scale + zero. Outputs are padded to 8, inputs to 1024; the file's
                               metadata has the true shape

quant_type names a torchao config, of which the weights' settings are read. Activations are
quantised if the format here does so; other activation quantisation is not applied, which is more
accurate.
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
from .integers import FLOATS, GROUPS, IntegerLayout, IntegerMatrix, make_group
from .keys import CONFIG_KEY, checked_entries, checked_patterns, unsupported_value
from .matrix import Matrix, check

TOP = {
    "quant_method": ("torchao",),
    "quant_type": ...,
    "quant_type_kwargs": ({},),
    "modules_to_not_convert": ...,
    "include_input_output_embeddings": ...,
    "untie_embedding_weights": ...,
}
OBJECT = {"_type": ..., "_version": ..., "_data": ...}
COMMON = {"version": ..., "set_inductor_config": ..., "layout": ...}
ACTIVATIONS = {
    "act_mapping_type": ...,
    "activation_dtype": ...,
    "activation_value_lb": ...,
    "activation_value_ub": ...,
}
FLOAT8 = COMMON | {
    "weight_dtype": ...,
    "granularity": ...,
    "mm_config": ...,
    "kernel_preference": ...,
    "packing_format": ...,
    "alg_id": ...,
}
INT4 = COMMON | {
    "group_size": ...,
    "int4_packing_format": ...,
    "packing_format": ...,
    "int4_choose_qparams_algorithm": ...,
    "int4_tile_packed_ntile": ...,
}
INTX = COMMON | {
    "weight_dtype": ...,
    "granularity": ...,
    "mapping_type": ...,
    "scale_dtype": ...,
    "packing_format": ...,
    "intx_packing_format": ...,
    "intx_choose_qparams_algorithm": ...,
}
MODULE_TABLES = ("fqn_to_config", "module_fqn_to_config")  # keys with a config for each module
DEFAULT = "_default"
PLAIN = "PLAIN"  # packings of 4-bit codes
TILED = "TILE_PACKED_TO_4D"
NAMINGS = ("._weight_", ".weight:")
STATIC_COMPONENTS = ("act_quant_scale", "act_quant_zero_point", "output_quant_scale")
BLOCK = [fp8.SIDE, fp8.SIDE]
TILE = (8, 1024)  # outputs and inputs are padded to multiples of these


@dataclass(frozen=True)
class Int4Layout:
    """4-bit codes in groups with an additive zero point."""

    group: int
    tiled: bool


def stored_format(config: Mapping[str, Any]) -> StoredFormat:
    settings = checked_entries(CONFIG_KEY, config, TOP)
    key_path = f"{CONFIG_KEY}.quant_type"
    table = settings.get("quant_type")
    if not isinstance(table, dict) or [*table] != ["default"]:
        raise unsupported_value(
            key_path,
            table,
            "an object `default` with a config of torchao, as it is beside safetensors",
        )
    key_path = f"{key_path}.default"
    ignore = [
        *checked_patterns(
            f"{CONFIG_KEY}.modules_to_not_convert", settings.get("modules_to_not_convert", [])
        )
    ]
    kind, data = parse_object(key_path, table["default"])
    if kind not in ("FqnToConfig", "ModuleFqnToConfig"):
        groups = [read_group(key_path, kind, data, ("Linear",))]
    else:
        groups, ignored_modules = read_module_configs(f"{key_path}._data", data)
        ignore += ignored_modules
    return StoredFormat(
        "torchao",
        tuple(groups),
        ("lm_head", "embed_tokens", *ignore),
        match_substrings=True,
        rounds_head=False,
    )


def read_module_configs(key_path: str, data: Any) -> tuple[list[StoredGroup], list[str]]:
    """The groups with a config, by module name or pattern, and the modules without one."""
    settings = checked_entries(key_path, data, dict.fromkeys(MODULE_TABLES, ...) | {"version": ...})
    key = next((key for key in MODULE_TABLES if key in settings), MODULE_TABLES[0])
    key_path = f"{key_path}.{key}"
    table = data.get(key)
    if not isinstance(table, dict) or not table:
        raise unsupported_value(key_path, table, "an object of modules")
    groups = []
    ignore = []
    for name, config in sorted(
        table.items(), key=lambda item: (item[0] == DEFAULT, item[0].startswith("re:"))
    ):
        targets = (
            ("Linear",)
            if name == DEFAULT
            else tuple(map(module_target, checked_patterns(key_path, [name])))
        )
        if config is not None:
            groups.append(
                read_group(
                    f"{key_path}.{name}", *parse_object(f"{key_path}.{name}", config), targets
                )
            )
        elif name != DEFAULT:
            ignore += targets
    return groups, ignore


def module_target(name: str) -> str:
    """A module by its own name or its weight's name; patterns must match whole names."""
    name = name.removesuffix(".weight").removesuffix("\\")
    return f"re:(?:{name[3:]})$" if name.startswith("re:") else name


def parse_object(key_path: str, table: Any) -> tuple[str, Any]:
    """The type and the contents of a serialised torchao object."""
    settings = checked_entries(key_path, table, OBJECT)
    if not isinstance(settings.get("_type"), str):
        raise unsupported_value(
            f"{key_path}._type", settings.get("_type"), "the name of a type of torchao"
        )
    return settings["_type"], settings.get("_data", {})


def checked_choice(key_path: str, settings: Mapping[str, Any], default: str, *right: str) -> str:
    """The value of an enumeration or a dtype, which must be one of `right`."""
    key = key_path.rpartition(".")[2]
    raw = settings.get(key, default)
    # Some enumerations are written by their values.
    value = raw.upper() if isinstance(raw, str) and default.isupper() else raw
    value = parse_object(key_path, raw)[1] if isinstance(raw, dict) else value
    if value not in right:
        raise unsupported_value(key_path, value, " or ".join(map(repr, right)))
    return value


def read_group(key_path: str, kind: str, data: Any, targets: tuple[str, ...]) -> StoredGroup:
    """The stored group for the weights of one config."""
    if kind not in KINDS:
        raise unsupported_value(f"{key_path}._type", kind, " or ".join(map(repr, KINDS)))
    keys, read = KINDS[kind]
    base_group = read(f"{key_path}._data", checked_entries(f"{key_path}._data", data, keys))
    return StoredGroup(base_group.quant, base_group.form, targets)


def read_float8(name: str) -> Callable[[str, dict[str, Any]], StoredGroup]:
    def read(key_path: str, settings: dict[str, Any]) -> StoredGroup:
        checked_choice(f"{key_path}.weight_dtype", settings, "float8_e4m3fn", "float8_e4m3fn")
        checked_choice(f"{key_path}.packing_format", settings, "PLAIN", "PLAIN")
        if "granularity" not in settings:
            return StoredGroup(name, "outputs")
        kind, data = weight_granularity(f"{key_path}.granularity", settings["granularity"])
        if kind in ("PerRow", "PerTensor"):
            return StoredGroup(name, "outputs")
        if (kind, data) != ("PerBlock", {"block_size": BLOCK}):
            raise unsupported_value(
                f"{key_path}.granularity",
                settings["granularity"],
                f"PerRow, PerTensor or PerBlock of {BLOCK}",
            )
        return StoredGroup("fp8-weights-128", "blocks")

    return read


def read_int8(key_path: str, settings: dict[str, Any]) -> StoredGroup:
    size = settings.get("group_size")
    if size is not None and (type(size) is not int or size < 1):
        raise unsupported_value(f"{key_path}.group_size", size, "null or a whole number")
    return make_group(
        IntegerLayout(
            8, size or read_group_size(f"{key_path}.granularity", settings, -1), centred=True
        )
    )


def read_int8_activations(key_path: str, settings: dict[str, Any]) -> StoredGroup:
    base_group = read_int8(key_path, settings)
    return (
        StoredGroup("int8", base_group.form) if base_group.quant == "int8-weights" else base_group
    )


def read_int4(key_path: str, settings: dict[str, Any]) -> StoredGroup:
    forms = {
        checked_choice(f"{key_path}.{key}", settings, PLAIN, PLAIN, TILED)
        for key in ("int4_packing_format", "packing_format")
    }
    if TILED in forms and settings.get("int4_tile_packed_ntile") not in (None, TILE[0]):
        raise unsupported_value(
            f"{key_path}.int4_tile_packed_ntile",
            settings["int4_tile_packed_ntile"],
            f"null or {TILE[0]}",
        )
    size = settings.get("group_size", 128)
    group_size = next(
        (group for group in GROUPS if type(size) is int and size > 0 and size % group == 0), None
    )
    if group_size is None:
        raise unsupported_value(f"{key_path}.group_size", size, "a multiple of 32")
    return StoredGroup(f"int4-{group_size}-least", Int4Layout(size, TILED in forms))


def read_intx(prefix: str) -> Callable[[str, dict[str, Any]], StoredGroup]:
    """Signed codes of 1 to 8 bits; up to four bits are loaded as int4."""

    def read(key_path: str, settings: dict[str, Any]) -> StoredGroup:
        for key in ("intx_packing_format", "packing_format"):
            checked_choice(f"{key_path}.{key}", settings, "UNPACKED_TO_INT8", "UNPACKED_TO_INT8")
        dtype = checked_choice(
            f"{key_path}.weight_dtype", settings, "int8", *(f"int{bits}" for bits in range(1, 9))
        )
        mapping = checked_choice(
            f"{key_path}.{prefix}mapping_type",
            settings,
            "SYMMETRIC",
            "SYMMETRIC",
            "SYMMETRIC_NO_CLIPPING_ERR",
            "ASYMMETRIC",
        )
        size = read_group_size(f"{key_path}.{prefix}granularity", settings, 32 if prefix else -1)
        bits = 4 if int(dtype.removeprefix("int")) <= 4 else 8
        return make_group(IntegerLayout(bits, size, centred=mapping != "ASYMMETRIC"))

    return read


def weight_granularity(key_path: str, granularity: Any) -> tuple[str, Any]:
    """The granularity of weights, which may follow that of activations in a list."""
    return parse_object(
        key_path, granularity[-1] if isinstance(granularity, list) and granularity else granularity
    )


def read_group_size(key_path: str, settings: Mapping[str, Any], default: int) -> int:
    """The number of inputs that share a scale; -1: all."""
    key = key_path.rpartition(".")[2]
    if key not in settings:
        return default
    kind, data = weight_granularity(key_path, settings[key])
    size = data.get("group_size") if isinstance(data, dict) else None
    if kind == "PerGroup" and type(size) is int and size > 0:
        return size
    if kind not in ("PerRow", "PerTensor") and (kind, data) != ("PerAxis", {"axis": 0}):
        raise unsupported_value(
            key_path,
            settings[key],
            "PerRow, PerTensor, PerAxis with axis 0, or PerGroup with a group_size",
        )
    return -1


KINDS: dict[str, tuple[dict[str, Any], Callable[[str, dict[str, Any]], StoredGroup]]] = {
    "Float8WeightOnlyConfig": (FLOAT8, read_float8("fp8-weights")),
    "Float8DynamicActivationFloat8WeightConfig": (FLOAT8 | ACTIVATIONS, read_float8("fp8")),
    "Int8WeightOnlyConfig": (COMMON | {"group_size": ..., "granularity": ...}, read_int8),
    "Int8DynamicActivationInt8WeightConfig": (
        COMMON
        | ACTIVATIONS
        | {"granularity": ..., "weight_only_decode": (False,), "reduce_range": ...},
        read_int8_activations,
    ),
    "Int4WeightOnlyConfig": (INT4, read_int4),
    "Float8DynamicActivationInt4WeightConfig": (INT4, read_int4),
    "IntxWeightOnlyConfig": (INTX, read_intx("")),
    "Int8DynamicActivationIntxWeightConfig": (
        INTX
        | ACTIVATIONS
        | {"weight_granularity": ..., "weight_mapping_type": ..., "weight_scale_dtype": ...},
        read_intx("weight_"),
    ),
}


@dataclass(frozen=True)
class SignedMatrix(IntegerMatrix):
    @property
    def symmetry_setting(self) -> str:
        return "that codes are symmetric"

    def unpacked(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, None]:
        arrays = {name: tensor.read() for name, tensor in self.tensors.items()}
        groups = 1 if self.form.group == -1 else self.shape[1] // self.form.group
        scale, zeros = (
            np.broadcast_to(values.reshape(-1, groups), (self.shape[0], groups))
            for values in (
                arrays["scale"],
                arrays.get("zero_point", np.zeros((1, groups), np.int8)),
            )
        )
        return (
            self.unsigned("qdata", arrays["qdata"]).T,
            scale.T,
            self.unsigned("zero_point", zeros).T,
            None,
        )

    def unsigned(self, component: str, values: np.ndarray) -> np.ndarray:
        """Convert signed codes to unsigned ones."""
        middle = 1 << self.form.bits - 1
        if middle < 128 and (values.min() < -middle or values.max() >= middle):
            outside = int(values[(values < -middle) | (values >= middle)][0])
            raise ModelError(
                f"tensor {self.tensors[component].name!r} holds {outside}, which is more than "
                f"{self.form.bits} bits"
            )
        return (values.astype(np.int16) + middle).astype(np.uint8)


@dataclass(frozen=True)
class Int4Matrix(Matrix):
    def fields(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        form = self.group.form
        assert isinstance(form, Int4Layout) and self.format is not None
        codes, scale, added = self.unpacked(arrays)
        scale, added = (self.finite(value.astype(np.float32)).T for value in (scale, added))
        repeats = form.group // self.format.inputs_per_value()
        shared = {"scale": scale, "least": 8 * scale - added}
        return {"codes": codes} | {name: value.repeat(repeats, 1) for name, value in shared.items()}

    def unpacked(self, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Unsigned codes [out, in]; scale and additive zero point [in / group, out]."""
        codes, scale, added = arrays.values()
        return split_pairs(codes.view(np.uint8)) ^ 8, scale, added


@dataclass(frozen=True)
class TiledInt4Matrix(Int4Matrix):
    def unpacked(self, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        assert isinstance(self.group.form, Int4Layout)
        words, shared = arrays.values()
        rows, columns = self.shape
        # Axes: output tile, input tile (128), output, pair of inputs, input / 32, element of the
        # pair, input / 8.
        codes = words.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
        tiles, spans = words.shape[:2]
        codes = codes.astype(np.uint8).reshape(tiles, spans, 8, 4, 4, 2, 4)
        codes = codes.transpose(0, 2, 1, 4, 6, 3, 5).reshape(8 * tiles, 128 * spans)
        shared = shared[: columns // self.group.form.group, :rows]
        return codes[:rows, :columns], shared[..., 0], shared[..., 1]


def gather(tensors: dict[str, Tensor], stored: StoredFormat) -> dict[str, Tensor | Matrix]:
    metadata_reader = cache(read_metadata)
    gathered: dict[str, Any] = {}
    components: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        naming = next((naming for naming in NAMINGS if naming in name), None)
        if naming is None:
            gathered[name] = tensor
        else:
            stem, _, component = name.partition(naming)
            components.setdefault((stem, naming), {})[component] = tensor
    for (stem, naming), matrix_tensors in components.items():
        gathered[f"{stem}.weight"] = matrix(
            stem, stem + naming, matrix_tensors, stored, metadata_reader
        )
    return gathered


def matrix(
    stem: str,
    prefix: str,
    components: dict[str, Tensor],
    stored: StoredFormat,
    read_metadata: Callable[[Path], dict[str, Any]],
) -> Matrix:
    """One matrix, with the shapes and dtypes of its tensors checked."""
    group = next(
        (
            candidate
            for candidate in stored.groups
            if "Linear" in candidate.targets or stem in candidate.target_modules
        ),
        None,
    )
    if group is None:
        raise ModelError(
            f"tensor {prefix + [*components][0]!r} is quantised, and {CONFIG_KEY} says nothing of "
            f"{stem!r}"
        )
    components = {
        name: tensor for name, tensor in components.items() if name not in STATIC_COMPONENTS
    }
    tiled = isinstance(group.form, Int4Layout) and group.form.tiled
    zeros = isinstance(group.form, Int4Layout) or (
        isinstance(group.form, IntegerLayout) and "zero_point" in components
    )
    needed = ["qdata", "scale_and_zero"] if tiled else ["qdata", "scale"] + ["zero_point"] * zeros
    if missing := [name for name in needed if name not in components]:
        available = ", ".join(sorted(components))
        raise ModelError(
            f"the checkpoint lacks the tensor {prefix + missing[0]!r}; of {stem!r} it has "
            f"{available}"
        )
    if extra := sorted(components.keys() - {*needed}):
        raise ModelError(
            f"tensor {prefix + extra[0]!r} is of a form of torchao that is not supported"
        )
    if tiled:
        return make_tiled_matrix(
            stem, {name: components[name] for name in needed}, group, read_metadata
        )
    codes = components["qdata"]
    scale = components["scale"]
    if len(codes.shape) != 2 or not all(codes.shape):
        raise ModelError(
            f"tensor {codes.name!r} is {list(codes.shape)} of {codes.dtype.name}; it must be a "
            "matrix"
        )
    if isinstance(group.form, str):
        return fp8.matrix(stem, {".weight": codes, ".weight_scale": scale}, group)
    tensors = {name: components[name] for name in needed}
    if isinstance(group.form, Int4Layout):
        return make_int4_matrix(stem, tensors, group)
    assert isinstance(group.form, IntegerLayout)
    rows, columns = codes.shape
    check(codes, ("int8",), codes.shape)
    size = columns if group.form.group == -1 else group.form.group
    if columns % size:
        raise indivisible(codes, columns, size)
    shapes = [(rows, columns // size)] + [(), (1,), (1, 1), (rows,)] * (size == columns)
    check(scale, FLOATS, *shapes)
    if "zero_point" in tensors:
        check(tensors["zero_point"], ("int8",), *shapes)
    return SignedMatrix(f"{stem}.weight", (rows, columns), group, tensors)


def make_int4_matrix(stem: str, tensors: dict[str, Tensor], group: StoredGroup) -> Matrix:
    assert isinstance(group.form, Int4Layout)
    codes, scale, added = tensors.values()
    rows = codes.shape[0]
    columns = 2 * codes.shape[1]
    size = group.form.group
    check(codes, ("int8", "uint8"), codes.shape)
    if columns % size:
        raise indivisible(codes, columns, size)
    for tensor in (scale, added):
        check(tensor, FLOATS, (columns // size, rows))
    return Int4Matrix(f"{stem}.weight", (rows, columns), group, tensors)


def make_tiled_matrix(
    stem: str,
    tensors: dict[str, Tensor],
    group: StoredGroup,
    read_metadata: Callable[[Path], dict[str, Any]],
) -> Matrix:
    assert isinstance(group.form, Int4Layout)
    codes, shared = tensors.values()
    if len(codes.shape) != 4 or not all(codes.shape):
        raise ModelError(
            f"tensor {codes.name!r} is {list(codes.shape)}; it must be [out / 8, in / 128, 32, 4]"
        )
    rows, columns = true_shape(f"{stem}.weight", read_metadata(codes.file)) or (
        8 * codes.shape[0],
        128 * codes.shape[1],
    )
    padded = [-(-n // tile) * tile for n, tile in zip((rows, columns), TILE, strict=True)]
    size = group.form.group
    if columns % size:
        raise indivisible(codes, columns, size)
    check(codes, ("int32",), (padded[0] // 8, padded[1] // 128, 32, 4))
    check(shared, FLOATS, (padded[1] // size, padded[0], 2))
    return TiledInt4Matrix(f"{stem}.weight", (rows, columns), group, tensors)


def true_shape(name: str, metadata: Mapping[str, Any]) -> tuple[int, int] | None:
    """The shape of a matrix before padding; None if the metadata lacks it."""

    try:
        rows, columns = json.loads(metadata[name])["_data"]["shape"]
    except (KeyError, TypeError, ValueError):
        return None
    return (
        (rows, columns) if type(rows) is type(columns) is int and rows > 0 and columns > 0 else None
    )


def indivisible(codes: Tensor, columns: int, size: int) -> ModelError:
    return ModelError(
        f"tensor {codes.name!r} has {columns} inputs, which do not divide by the group of {size}"
    )
