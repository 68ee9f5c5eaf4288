"""NVIDIA Model Optimizer checkpoints: NVFP4, FP8, or a mixture by module.

config.json has the contents of hf_quant_config.json, in the same or in its own schema. Static
activation scales are not used: activations stay unquantised under NVFP4, and FP8 uses dynamic
scales.

    NVFP4    weight uint8 [out, in / 2], the even input in the low half;
             weight_scale float8_e4m3fn [out, in / 16];
             weight_scale_2 float32: weight = code * weight_scale * weight_scale_2
    FP8      weight float8_e4m3fn [out, in]; weight_scale one or [out]
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...config import ModelError
from ...stored_format import StoredFormat, StoredGroup
from ..safetensors import Tensor
from . import fp8
from .forms import split_pairs
from .keys import CONFIG_KEY, STATIC_SCALES, checked_entries, checked_patterns, unsupported_value
from .matrix import Matrix, check, pop_tensors

SIDE_FILE = "hf_quant_config.json"  # read if config.json has no quantization_config
METHODS = ("modelopt", "modelopt_fp4")
GROUP = 16
PLAIN = {  # keys of both schemas
    "quant_algo": ..., "kv_cache_quant_algo": ..., "group_size": (GROUP,), "quantized_layers": ...,
    "has_zero_point": (False,), "pre_quant_scale": (False,), "exclude_modules": ..., "ignore": ...,
    "kv_cache_quantized_layers": ..., "kv_cache_scheme": ...,
}  # fmt: skip
OUTER = {"quant_method": METHODS, "producer": ...}
# These repeat what quant_algo says.
GROUPS = {"config_groups": ..., "weights": ..., "input_activations": ...}
LAYER = {
    "quant_algo": ...,
    "group_size": (GROUP,),
    "has_zero_point": (False,),
    "pre_quant_scale": (False,),
}
KINDS = {  # the stored group for each quant_algo
    "NVFP4": StoredGroup("nvfp4", "uint8"),
    "W4A16_NVFP4": StoredGroup("nvfp4", "uint8"),
    "FP8": StoredGroup("fp8", "float8_e4m3fn"),
    "FP8_PER_CHANNEL_PER_TOKEN": StoredGroup("fp8", "float8_e4m3fn"),
}
MIXED = "MIXED_PRECISION"


@dataclass(frozen=True)
class Nvfp4Matrix(Matrix):
    def fields(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        codes, scale, global_scale = arrays.values()
        with np.errstate(invalid="ignore", over="ignore"):  # the caller checks for NaN
            return {
                "codes": split_pairs(codes),
                "scale": scale.astype(np.float32) * global_scale.reshape(()),
            }


def stored_format(config: Mapping[str, Any]) -> StoredFormat:
    key_path = CONFIG_KEY
    if "quantization" in config:
        checked_entries(CONFIG_KEY, config, OUTER | {"quantization": ...})
        key_path = f"{CONFIG_KEY}.quantization"
        config = config["quantization"]
        settings = checked_entries(key_path, config, PLAIN)
    else:
        settings = checked_entries(CONFIG_KEY, config, OUTER | PLAIN | GROUPS)
    ignore = [
        name
        for key in ("exclude_modules", "ignore")
        for name in checked_patterns(f"{key_path}.{key}", settings.get(key, []))
    ]
    for name in ignore:
        if any(sign in name for sign in "?["):
            raise unsupported_value(
                f"{key_path}.exclude_modules",
                name,
                "names of modules, in which * stands for anything",
            )
    return StoredFormat(
        "modelopt",
        read_groups(key_path, settings),
        ("lm_head", "embed_tokens", *ignore),
        match_substrings=True,
        rounds_head=False,
    )


def read_groups(key_path: str, settings: dict[str, Any]) -> tuple[StoredGroup, ...]:
    """The stored groups: one by quant_algo, or one for each format in quantized_layers."""
    if algorithm_name(settings) != MIXED:
        return (group_for_algorithm(f"{key_path}.quant_algo", settings),)
    layers = settings.get("quantized_layers")
    if not isinstance(layers, dict) or not layers:
        raise unsupported_value(f"{key_path}.quantized_layers", layers, "an object of modules")
    names: dict[StoredGroup, list[str]] = {}
    for name, layer in layers.items():
        layer_path = f"{key_path}.quantized_layers.{name}"
        names.setdefault(
            group_for_algorithm(
                f"{layer_path}.quant_algo", checked_entries(layer_path, layer, LAYER)
            ),
            [],
        ).append(name)
    return tuple(
        StoredGroup(kind.quant, kind.form, tuple(modules)) for kind, modules in names.items()
    )


def algorithm_name(settings: Mapping[str, Any]) -> Any:
    value = settings.get("quant_algo")
    return value.upper() if isinstance(value, str) else value


def group_for_algorithm(key_path: str, settings: Mapping[str, Any]) -> StoredGroup:
    value = algorithm_name(settings)
    if not isinstance(value, str) or value not in KINDS:
        raise unsupported_value(key_path, value, " or ".join(map(repr, KINDS)))
    return KINDS[value]


def gather(tensors: dict[str, Tensor], stored: StoredFormat) -> dict[str, Tensor | Matrix]:
    gathered: dict[str, Any] = {
        name: tensor for name, tensor in tensors.items() if not name.endswith(STATIC_SCALES)
    }
    for stem in [
        name.removesuffix(".weight_scale") for name in gathered if name.endswith(".weight_scale")
    ]:
        gathered[f"{stem}.weight"] = matrix(stem, gathered, stored)
    return gathered


def matrix(stem: str, gathered: dict[str, Any], stored: StoredFormat) -> Matrix:
    """One matrix, with the shapes and dtypes of its tensors checked."""
    codes = gathered.get(f"{stem}.weight")
    form = None if codes is None else codes.dtype.name
    group = next((group for group in KINDS.values() if group.form == form), KINDS["FP8"])
    configured = stored.group_of(stem)
    if configured is not None and configured.form != group.form and codes is not None:
        raise ModelError(
            f"tensor {codes.name!r} is of {form}, and {CONFIG_KEY} says {configured.form}"
        )
    if group.quant == "fp8":
        return fp8.matrix(
            stem, pop_tensors(gathered, stem, ".weight_scale", (".weight", ".weight_scale")), group
        )
    tensors = pop_tensors(
        gathered, stem, ".weight_scale", (".weight", ".weight_scale", ".weight_scale_2")
    )
    packed, scale, global_scale = tensors.values()
    if len(packed.shape) != 2 or not all(packed.shape):
        raise ModelError(
            f"tensor {packed.name!r} is {list(packed.shape)} of {packed.dtype.name}; it must "
            "be a matrix"
        )
    rows = packed.shape[0]
    columns = 2 * packed.shape[1]
    if columns % GROUP:
        raise ModelError(
            f"tensor {packed.name!r} has {columns} inputs, which do not divide by the group of "
            f"{GROUP}"
        )
    check(scale, ("float8_e4m3fn",), (rows, columns // GROUP))
    check(global_scale, ("float32",), (), (1,))
    return Nvfp4Matrix(f"{stem}.weight", (rows, columns), group, tensors)
