"""Load a model folder (safetensors, GGUF or orbax) into a `ModelConfig` and its weights."""

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
from .expert_stacks import local_experts, read_stack
from .folder import read_config_json
from .gguf_folder import FILE_FORMAT, find_gguf
from .parallel import run_in_parallel
from .placement import Location, Placement, add_tied_head
from .published import gguf
from .published.matrix import Matrix, can_hold_codes, read_node
from .safetensors import Tensor, find_tensors
from .weight_cache import WeightCache

LIMITS = {
    "_layers": 1 << 12,
    "head_dim": 1 << 14,
    "hidden_size": 1 << 20,
    "experts": 1 << 14,
    "": 1 << 40,
}


def family_for(hf: dict) -> Any:
    """The family module for a config.json."""
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        reason = f": {UNSUPPORTED[kind]}" if isinstance(kind, str) and kind in UNSUPPORTED else ""
        raise ModelError(
            f"model type {kind!r} is not supported{reason}; supported are "
            f"{', '.join(sorted(FAMILIES))}"
        )
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
    """Read the `ModelConfig` of a folder; the arguments override what the checkpoint says."""
    embedding_spec = embedder.read(folder)
    embeds = embedding_spec is not None and not embedding_spec.is_reranker
    hf = published.add_side_config(folder, read_config_json(folder, hf_overrides, embeds))
    check_numbers(hf)
    hf, stored = published.split_quantization(hf)
    file_format = hf.pop(FILE_FORMAT, None)
    token_classes = reranker.token_score_classes(folder, hf)
    hf = {name: value for name, value in hf.items() if name not in reranker.KEYS}
    try:
        config = family_for(hf).config(hf, max_len)
    except ModelError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"{folder / 'config.json'} holds a value of the wrong kind: {error}"
        ) from error
    classes = token_classes or reranker.reward_classes(folder, hf) or heads.read_classes(hf)
    if token_classes is not None:
        classes = replace(token_classes, own_head=not config.tied)
        heads.check_class_tokens(config, classes)
    if embeds or classes is not None:
        # The vocabulary head is not loaded.
        config = replace(config, writes=False, classes=classes, tied=True, head_bias=False)
    if embedding_spec is not None and embedding_spec.dense and not config.encodes:
        raise ModelError(
            f"{folder / embedder.MODULES} names Dense behind a decoder, which is not supported"
        )
    if config.encodes:
        config = add_encoder_output(config, hf, embedding_spec or embedder.Embedder(pooling="mean"))
    check_fields(config)
    dtype = compute_dtype(dtype, config.dtype)
    if kv_cache_dtype not in CACHES:
        raise ModelError(f"kv_cache_dtype is {kv_cache_dtype!r}; it can be {', '.join(CACHES)}")
    quant = choose_format(config, quantization, stored)
    skips = skipped_layers(config, kv_cache_dtype_skip_layers)
    return replace(
        config,
        dtype=dtype,
        quant=quant,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_skips=skips,
        stored=stored,
        file_format=file_format if quantization is None else None,
    )


def add_encoder_output(
    config: ModelConfig, hf: dict, embedding_spec: embedder.Embedder
) -> ModelConfig:
    """Add the output of an encoder: a pooled vector as the folder says, or the family's classes."""
    config = replace(config, writes=False, tied=True)
    if config.classes is None:
        return replace(
            config,
            pooling=embedding_spec.pooling,
            head=tuple(dense for _, dense in embedding_spec.dense),
        )
    class_head = getattr(
        importlib.import_module(FAMILIES[config.family], families.__name__), "class_head", None
    )
    if class_head is None:
        raise ModelError(f"classes of models of the family {config.family} are not supported")
    pooling, head, name = class_head(hf, config)
    return replace(
        config, pooling=pooling, head=head, classes=replace(config.classes, bias=True, name=name)
    )


def compute_dtype(requested: str, stored: str) -> str:
    """The dtype to compute in: bfloat16 in place of float16, which would overflow."""
    dtype = {"auto": stored, "half": "float16", "float": "float32"}.get(requested, requested)
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ModelError(f"dtype is {requested!r}; it can be auto, float32, bfloat16 or float16")
    if dtype != "float16":
        return dtype
    if requested != "auto":
        warn_of_float16(requested)
    return "bfloat16"


@cache
def warn_of_float16(requested: str) -> None:
    logging.getLogger("quire").warning(
        "dtype is %s: computed in bfloat16, since float16 overflows; float32 keeps every bit of "
        "float16 weights",
        requested,
    )


def choose_format(
    config: ModelConfig, requested: str | None, stored: StoredFormat | None
) -> str | None:
    """The weight format: the checkpoint's, which cannot be overridden, or the requested one."""
    try:
        format_name = None if requested is None else quant.check(requested)
        if stored is not None and stored.quant is not None:
            if format_name and quant.example(format_name) != quant.example(stored.quant):
                raise ModelError(
                    f"quantization is {requested!r}, and the checkpoint is quantised already, as "
                    f"{stored.quant!r}; leave --quantization out, or give the checkpoint that it "
                    "was made from"
                )
            format_name = stored.quant
        if format_name is not None:
            # Rejects sizes that the format cannot hold.
            abstract(replace(config, quant=format_name))
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(str(error)) from None
    return format_name


def check_numbers(value: Any, name: str = "") -> None:
    """Reject numbers beyond any model's, before an array of that size is allocated."""
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
    """Reject a configuration whose fields are not of their declared types."""
    for field in fields(node):
        value = getattr(node, field.name)
        kinds = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
        if float in kinds and type(value) is int:
            value = float(value)
        if type(value) not in [get_origin(kind) or kind for kind in kinds]:
            raise ModelError(
                f"config.json makes {field.name} = {value!r:.80}; it must be "
                f"{describe_kinds(kinds)}"
            )
        if (type(value) is int and value < 0) or (
            type(value) is float and not math.isfinite(value)
        ):
            raise ModelError(
                f"config.json makes {field.name} = {value!r:.80}; it must be finite and not "
                "negative"
            )
        for item in set(value) if isinstance(value, tuple) else {value}:
            if is_dataclass(item):
                check_fields(item)


def describe_kinds(kinds) -> str:
    """The types of a field, for an error message."""
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        NoneType: "null",
    }
    return " or ".join(words.get(kind, "a part of the model") for kind in kinds)


def load(
    folder: Path,
    config: ModelConfig,
    placement: Placement = Placement(),  # noqa: B008 - it is frozen
    progress: Callable[[int], None] = lambda count: None,
    skip_packing: bool = False,
    load_format: str = "auto",
    cached: bool = False,
) -> ModelWeights:
    """Load the weights of a folder, sharded over the placement's mesh if it has one.

    Args:
        progress: called with the bytes of each array that was read.
        skip_packing: do not pack weights for the kernels (to write them again).
        load_format: `dummy` makes random weights.
        cached: keep packed weights on disk for the next start.
    """
    specs = weight_specs(config)
    if placement.mesh is not None:
        try:
            shardings(specs, placement.mesh)
        except ValueError as error:
            raise ModelError(f"{folder} does not fit the mesh: {error}") from None
    for_kernels = placement.mesh is None and not skip_packing and native.serves()
    place = partial(put_packed, rows=config.rows) if for_kernels else put_unpacked
    dummy = load_format == "dummy"
    converted = orbax.holds_weights(folder)
    if converted and load_format == "safetensors":
        raise ModelError(
            f"load_format is 'safetensors', and {folder} is a converted checkpoint; leave it out"
        )
    if not converted and not dummy:
        weight_cache = None
        if cached and for_kernels and not placement.on_host:
            # max_len changes no weight.
            weight_cache = WeightCache.for_folder(folder, replace(config, max_len=0))
        return load_weights(folder, config, place, progress, placement, weight_cache)
    if placement.mesh is not None:
        locations = array_locations(placement, config, specs)
        weights = (
            random_weights(specs, locations)
            if dummy
            else orbax.load_weights(folder, specs, progress, locations)
        )
        return add_tied_head(weights, config, placement)
    weights = random_weights(specs) if dummy else orbax.load_weights(folder, specs, progress)
    if not for_kernels and not placement.on_host:
        return weights

    def move(location: Location, dense, leaf):
        return location.move_to_memory(place(dense, jax.tree.map(np.asarray, leaf)))

    dense = dense_specs(config)
    return jax.tree.map(move, placement.location_per_leaf(config, dense), dense, weights)


def random_weights(specs: Any, locations: Any = None) -> Any:
    """Random weights for a tree of specs, one array at a time; over a mesh, each as its location
    says.
    """
    seeds = itertools.count()
    on_device = jax.default_backend() != "cpu"

    def make_leaf(spec: ArraySpec, location: Location | None = None):
        leaf = random_arrays(spec, next(seeds), on_device)
        return leaf if location is None else location.shard(spec, np.asarray(leaf))

    return jax.tree.map(make_leaf, specs, *([] if locations is None else [locations]))


def put_unpacked(dense: ArraySpec, leaf):
    """Put a leaf on the device without packing it."""
    return jax.device_put(leaf)


def put_packed(dense: ArraySpec, leaf, rows: str):
    """Put a leaf on the device, packed for the kernels that take activations of type `rows`."""
    return jax.device_put(pack(dense, leaf, rows))


def load_weights(
    folder: Path,
    config: ModelConfig,
    place: Callable[[ArraySpec, Any], Any] = put_unpacked,
    progress: Callable[[int], None] = lambda count: None,
    placement: Placement = Placement(),  # noqa: B008 - it is frozen
    weight_cache: WeightCache | None = None,
) -> ModelWeights:
    """Load weights from safetensors or GGUF, or from the cache of packed weights.

    Args:
        place: places a leaf, given the spec of its dense form; only used without a mesh.
        progress: called with the bytes of each array that was read.
    """
    dense = dense_specs(config)
    specs = weight_specs(config)
    lock = Lock()
    # A location for each leaf, and one for each quantised node.
    locations, tree = jax.tree.flatten(placement.location_per_leaf(config, dense))
    if weight_cache is not None and (cached_leaves := weight_cache.read()) is not None:
        progress(nbytes(cached_leaves))
        return tree.unflatten(cached_leaves)
    tensors, sources = find_sources(folder, config)
    log_dequantised(specs, sources, tensors, config.dtype)
    if config.stored is not None and config.stored.quant is not None:
        check_quantised(dense.layers, specs.layers, sources.layers, tensors)

    def report(count: int) -> None:
        with lock:
            progress(count)

    def read_array(location: Location, spec: ArraySpec, sources, read_all: bool = False):
        needed = (
            None
            if read_all or location.mesh is None
            else local_shards.local_elements(spec, location.mesh)
        )
        leaf = read_leaf(spec, sources, tensors, needed)
        report(leaf.nbytes)
        return leaf

    def read(location: Location, dense, spec, sources):
        if isinstance(spec, Stack):
            return read_stack(
                dense, spec, sources, tensors, local_experts(dense, location.mesh), report
            )
        if not isinstance(spec, Rounded):  # an array, or a node whose arrays have their own sources
            return jax.tree.map(partial(read_array, location), spec, sources)
        if can_hold_codes(spec, [tensors[source.name] for source in sources]):
            leaf = read_node(spec, sources, tensors)
            report(nbytes(leaf))
            return leaf
        leaf = read_array(location, dense, sources, read_all=True)
        return spec.quantize(np.moveaxis(leaf, spec.inputs, range(len(spec.inputs))))

    def read_and_put(location: Location, dense, spec, sources):
        leaf = read(location, dense, spec, sources)
        placed = (
            location.move_to_memory(place(dense, leaf))
            if location.mesh is None
            else location.shard(spec, leaf)
        )
        return jax.block_until_ready(placed)  # else two leaves would be in memory during the copy

    dense_leaves, *spec_and_source_leaves = map(tree.flatten_up_to, (dense, specs, sources))
    arguments = zip(locations, dense_leaves, *spec_and_source_leaves, strict=True)
    tasks = [partial(read_and_put, *leaf_arguments) for leaf_arguments in arguments]
    if placement.mesh is None:
        leaves = run_in_parallel(tasks, [nbytes(leaf) for leaf in dense_leaves])
        if weight_cache is not None:
            weight_cache.write_soon(leaves)
    else:
        leaves = [work() for work in tasks]  # in the same order on all processes of a mesh
    return add_tied_head(tree.unflatten(leaves), config, placement)


def array_locations(placement: Placement, config: ModelConfig, specs: ModelWeights) -> ModelWeights:
    """The location of every array, including those inside quantised nodes."""
    return jax.tree.map(
        lambda location, node: jax.tree.map(lambda _: location, node),
        placement.location_per_leaf(config, specs),
        specs,
    )


def weight_specs(config: ModelConfig) -> ModelWeights:
    """The specs of a checkpoint's weights: `abstract(config)`, except matrices stored dense."""
    specs = abstract(config)
    if config.stored is None or config.stored.quant is None:
        return specs
    family = family_module(config)
    dense = dense_specs(config)
    stored = config.stored.renamed(partial(canonical_name, family))

    def choose(dense_spec: ArraySpec, spec, source):
        if isinstance(spec, ArraySpec):
            return spec
        kind = weight_format(stored, source, dense_spec)
        return (quant.stacked if dense_spec.stacked else quant.packed)(kind, dense_spec)

    sources = family.sources(config)
    specs = specs.replace(layers=jax.tree.map(choose, dense.layers, specs.layers, sources.layers))
    if stored.rounds_head:
        return specs
    head = "embed_VD" if config.tied else "head_VD"
    tables = {"embed_VD": dense.embed_VD, "head_VD": dense.head_VD}
    for name in {head, "embed_VD"} if stored.names_all_modules else {head}:
        table = replace(tables[name], inputs=(1,))  # a row shares its scales, as an output does
        kind = weight_format(stored, getattr(sources, name), table)
        if kind is not None:
            tables[name] = quant.packed(kind, table)
    return specs.replace(**tables)


def weight_format(stored: StoredFormat, source, dense: ArraySpec) -> str | None:
    """The format of a weight that is made of a checkpoint's matrices; None if it is dense.

    If no format holds the values of all matrices, or one is dense, the weight is dequantised.
    """
    groups = {
        stored.group_of(source_tensor.name.removesuffix(".weight"))
        for source_tensor in source.parts
    }
    inputs = math.prod(dense.shape[axis] for axis in dense.inputs)
    kind = quant.common_format(
        {None if group is None or inputs % group.multiple else group.quant for group in groups}
    )
    # Other backends without a kernel for the format would dequantise it in every step.
    return (
        kind
        if kind is None or jax.default_backend() == "cpu" or quant.has_gpu_kernel(kind)
        else None
    )


def family_module(config: ModelConfig) -> Any:
    """The family module for a configuration."""
    return importlib.import_module(FAMILIES[config.family], families.__name__)


def weight_sources(config: ModelConfig) -> ModelWeights:
    """The sources of all weights of a model."""
    return heads.weight_sources(family_module(config), config)


def canonical_name(family: Any, name: str) -> str:
    """The name of a tensor or module after the wrapper's and the family's renaming."""
    return getattr(family, "canonical", str)(wrapper.canonical(name))


def with_model_prefix(name: str) -> str:
    """A tensor's name with the prefix `model.`, which files of headless models lack."""
    return f"model.{name}" if name.startswith(("layers.", "embed_tokens.", "norm.")) else name


def is_ignored(config: ModelConfig, name: str) -> bool:
    """Whether a tensor of the checkpoint is not loaded."""
    ignored = getattr(family_module(config), "ignored", None)
    return wrapper.is_other(name) or (ignored is not None and ignored(name, config))


def log_ignored(names: list[str]) -> None:
    """Log how many tensors are not loaded, by module."""
    counts_by_module = Counter(
        re.sub(r"^((?:model\.)?(?:layers\.\d+|\w+)).*", r"\1", name) for name in names
    )
    if counts_by_module:
        counts = ", ".join(
            f"{place} ({count})" for place, count in sorted(counts_by_module.items())
        )
        logging.getLogger("quire").info("tensors that are not part of the text model: %s", counts)


def find_sources(folder: Path, config: ModelConfig) -> tuple[dict[str, Any], Any]:
    """The tensors of a folder by canonical name, checked, and the sources of each leaf."""
    family = family_module(config)
    file = find_gguf(folder)
    tensors: dict[str, Any] = find_tensors(folder) if file is None else gguf.find_tensors(file)
    for dense_folder, _ in (embedder.read(folder) or embedder.Embedder()).dense:
        tensors |= {
            f"{dense_folder}.{name}": tensor
            for name, tensor in find_tensors(folder / dense_folder).items()
        }
    tensors = published.gather(tensors, config.stored)
    tensors = {canonical_name(family, name): tensor for name, tensor in tensors.items()}
    if not config.writes:
        tensors = {with_model_prefix(name): tensor for name, tensor in tensors.items()}
    sources = jax.tree.map(
        lambda spec, source: source.found_in(tensors), dense_specs(config), weight_sources(config)
    )
    check_tensors(folder, config, tensors, sources)
    if config.tied and config.writes and "lm_head.weight" in tensors:
        check_tied(folder, tensors["lm_head.weight"], tensors[sources.embed_VD[0].name])
    return tensors, sources


def check_tied(folder: Path, head: Tensor | Matrix, embedding: Tensor) -> None:
    """Reject a head that differs from the embedding where config.json ties them."""
    if (
        not isinstance(head, Matrix)
        and head.shape == embedding.shape
        and all(
            np.array_equal(
                head.cut(row).read().astype(np.float32),
                embedding.cut(row).read().astype(np.float32),
            )
            for row in {0, head.shape[0] // 2, head.shape[0] - 1}
        )
    ):
        return
    raise ModelError(
        f"{folder} holds a tensor 'lm_head.weight' that is not its embedding, and config.json says that it is: "
        """tie_word_embeddings is true. To use it: --hf-overrides '{"tie_word_embeddings": false}'"""
    )


def check_quantised(dense, specs, sources, tensors: dict[str, Any]) -> None:
    """Reject a dense matrix that quantization_config lists as quantised."""

    def check(_, spec, sources):
        for source in () if isinstance(spec, ArraySpec) else sources:
            if not can_hold_codes(spec, [tensors[source.name]]):
                raise ModelError(
                    f"tensor {source.name!r} is not quantised, and quantization_config.ignore in "
                    "config.json does not name it"
                )

    jax.tree.map(check, dense, specs, sources)


def log_dequantised(specs, sources, tensors: dict[str, Any], dtype: str) -> None:
    """Log the quantised matrices that are loaded dequantised."""
    names: list[str] = []

    def collect(spec, sources) -> None:
        if isinstance(spec, ArraySpec):
            names.extend(source.name for source in sources if is_quantised(tensors[source.name]))

    jax.tree.map(
        collect, specs, sources, is_leaf=lambda node: isinstance(node, ArraySpec | Rounded | Stack)
    )
    if names:
        logging.getLogger("quire").info(
            "%d quantised matrices are dequantised to %s, such as %s: no kernel here takes their "
            "format, or they are multiplied together with matrices of another format",
            len(names),
            dtype,
            names[0],
        )


def is_quantised(tensor: Any) -> bool:
    """Whether a tensor of a checkpoint is quantised."""
    return isinstance(tensor, Matrix) or (
        isinstance(tensor, gguf.AssembledTensor) and tensor.quantised
    )


def check_tensors(folder: Path, config: ModelConfig, tensors: dict[str, Tensor], sources) -> None:
    """Check that the checkpoint has exactly the tensors that the model needs, in their shapes."""
    known_names = set()
    for source in jax.tree.leaves(sources):
        if source.name not in tensors:
            raise ModelError(f"{folder} lacks the tensor {source.name!r}")
        if tensors[source.name].shape != source.shape:
            shape = list(tensors[source.name].shape)
            raise ModelError(
                f"tensor {source.name!r} has shape {shape}; config.json wants {list(source.shape)}"
            )
        known_names.add(source.name)
    if config.tied:
        known_names.add("lm_head.weight")
    extra = [
        name
        for name in tensors
        if name not in known_names and not name.endswith("rotary_emb.inv_freq")
    ]
    if config.stored is not None:  # some quantisers write zero biases where a model has none
        extra = [
            name
            for name in extra
            if not (name.endswith(".bias") and not tensors[name].read().any())
        ]
    ignored = [name for name in extra if is_ignored(config, name)]
    log_ignored(ignored)
    if extra := sorted({*extra} - {*ignored}):
        raise ModelError(
            f"{folder} holds the tensor {extra[0]!r}, which {config.family} models do not have"
        )
