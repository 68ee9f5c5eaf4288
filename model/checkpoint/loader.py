"""From a model folder to a `ModelConfig` and its weights: safetensors, one tensor at a time, or a converted folder."""

import importlib
import itertools
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from threading import Lock
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import jax
import numpy as np

from ...ops import native, quant
from ...ops.linear.cpu_layout import pack
from ...ops.quant import Rounded
from ...ops.quant.stack import Stack
from ...sharding import local_shards
from ...sharding.mesh import shardings
from ...sharding.spec import ArraySpec, nbytes, random_arrays
from .. import families
from ..config import CACHES, ModelConfig, ModelError, skipped_layers
from ..families import FAMILIES, UNSUPPORTED, wrapper
from ..stored_format import StoredFormat
from ..weights import ModelWeights, abstract, dense_specs
from . import embedder, heads, orbax, published, reranker
from .dense_leaf import read_leaf
from .expert_stacks import read_stack, wanted
from .folder import read_config_json
from .gguf_folder import FILE_FORMAT, weights_of
from .parallel import in_parallel
from .placement import Location, Placement, with_head
from .published import gguf
from .published.matrix import Matrix, fits, read_node
from .safetensors import Tensor, find_tensors
from .weight_cache import WeightCache

LIMITS = {"_layers": 1 << 12, "head_dim": 1 << 14, "hidden_size": 1 << 20, "experts": 1 << 14, "": 1 << 40}


def family_of(hf: dict) -> Any:
    """The module of the family that a config.json names."""
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        why = f": {UNSUPPORTED[kind]}" if isinstance(kind, str) and kind in UNSUPPORTED else ""
        raise ModelError(f"model type {kind!r} is not supported{why}; supported are {', '.join(sorted(FAMILIES))}")
    return importlib.import_module(FAMILIES[kind], families.__name__)


def read_config(
    folder: Path,
    dtype: str = "auto",
    max_len: int | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    hf_overrides: Mapping[str, Any] | None = None,
    kv_cache_dtype_skip_layers: Sequence[str] = (),
) -> ModelConfig:
    """The `ModelConfig` of a folder; `dtype`, `quantization` and `hf_overrides` override what the checkpoint says."""
    how = embedder.read(folder)
    embeds = how is not None and not how.ranks
    hf = published.described(folder, read_config_json(folder, hf_overrides, embeds))
    check_numbers(hf)
    hf, stored = published.split(hf)
    file_format = hf.pop(FILE_FORMAT, None)
    by_tokens = reranker.classes_by_tokens(folder, hf)
    hf = {name: value for name, value in hf.items() if name not in reranker.KEYS}
    try:
        config = family_of(hf).config(hf, max_len)
    except ModelError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} holds a value of the wrong kind: {error}") from error
    found = by_tokens or reranker.rewards(folder, hf) or heads.classes_of(hf)
    if by_tokens is not None:
        found = replace(by_tokens, own_head=not config.tied)
        heads.check_tokens(config, found)
    if embeds or found is not None:
        config = replace(config, writes=False, classes=found, tied=True, head_bias=False)  # no table of tokens is read
    if how is not None and how.dense and not config.encodes:
        raise ModelError(f"{folder / embedder.MODULES} names Dense behind a decoder, which is not supported")
    if config.encodes:
        config = encoder_of(config, hf, how or embedder.Embedder(pooling="mean"))
    check_fields(config)
    dtype = compute_dtype(dtype, config.dtype)
    if kv_cache_dtype not in CACHES:
        raise ModelError(f"kv_cache_dtype is {kv_cache_dtype!r}; it can be {', '.join(CACHES)}")
    quant = choose_format(config, quantization, stored)
    skips = skipped_layers(config, kv_cache_dtype_skip_layers)
    return replace(
        config, dtype=dtype, quant=quant, kv_cache_dtype=kv_cache_dtype, kv_cache_skips=skips, stored=stored,
        file_format=file_format if quantization is None else None,
    )  # fmt: skip


def encoder_of(config: ModelConfig, hf: dict, how: embedder.Embedder) -> ModelConfig:
    """With what is made of its rows: a vector as the folder says, or classes as the family's own head does."""
    config = replace(config, writes=False, tied=True)
    if config.classes is None:
        return replace(config, pooling=how.pooling, head=tuple(dense for _, dense in how.dense))
    made = getattr(importlib.import_module(FAMILIES[config.family], families.__name__), "class_head", None)
    if made is None:
        raise ModelError(f"classes of models of the family {config.family} are not supported")
    pooling, head, name = made(hf, config)
    return replace(config, pooling=pooling, head=head, classes=replace(config.classes, bias=True, name=name))


def compute_dtype(asked: str, stored: str) -> str:
    """The dtype to compute in. float16 would overflow: bfloat16 takes its place, which rounds its weights."""
    wish = {"auto": stored, "half": "float16", "float": "float32"}.get(asked, asked)
    if wish not in ("float32", "bfloat16", "float16"):
        raise ModelError(f"dtype is {asked!r}; it can be auto, float32, bfloat16 or float16")
    if wish != "float16":
        return wish
    if asked != "auto":
        warn_of_float16(asked)
    return "bfloat16"


@cache
def warn_of_float16(asked: str) -> None:
    logging.getLogger("quire").warning(
        "dtype is %s: computed in bfloat16, since float16 overflows; float32 keeps every bit of float16 weights", asked
    )


def choose_format(config: ModelConfig, asked: str | None, stored: StoredFormat | None) -> str | None:
    """The format of the weights: what is asked for, or what the checkpoint has and nobody may contradict."""
    try:
        wish = None if asked is None else quant.check(asked)
        if stored is not None and stored.quant is not None:
            if wish and quant.example(wish) != quant.example(stored.quant):
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
    placement: Placement = Placement(),  # noqa: B008 - it is frozen
    progress: Callable[[int], None] = lambda count: None,
    plain: bool = False,
    load_format: str = "auto",
    cached: bool = False,
) -> ModelWeights:
    """The weights of a folder, from whichever of the two forms it holds; over a mesh, each array as its rules say.

    `plain`: not laid out for the kernels, to be written again. With the format `dummy` they are random. `cached`: what
    is laid out for the kernels is kept for the next start.
    """
    specs = specs_of(config)
    if placement.mesh is not None:
        try:
            shardings(specs, placement.mesh)
        except ValueError as error:
            raise ModelError(f"{folder} does not fit the mesh: {error}") from None
    for_kernels = placement.mesh is None and not plain and native.serves()
    put = partial(put_packed, rows=config.rows) if for_kernels else put_as_it_is
    dummy, converted = load_format == "dummy", orbax.holds_weights(folder)
    if converted and load_format == "safetensors":
        raise ModelError(f"load_format is 'safetensors', and {folder} is a converted checkpoint; leave it out")
    if not converted and not dummy:
        kept = None
        if cached and for_kernels and not placement.on_host:
            kept = WeightCache.of(folder, replace(config, max_len=0))  # it changes no weight
        return load_weights(folder, config, put, progress, placement, kept)
    if placement.mesh is not None:
        locations = array_locations(placement, config, specs)
        weights = draw(specs, locations) if dummy else orbax.load_weights(folder, specs, progress, locations)
        return with_head(weights, config, placement)
    weights = draw(specs) if dummy else orbax.load_weights(folder, specs, progress)
    if not for_kernels and not placement.on_host:
        return weights

    def move(location: Location, dense, leaf):
        return location.settle(put(dense, jax.tree.map(np.asarray, leaf)))

    dense = dense_specs(config)
    return jax.tree.map(move, placement.by_leaf(config, dense), dense, weights)


def draw(specs: ModelWeights, locations: ModelWeights | None = None) -> ModelWeights:
    """Random weights, an array at a time; over a mesh each as its location says."""
    seeds, on_device = itertools.count(), jax.default_backend() != "cpu"

    def one(spec: ArraySpec, location: Location | None = None):
        leaf = random_arrays(spec, next(seeds), on_device)
        return leaf if location is None else location.split(spec, np.asarray(leaf))

    return jax.tree.map(one, specs, *([] if locations is None else [locations]))


def put_as_it_is(dense: ArraySpec, leaf):
    """A leaf on the device."""
    return jax.device_put(leaf)


def put_packed(dense: ArraySpec, leaf, rows: str):
    """A leaf on the device, laid out for the kernels, which meet rows of this type."""
    return jax.device_put(pack(dense, leaf, rows))


def load_weights(
    folder: Path,
    config: ModelConfig,
    put: Callable[[ArraySpec, Any], Any] = put_as_it_is,
    progress: Callable[[int], None] = lambda count: None,
    placement: Placement = Placement(),  # noqa: B008 - it is frozen
    kept: WeightCache | None = None,
) -> ModelWeights:
    """The weights from safetensors, or from where they are `kept`.

    `put` gets a leaf and the spec of its dense form, where there is no mesh.
    `progress` is told of bytes as they are read.
    """
    dense, specs, lock = dense_specs(config), specs_of(config), Lock()
    locations, tree = jax.tree.flatten(placement.by_leaf(config, dense))  # of nodes too that the checkpoint has
    if kept is not None and (found := kept.read()) is not None:
        progress(nbytes(found))
        return tree.unflatten(found)
    tensors, parts = find_parts(folder, config)
    log_widened(specs, parts, tensors, config.dtype)
    if config.stored is not None and config.stored.quant is not None:
        check_codes(dense.layers, specs.layers, parts.layers, tensors)

    def tell(count: int) -> None:
        with lock:
            progress(count)

    def read_array(location: Location, spec: ArraySpec, parts, whole: bool = False):
        needed = None if whole or location.mesh is None else local_shards.local_elements(spec, location.mesh)
        leaf = read_leaf(spec, parts, tensors, needed)
        tell(leaf.nbytes)
        return leaf

    def read(location: Location, dense, spec, parts):
        if isinstance(spec, Stack):
            return read_stack(dense, spec, parts, tensors, wanted(dense, location.mesh), tell)
        if not isinstance(spec, Rounded):  # an array, or a node that the checkpoint holds array by array
            return jax.tree.map(partial(read_array, location), spec, parts)
        if fits(spec, [tensors[part.name] for part in parts]):
            leaf = read_node(dense, spec, parts, tensors)
            tell(nbytes(leaf))
            return leaf
        leaf = read_array(location, dense, parts, whole=True)
        return spec.quantize(np.moveaxis(leaf, dense.inputs, range(len(dense.inputs))))

    def read_and_put(location: Location, dense, spec, parts):
        leaf = read(location, dense, spec, parts)
        placed = location.settle(put(dense, leaf)) if location.mesh is None else location.split(spec, leaf)
        return jax.block_until_ready(placed)  # no second leaf while this one is still being copied

    each_dense, *others = map(tree.flatten_up_to, (dense, specs, parts))
    works = [partial(read_and_put, *each) for each in zip(locations, each_dense, *others, strict=True)]
    if placement.mesh is None:
        made = in_parallel(works, [nbytes(each) for each in each_dense])
        if kept is not None:
            kept.write_soon(made)
    else:
        made = [work() for work in works]  # devices of a mesh wait for each other in one order
    return with_head(tree.unflatten(made), config, placement)


def array_locations(placement: Placement, config: ModelConfig, specs: ModelWeights) -> ModelWeights:
    """The location of every array, those of nodes too."""
    return jax.tree.map(
        lambda location, node: jax.tree.map(lambda _: location, node), placement.by_leaf(config, specs), specs
    )


def specs_of(config: ModelConfig) -> ModelWeights:
    """What a checkpoint's weights become: `abstract(config)`, with the matrices that it left dense."""
    specs = abstract(config)
    if config.stored is None or config.stored.quant is None:
        return specs
    family, dense = module_of(config), dense_specs(config)
    stored = config.stored.renamed(partial(canonical, family))

    def choose(dense_spec: ArraySpec, spec, source):
        if isinstance(spec, ArraySpec):
            return spec
        kind = kind_of(stored, source, dense_spec)
        return (quant.stacked if dense_spec.stacked else quant.packed)(kind, dense_spec)

    sources = family.sources(config)
    specs = specs.replace(layers=jax.tree.map(choose, dense.layers, specs.layers, sources.layers))
    if stored.rounds_head:
        return specs
    name = "embed_VD" if config.tied else "head_VD"
    kind = kind_of(stored, getattr(sources, name), getattr(dense, name))
    own = {} if kind is None else {name: quant.packed(kind, getattr(dense, name))}
    return specs.replace(**{"embed_VD": dense.embed_VD, "head_VD": dense.head_VD} | own)


def kind_of(stored: StoredFormat, source, dense: ArraySpec) -> str | None:
    """The format of a weight that is made of a checkpoint's matrices; None where it is dense.

    Of several formats it is one that holds the codes of all; where there is none, or a part is dense, it is widened.
    """
    groups = {stored.group_of(part.name.removesuffix(".weight")) for part in source.parts}
    inputs = math.prod(dense.shape[axis] for axis in dense.inputs)
    kind = quant.common({None if group is None or inputs % group.multiple else group.quant for group in groups})
    # Elsewhere no kernel takes codes in groups, and XLA would decode them in every step.
    return kind if kind is None or jax.default_backend() == "cpu" or quant.has_gpu_kernel(kind) else None


def module_of(config: ModelConfig) -> Any:
    """The module of a configuration's family."""
    return importlib.import_module(FAMILIES[config.family], families.__name__)


def sources_of(config: ModelConfig) -> ModelWeights:
    """The sources of all weights of a model."""
    return heads.sources_of(module_of(config), config)


def canonical(family: Any, name: str) -> str:
    """The one name of a tensor, or of a module, that a family knows."""
    return getattr(family, "canonical", str)(wrapper.canonical(name))


def inner(name: str) -> str:
    """A tensor's name where the file was written by the model without its head: `model.` is missing."""
    return f"model.{name}" if name.startswith(("layers.", "embed_tokens.", "norm.")) else name


def left_out(config: ModelConfig, name: str) -> bool:
    """Whether a tensor of the checkpoint is not loaded."""
    ignored = getattr(module_of(config), "ignored", None)
    return wrapper.is_other(name) or (ignored is not None and ignored(name, config))


def log_left_out(names: list[str]) -> None:
    """One line about the tensors that are not loaded, by the places where they are."""
    places = Counter(re.sub(r"^((?:model\.)?(?:layers\.\d+|\w+)).*", r"\1", name) for name in names)
    if places:
        said = ", ".join(f"{place} ({count})" for place, count in sorted(places.items()))
        logging.getLogger("quire").info("tensors that are left out, since text is all that is served: %s", said)


def find_parts(folder: Path, config: ModelConfig) -> tuple[dict[str, Any], Any]:
    """The tensors of a folder by their family's own names, all known, and the parts of each leaf among them."""
    family, file = module_of(config), weights_of(folder)
    tensors = find_tensors(folder) if file is None else gguf.find(file)
    for where, _ in (embedder.read(folder) or embedder.Embedder()).dense:
        tensors |= {f"{where}.{name}": tensor for name, tensor in find_tensors(folder / where).items()}
    tensors = published.gather(tensors, config.stored)
    tensors = {canonical(family, name): tensor for name, tensor in tensors.items()}
    if not config.writes:
        tensors = {inner(name): tensor for name, tensor in tensors.items()}
    parts = jax.tree.map(lambda spec, source: source.found_in(tensors), dense_specs(config), sources_of(config))
    check_tensors(folder, config, tensors, parts)
    if config.tied and config.writes and "lm_head.weight" in tensors:
        check_tied(folder, tensors["lm_head.weight"], tensors[parts.embed_VD[0].name])
    return tensors, parts


def check_tied(folder: Path, head: Tensor, embedding: Tensor) -> None:
    """Refuse a head that is said to be the embedding and is not: to leave it out would change every answer."""
    if head.shape == embedding.shape and all(
        np.array_equal(*(table.cut(row).read().astype(np.float32) for table in (head, embedding)))
        for row in {0, head.shape[0] // 2, head.shape[0] - 1}
    ):
        return
    raise ModelError(
        f"{folder} holds a tensor 'lm_head.weight' that is not its embedding, and config.json says that it is: "
        """tie_word_embeddings is true. To use it: --hf-overrides '{"tie_word_embeddings": false}'"""
    )


def check_codes(dense, specs, parts, tensors: dict[str, Any]) -> None:
    """Refuse a dense matrix where quantization_config says codes: to round it here would be a guess."""

    def check(_, spec, parts):
        for part in () if isinstance(spec, ArraySpec) else parts:
            if not fits(spec, [tensors[part.name]]):
                raise ModelError(
                    f"tensor {part.name!r} is not quantised, and quantization_config.ignore in config.json does not "
                    "name it"
                )

    jax.tree.map(check, dense, specs, parts)


def log_widened(specs, parts, tensors: dict[str, Any], dtype: str) -> None:
    """One line about the matrices that do not stay in their own codes."""
    found: list[str] = []

    def look(spec, parts) -> None:
        if isinstance(spec, ArraySpec):
            found.extend(part.name for part in parts if in_codes(tensors[part.name]))

    jax.tree.map(look, specs, parts, is_leaf=lambda node: isinstance(node, ArraySpec | Rounded | Stack))
    if found:
        logging.getLogger("quire").info(
            "%d quantised matrices are widened to %s, such as %s: no kernel here takes their codes, or not beside "
            "those of the others that they are multiplied with", len(found), dtype, found[0],
        )  # fmt: skip


def in_codes(tensor: Any) -> bool:
    """Whether a tensor of a checkpoint is quantised."""
    return isinstance(tensor, Matrix) or (isinstance(tensor, gguf.Made) and tensor.quantised)


def check_tensors(folder: Path, config: ModelConfig, tensors: dict[str, Tensor], parts) -> None:
    """Every tensor that the model needs is there and has its shape, and there is none that it does not know."""
    known = set()
    for part in jax.tree.leaves(parts):
        if part.name not in tensors:
            raise ModelError(f"{folder} lacks the tensor {part.name!r}")
        if tensors[part.name].shape != part.shape:
            shape = list(tensors[part.name].shape)
            raise ModelError(f"tensor {part.name!r} has shape {shape}; config.json wants {list(part.shape)}")
        known.add(part.name)
    if config.tied:
        known.add("lm_head.weight")
    extra = [name for name in tensors if name not in known and not name.endswith("rotary_emb.inv_freq")]
    if config.stored is not None:  # some tools write a bias of zeros where a model has none
        extra = [name for name in extra if not (name.endswith(".bias") and not tensors[name].read().any())]
    other = [name for name in extra if left_out(config, name)]
    log_left_out(other)
    if extra := sorted({*extra} - {*other}):
        raise ModelError(f"{folder} holds the tensor {extra[0]!r}, which {config.family} models do not have")
