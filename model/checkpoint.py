"""From a model folder to a `ModelConfig` and its weights: safetensors, one tensor at a time, or a converted folder."""

import importlib
import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import jax
import numpy as np
from jax.sharding import Mesh

from ..ops import native, quant
from ..ops.native.linear import pack
from ..sharding.mesh import sharding, shardings
from ..sharding.spec import ArraySpec, empty
from . import converted
from .config import ModelConfig, ModelError
from .families import FAMILIES
from .tensors import Tensor, fill, find_tensors, read_json
from .weights import ModelWeights, abstract, dense_specs

FP8_BLOCK = 128  # side of the square that shares a scale; `Keys.quantization` admits no other
LIMITS = {"_layers": 1 << 12, "head_dim": 1 << 14, "hidden_size": 1 << 20, "experts": 1 << 14, "": 1 << 40}


def family_of(hf: dict) -> Any:
    """The module of the family that a config.json names."""
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelError(f"model type {kind!r} is not supported; supported are {', '.join(sorted(FAMILIES))}")
    return importlib.import_module(FAMILIES[kind], f"{__package__}.families")


def read_config(
    folder: Path, dtype: str = "auto", max_len: int | None = None, quantization: str | None = None
) -> ModelConfig:
    """The `ModelConfig` of a folder; `dtype` and `quantization` override what the checkpoint says."""
    hf = read_json(folder / "config.json")
    check_numbers(hf)
    try:
        config = family_of(hf).config(hf, max_len)
    except ModelError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} holds a value of the wrong kind: {error}") from error
    check_fields(config)
    if dtype == "auto":
        # float16 would overflow; bfloat16 rounds its weights, and `dtype="float32"` keeps every bit at twice the memory
        dtype = "bfloat16" if config.dtype == "float16" else config.dtype
    if dtype not in ("float32", "bfloat16"):
        raise ModelError(f"dtype is {dtype!r}; it can be auto, float32 or bfloat16")
    config = replace(config, dtype=dtype)
    if quantization is None:
        return config
    try:
        return replace(config, quant=quant.check(quantization))
    except ValueError as error:
        raise ModelError(str(error)) from None


def check_numbers(value: Any, name: str = "") -> None:
    """Refuse numbers beyond any model, before a list or table of that length is made."""
    if isinstance(value, dict):
        for key, item in value.items():
            check_numbers(item, key)
    elif isinstance(value, list):
        for item in value:
            check_numbers(item, name)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ModelError(f"config.json: {name} = {value!r} is not a finite number")
    elif isinstance(value, int):
        limit = next(limit for ending, limit in LIMITS.items() if name.endswith(ending))
        if abs(value) > limit:
            raise ModelError(f"config.json: {name} = {value!r:.40}; it can be at most {limit}")


def check_fields(node: Any) -> None:
    """Refuse a configuration with a field that is not of its declared kind: a family has passed on what it read."""
    for field in fields(node):
        value = getattr(node, field.name)
        kinds = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
        if float in kinds and type(value) is int:
            value = float(value)
        if type(value) not in [get_origin(kind) or kind for kind in kinds]:
            raise ModelError(f"config.json makes {field.name} = {value!r:.80}; it must be {described(kinds)}")
        if (type(value) is int and value < 0) or (type(value) is float and not math.isfinite(value)):
            raise ModelError(f"config.json makes {field.name} = {value!r:.80}; it must be finite and not negative")
        for item in set(value) if isinstance(value, tuple) else {value}:
            if is_dataclass(item):
                check_fields(item)


def described(kinds) -> str:
    """The kinds of a field in words."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    return " or ".join(words.get(kind, "a part of the model") for kind in kinds)


def load(
    folder: Path, config: ModelConfig, mesh: Mesh | None = None, progress: Callable[[int], None] = lambda count: None
) -> ModelWeights:
    """The weights of a folder, from whichever of the two forms it holds; over a mesh, each array as its rules say."""
    if mesh is not None:
        try:
            shardings(abstract(config), mesh)
        except ValueError as error:
            raise ModelError(f"{folder} does not fit the mesh: {error}") from None
    put = place_packed if mesh is None and native.serves() else place
    if converted.holds_weights(folder):
        weights = converted.load_weights(folder, abstract(config), mesh, progress)
        return weights if put is place else jax.tree.map(put, dense_specs(config), weights)
    return load_weights(folder, config, put, progress, mesh)


def place(spec: ArraySpec, leaf):
    """A finished leaf on the device."""
    return jax.device_put(leaf)


def place_packed(spec: ArraySpec, leaf):
    """The same, laid out for the kernels."""
    return jax.device_put(pack(spec, leaf))


def load_weights(
    folder: Path,
    config: ModelConfig,
    put: Callable[[ArraySpec, Any], Any] = place,
    progress: Callable[[int], None] = lambda count: None,
    mesh: Mesh | None = None,
) -> ModelWeights:
    """The weights from safetensors. `put` places a finished leaf, given the spec of its dense form; `progress` is told
    of bytes as they are read."""
    family = importlib.import_module(FAMILIES[config.family], f"{__package__}.families")
    tensors, sources = find_tensors(folder), family.sources(config)
    specs, dense = abstract(config), dense_specs(config)
    if canonical := getattr(family, "canonical", None):
        tensors = {canonical(name): tensor for name, tensor in tensors.items()}
    parts = jax.tree.map(lambda spec, source: source.found_in(tensors), dense, sources)
    ignored = getattr(family, "ignored", lambda name, config: False)
    check_tensors(folder, config, tensors, parts, lambda name: ignored(name, config))

    def finish(dense_spec: ArraySpec, spec, parts):
        leaf = read_leaf(dense_spec, parts, tensors)
        progress(leaf.nbytes)
        if not isinstance(spec, ArraySpec):
            leaf = quant.quantize(np.moveaxis(leaf, dense_spec.inputs, range(len(dense_spec.inputs))), spec)
        if mesh is None:
            placed = put(dense_spec, leaf)
        else:
            placed = jax.device_put(leaf, jax.tree.map(lambda one: sharding(one, mesh), spec))
        return jax.block_until_ready(placed)  # no second leaf while this one is still being copied

    return jax.tree.map(finish, dense, specs, parts)


def check_tensors(folder: Path, config: ModelConfig, tensors: dict[str, Tensor], parts, ignored) -> None:
    """Every tensor that the model needs is there and has its shape, and there is none that it does not know."""
    known = set()
    for part in jax.tree.leaves(parts):
        if part.name not in tensors:
            raise ModelError(f"{folder} lacks the tensor {part.name!r}")
        if tensors[part.name].shape != part.shape:
            shape = list(tensors[part.name].shape)
            raise ModelError(f"tensor {part.name!r} has shape {shape}; config.json wants {list(part.shape)}")
        known |= {part.name, f"{part.name}_scale_inv"}
    if config.tied:
        known.add("lm_head.weight")
    extra = [name for name in tensors if name not in known and not name.endswith("rotary_emb.inv_freq")]
    if extra := sorted(name for name in extra if not ignored(name)):
        raise ModelError(f"{folder} holds the tensor {extra[0]!r}, which {config.family} models do not have")


def read_leaf(spec: ArraySpec, parts, tensors: dict[str, Tensor]) -> np.ndarray:
    """One array of the weight tree, put together from its parts."""
    leaf = None
    for part in parts:
        value = tensors[part.name].read()
        if (scales := f"{part.name}_scale_inv") in tensors:
            value = scale_blocks(value, tensors[scales].read(), scales)
        value = part.turn(value)
        if len(parts) == 1 and value.shape == spec.shape and value.dtype == spec.dtype and value.flags.c_contiguous:
            return value  # as it was read
        if leaf is None:
            leaf = empty(spec.shape, spec.dtype)
        fill(leaf[part.at] if part.at != () else leaf, value)
    return leaf


def scale_blocks(value: np.ndarray, scale: np.ndarray, name: str) -> np.ndarray:
    """An 8-bit float matrix in float32, each block of 128 by 128 times its scale."""
    if value.ndim != 2 or scale.shape != tuple(-(-size // FP8_BLOCK) for size in value.shape):
        raise ModelError(f"tensor {name!r} has shape {list(scale.shape)}; it must hold one scale a block of 128 x 128")
    rows, columns = value.shape
    scale = scale.astype(np.float32).repeat(FP8_BLOCK, 0)[:rows].repeat(FP8_BLOCK, 1)[:, :columns]
    return value.astype(np.float32) * scale
