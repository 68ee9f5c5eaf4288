"""From a model folder to a `ModelConfig` and its weights: safetensors, one tensor at a time, or a converted folder."""

import importlib
import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import jax
import numpy as np

from ...ops import native, quant
from ...ops.quant.mxfp4 import Mxfp4
from ...ops.quant.stack import Stack
from ...sharding import local_shards
from ...sharding.mesh import shardings
from ...sharding.spec import ArraySpec, nbytes
from .. import families
from ..config import CACHES, ModelConfig, ModelError
from ..families import FAMILIES
from ..weights import ModelWeights, abstract, dense_specs
from . import compressed_tensors, orbax
from .assemble import read_leaf
from .expert_stacks import read_stack, wanted
from .placement import Home, Homes, complete, place, place_all, place_over, place_packed, spread
from .quantization_config import Stored, stored_format
from .safetensors import Tensor, find_tensors, read_json

LIMITS = {"_layers": 1 << 12, "head_dim": 1 << 14, "hidden_size": 1 << 20, "experts": 1 << 14, "": 1 << 40}


def family_of(hf: dict) -> Any:
    """The module of the family that a config.json names."""
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelError(f"model type {kind!r} is not supported; supported are {', '.join(sorted(FAMILIES))}")
    return importlib.import_module(FAMILIES[kind], families.__name__)


def read_config(
    folder: Path,
    dtype: str = "auto",
    max_len: int | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> ModelConfig:
    """The `ModelConfig` of a folder; `dtype` and `quantization` override what the checkpoint says."""
    hf = read_json(folder / "config.json")
    check_numbers(hf)
    if stored := stored_format(hf):
        hf = {name: value for name, value in hf.items() if name != "quantization_config"}
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
    if kv_cache_dtype not in CACHES:
        raise ModelError(f"kv_cache_dtype is {kv_cache_dtype!r}; it can be {', '.join(CACHES)}")
    quant = choose_format(config, quantization, stored)
    return replace(config, dtype=dtype, quant=quant, kv_cache_dtype=kv_cache_dtype)


def choose_format(config: ModelConfig, asked: str | None, stored: Stored | None) -> str | None:
    """The format of the weights: what is asked for, or what the checkpoint has and nobody may contradict."""
    try:
        wish = None if asked is None else quant.check(asked)
        if stored is not None:
            probe = ArraySpec((2, 1), "float32", (None, None), inputs=(0,))
            if wish and quant.packed(wish, probe) != quant.packed(stored.quant, probe):
                raise ModelError(
                    f"quantization is {asked!r}, and the checkpoint is quantised already, as {stored.quant!r}; leave "
                    "--quantization out, or give the checkpoint that it was made from"
                )
            wish = stored.quant
        if wish is not None:
            abstract(replace(config, quant=wish))  # refuses sizes that the format cannot hold
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(str(error)) from None
    return wish


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
    folder: Path,
    config: ModelConfig,
    homes: Homes = Homes(),  # noqa: B008 - it is frozen
    progress: Callable[[int], None] = lambda count: None,
    plain: bool = False,
) -> ModelWeights:
    """The weights of a folder, from whichever of the two forms it holds; over a mesh, each array as its rules say.
    `plain`: not laid out for the kernels, to be written again."""
    specs = specs_of(folder, config)
    if homes.mesh is not None:
        try:
            shardings(specs, homes.mesh)
        except ValueError as error:
            raise ModelError(f"{folder} does not fit the mesh: {error}") from None
    put = place
    if homes.mesh is None and not plain and native.serves():
        put = partial(place_packed, narrow=config.dtype == "bfloat16")
    if orbax.holds_weights(folder):
        if homes.mesh is not None:
            weights = orbax.load_weights(folder, specs, progress, spread(homes.tree(config), specs))
            return complete(weights, config, homes)
        weights = orbax.load_weights(folder, specs, progress)
        if put is place and not homes.on_host:
            return weights

        def finish(home: Home, spec: ArraySpec, leaf):
            return put(spec, jax.tree.map(np.asarray, leaf))

        return place_all(config, homes, finish, dense_specs(config), weights)
    return load_weights(folder, config, put, progress, homes)


def load_weights(
    folder: Path,
    config: ModelConfig,
    put: Callable[[ArraySpec, Any], Any] = place,
    progress: Callable[[int], None] = lambda count: None,
    homes: Homes = Homes(),  # noqa: B008 - it is frozen
) -> ModelWeights:
    """The weights from safetensors. `put` places a finished leaf, given the spec of its dense form; `progress` is told
    of bytes as they are read."""
    stored, specs = stored_format(read_json(folder / "config.json")), specs_of(folder, config)
    tensors, parts = find_parts(folder, config, stored)
    if stored is not None:
        check_codes(dense_specs(config).layers, specs.layers, parts.layers, tensors)

    def read(home: Home, spec: ArraySpec, parts, whole: bool = False):
        needed = None if whole or home.mesh is None else local_shards.local_elements(spec, home.mesh)
        leaf = read_leaf(spec, parts, tensors, needed)
        progress(leaf.nbytes)
        return leaf

    def finish(home: Home, dense_spec, spec, parts):
        if isinstance(spec, Stack):
            leaf = read_stack(dense_spec, spec, parts, tensors, wanted(dense_spec, home.mesh), progress)
        elif isinstance(spec, Mxfp4):
            leaf = jax.tree.map(partial(read, home), spec, parts)
        elif compressed_tensors.fits(spec, [tensors[part.name] for part in parts]):
            leaf = compressed_tensors.read_node(dense_spec, spec, parts, tensors)
            progress(nbytes(leaf))
        else:
            rounds = not isinstance(spec, ArraySpec)
            leaf = read(home, dense_spec, parts, whole=rounds)
            if rounds:
                leaf = quant.quantize(np.moveaxis(leaf, dense_spec.inputs, range(len(dense_spec.inputs))), spec)
        placed = put(dense_spec, leaf) if home.mesh is None else place_over(home, spec, leaf)
        return jax.block_until_ready(placed)  # no second leaf while this one is still being copied

    return place_all(config, homes, finish, dense_specs(config), specs, parts)


def specs_of(folder: Path, config: ModelConfig) -> ModelWeights:
    """What a folder's weights become: `abstract(config)`, less the matrices that a quantised checkpoint left dense."""
    specs, stored = abstract(config), stored_format(read_json(folder / "config.json"))
    if stored is None or config.quant is None:
        return specs
    family = module_of(config)
    stored = stored.renamed(getattr(family, "canonical", lambda name: name))

    def choose(dense_spec: ArraySpec, spec, source):
        if isinstance(spec, ArraySpec):
            return spec
        names = [part.name.removesuffix(".weight") for part in source.parts]
        covered = {stored.covers(name) for name in names}
        if len(covered) > 1:
            raise ModelError(
                f"config.json: quantization_config.ignore names some of {', '.join(names)}, which are one matrix here; "
                "supported is all of them, or none"
            )
        return spec if covered.pop() else dense_spec

    layers = jax.tree.map(choose, dense_specs(config).layers, specs.layers, family.sources(config).layers)
    return specs.replace(layers=layers)


def module_of(config: ModelConfig) -> Any:
    """The module of a configuration's family."""
    return importlib.import_module(FAMILIES[config.family], families.__name__)


def find_parts(folder: Path, config: ModelConfig, stored: Stored | None = None) -> tuple[dict[str, Any], Any]:
    """The tensors of a folder by their family's own names, all known, and the parts of each leaf among them."""
    family, tensors = module_of(config), find_tensors(folder)
    if stored is not None:
        tensors = compressed_tensors.gather(tensors, stored)
    if canonical := getattr(family, "canonical", None):
        tensors = {canonical(name): tensor for name, tensor in tensors.items()}
    parts = jax.tree.map(lambda spec, source: source.found_in(tensors), dense_specs(config), family.sources(config))
    ignored = getattr(family, "ignored", lambda name, config: False)
    check_tensors(folder, config, tensors, parts, lambda name: ignored(name, config))
    return tensors, parts


def check_codes(dense, specs, parts, tensors: dict[str, Any]) -> None:
    """Refuse a dense matrix where quantization_config says codes: to round it here would be a guess."""

    def check(_, spec, parts):
        for part in () if isinstance(spec, ArraySpec) else parts:
            if not compressed_tensors.fits(spec, [tensors[part.name]]):
                raise ModelError(
                    f"tensor {part.name!r} is not quantised, and quantization_config.ignore in config.json does not "
                    "name it"
                )

    jax.tree.map(check, dense, specs, parts)


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
