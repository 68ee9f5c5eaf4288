"""Checkpoints of NVIDIA's Model Optimizer: NVFP4 or FP8, or some modules in one and some in the other.

config.json says what hf_quant_config.json says too, in words of its own or in the same. Scales of activations that were
measured before are left out: rows stay as they are under NVFP4, and under FP8 each has its own scale.

    NVFP4    weight uint8 [out, in / 2], the even input in the low half; weight_scale float8_e4m3fn [out, in / 16];
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
from .keys import HERE, MEASURED, known, patterns, refusal
from .matrix import Matrix, check, take

SIDE_FILE = "hf_quant_config.json"  # holds the same where config.json does not
METHODS = ("modelopt", "modelopt_fp4")
GROUP = 16
PLAIN = {  # what both layouts have
    "quant_algo": ..., "kv_cache_quant_algo": ..., "group_size": (GROUP,), "quantized_layers": ...,
    "has_zero_point": (False,), "pre_quant_scale": (False,), "exclude_modules": ..., "ignore": ...,
    "kv_cache_quantized_layers": ..., "kv_cache_scheme": ...,
}  # fmt: skip
OUTER = {"quant_method": METHODS, "producer": ...}
GROUPS = {"config_groups": ..., "weights": ..., "input_activations": ...}  # what quant_algo says too
LAYER = {"quant_algo": ..., "group_size": (GROUP,), "has_zero_point": (False,), "pre_quant_scale": (False,)}
KINDS = {  # what is kept of each quant_algo
    "NVFP4": StoredGroup("nvfp4", "uint8"),
    "W4A16_NVFP4": StoredGroup("nvfp4", "uint8"),
    "FP8": StoredGroup("fp8", "float8_e4m3fn"),
    "FP8_PER_CHANNEL_PER_TOKEN": StoredGroup("fp8", "float8_e4m3fn"),
}
MIXED = "MIXED_PRECISION"


@dataclass(frozen=True)
class Pairs(Matrix):
    def fields(self, parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        codes, scale, whole = parts.values()
        with np.errstate(invalid="ignore", over="ignore"):  # what is no number is found by who asked
            return {"codes": split_pairs(codes), "scale": scale.astype(np.float32) * whole.reshape(())}


def stored_format(config: Mapping[str, Any]) -> StoredFormat:
    here = HERE
    if "quantization" in config:
        known(HERE, config, OUTER | {"quantization": ...})
        here, config = f"{HERE}.quantization", config["quantization"]
        said = known(here, config, PLAIN)
    else:
        said = known(HERE, config, OUTER | PLAIN | GROUPS)
    ignore = [name for key in ("exclude_modules", "ignore") for name in patterns(f"{here}.{key}", said.get(key, []))]
    for name in ignore:
        if any(sign in name for sign in "?["):
            raise refusal(f"{here}.exclude_modules", name, "names of modules, in which * stands for anything")
    return StoredFormat(
        "modelopt", groups_of(here, said), ("lm_head", "embed_tokens", *ignore), parts=True, rounds_head=False
    )


def groups_of(here: str, said: dict[str, Any]) -> tuple[StoredGroup, ...]:
    """How each module is kept, by quant_algo or by the list of all that are."""
    if algorithm(said) != MIXED:
        return (kind_of(f"{here}.quant_algo", said),)
    layers = said.get("quantized_layers")
    if not isinstance(layers, dict) or not layers:
        raise refusal(f"{here}.quantized_layers", layers, "an object of modules")
    names: dict[StoredGroup, list[str]] = {}
    for name, layer in layers.items():
        where = f"{here}.quantized_layers.{name}"
        names.setdefault(kind_of(f"{where}.quant_algo", known(where, layer, LAYER)), []).append(name)
    return tuple(StoredGroup(kind.quant, kind.form, tuple(modules)) for kind, modules in names.items())


def algorithm(said: Mapping[str, Any]) -> Any:
    value = said.get("quant_algo")
    return value.upper() if isinstance(value, str) else value


def kind_of(where: str, said: Mapping[str, Any]) -> StoredGroup:
    value = algorithm(said)
    if not isinstance(value, str) or value not in KINDS:
        raise refusal(where, value, " or ".join(map(repr, KINDS)))
    return KINDS[value]


def gather(tensors: dict[str, Tensor], stored: StoredFormat) -> dict[str, Tensor | Matrix]:
    found: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if not name.endswith(MEASURED)}
    for stem in [name.removesuffix(".weight_scale") for name in found if name.endswith(".weight_scale")]:
        found[f"{stem}.weight"] = matrix(stem, found, stored)
    return found


def matrix(stem: str, found: dict[str, Any], stored: StoredFormat) -> Matrix:
    """One matrix, the shapes and dtypes of its tensors checked."""
    codes = found.get(f"{stem}.weight")
    form = None if codes is None else codes.dtype.name
    group = next((group for group in KINDS.values() if group.form == form), KINDS["FP8"])
    said = stored.group_of(stem)
    if said is not None and said.form != group.form and codes is not None:
        raise ModelError(f"tensor {codes.name!r} is of {form}, and {HERE} says {said.form}")
    if group.quant == "fp8":
        return fp8.matrix(stem, take(found, stem, ".weight_scale", (".weight", ".weight_scale")), group)
    tensors = take(found, stem, ".weight_scale", (".weight", ".weight_scale", ".weight_scale_2"))
    packed, scale, whole = tensors.values()
    if len(packed.shape) != 2 or not all(packed.shape):
        raise ModelError(f"tensor {packed.name!r} is {list(packed.shape)} of {packed.dtype.name}; it must be a matrix")
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    if columns % GROUP:
        raise ModelError(f"tensor {packed.name!r} has {columns} inputs, which do not divide by the group of {GROUP}")
    check(scale, ("float8_e4m3fn",), (rows, columns // GROUP))
    check(whole, ("float32",), (), (1,))
    return Pairs(f"{stem}.weight", (rows, columns), group, tensors)
