"""The model that drafts in the step, where one does: its configuration, and where its weights come
from.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ..model import draft_heads, partition
from ..model.checkpoint import hub, loader
from ..model.checkpoint.placement import Location, Placement
from ..model.config import ModelConfig, ModelError
from ..model.draft_heads import DraftHeads
from ..model.expert_copies import redundancy_of
from ..model.text.tokenizer import Tokenizer
from ..sharding.mesh import Mesh, stage_meshes
from .api.options import EngineOptions
from .api.speculation import HEADS, SpeculativeConfig
from .device.drafts import DraftModel, StepDrafter, with_layers
from .device.head_drafter import FeatureDrafter, MedusaDrafter

FIELD = "speculative_config"


class DraftSource(NamedTuple):
    """A drafter, and what loads its weights; None: they are a part of the model's."""

    drafter: StepDrafter
    config: ModelConfig  # its own
    load: Callable[[], Any] | None


def draft_source(
    options: EngineOptions,
    folder: Path,
    config: ModelConfig,
    max_len: int,
    mesh: Mesh | None = None,
) -> DraftSource | None:
    """The drafter of an engine whose model is `config` and serves `max_len` positions.

    It is spread over the devices of the mesh as the model is; of several pipeline stages it is on
    the last.
    """
    chosen = options.speculation
    if chosen is None or not chosen.in_step:
        return None
    if options.num_processes > 1:
        raise ModelError(
            f"{FIELD}.method is {chosen.method!r} with num_processes {options.num_processes}: a "
            "drafter that computes is for the devices of one process; use the method ngram or "
            "suffix"
        )
    if config.state_layers and chosen.method == "self":
        raise ModelError(
            f"{FIELD}.method is 'self', and this model has layers that keep a state for each "
            "sequence, which drafts would change; use the method draft_model, ngram or suffix"
        )
    if config.state_layers and len(chosen.paths) > 1:
        raise ModelError(
            f"{FIELD}.speculative_token_tree has {len(chosen.paths)} paths, and this model has "
            "layers that keep a state for each sequence, of which there is one; use "
            "num_speculative_tokens without it"
        )
    last = None if mesh is None else stage_meshes(mesh)[-1]
    if chosen.method == "self":
        return part_of(chosen, options, folder, config, last)
    if chosen.method in HEADS:
        return heads_on(chosen, options, folder, config, max_len, last)
    return other_model(chosen, options, folder, config, max_len, last)


def check_split(own: ModelConfig, chosen: SpeculativeConfig, mesh: Mesh | None) -> None:
    """Refuse a drafter that the devices cannot share."""
    if mesh is None:
        return
    expert = mesh.shape["expert"] if own.experts else 1  # without experts each device has the whole
    try:
        partition.check(
            own, mesh.shape["tensor"], expert, 1, mesh.shape["data"], mesh.shape["context"]
        )
    except ModelError as error:
        raise ModelError(
            f"{FIELD}.{chosen.method}: the drafter cannot be spread over these devices: {error}"
        ) from None


def part_of(
    chosen: SpeculativeConfig,
    options: EngineOptions,
    folder: Path,
    config: ModelConfig,
    mesh: Mesh | None,
) -> DraftSource:
    """The model itself, with fewer layers or bits; it reads the keys and values of the whole."""
    if options.pipeline_parallel_size > 1:
        raise ModelError(
            f"{FIELD}.method is 'self' with pipeline_parallel_size "
            f"{options.pipeline_parallel_size}: the first layers are on other devices than the "
            "last, which draw; use the method draft_model, ngram or suffix"
        )
    count = len(config.layers) if chosen.num_layers is None else chosen.num_layers
    if count > len(config.layers) or (count == len(config.layers) and chosen.quantization is None):
        raise ModelError(
            f"{FIELD}.num_layers is {count}; the model has {len(config.layers)} layers, and fewer "
            "of them must draft"
        )
    own = config
    load = None
    if chosen.quantization is not None:
        own = loader.read_config(
            folder,
            config.dtype,
            config.max_len,
            chosen.quantization,
            options.kv_cache_dtype,
            options.hf_overrides,
        )
        own = replace(own, activation_dtype=config.activation_dtype)
        check_split(own, chosen, mesh)
        load = partial(first_layers, folder, own, count, options, mesh)
    own = replace(own, layers=own.layers[:count])
    return DraftSource(DraftModel(own, config, 0), own, load)


def first_layers(
    folder: Path, config: ModelConfig, count: int, options: EngineOptions, mesh: Mesh | None
) -> Any:
    load_format = options.load_format
    cached = options.weight_cache
    weights = loader.load(folder, config, Placement(mesh), load_format=load_format, cached=cached)
    return weights.replace(layers=weights.layers[:count])


def other_model(
    chosen: SpeculativeConfig,
    options: EngineOptions,
    folder: Path,
    config: ModelConfig,
    max_len: int,
    mesh: Mesh | None,
) -> DraftSource:
    """A smaller model with the same tokenizer."""
    own_folder = draft_folder(chosen, options)
    own = loader.read_config(
        own_folder, config.dtype, None, chosen.quantization, options.kv_cache_dtype
    )
    own = replace(own, activation_dtype=config.activation_dtype)
    check_pages(own, config, max_len)
    tokens = Tokenizer(Path(options.tokenizer or folder)).get_vocab()
    theirs = Tokenizer(own_folder).get_vocab()
    if tokens != theirs:
        different = sum(theirs.get(token) != number for token, number in tokens.items())
        raise ModelError(
            f"{FIELD}.model has another vocabulary: {different} of {len(tokens)} tokens have "
            "another number there, or none; a drafter must have the model's own tokenizer"
        )
    check_split(own, chosen, mesh)
    how = {"load_format": options.load_format, "cached": options.weight_cache}
    load = partial(loader.load, own_folder, own, Placement(mesh), **how)
    return DraftSource(DraftModel(own, with_layers(config, own), len(config.layers)), own, load)


def heads_on(
    chosen: SpeculativeConfig,
    options: EngineOptions,
    folder: Path,
    config: ModelConfig,
    max_len: int,
    mesh: Mesh | None,
) -> DraftSource:
    """Heads that were trained for the model, from a folder of their own or its own."""
    if options.pipeline_parallel_size > 1:
        raise ModelError(
            f"{FIELD}.method is {chosen.method!r} with pipeline_parallel_size "
            f"{options.pipeline_parallel_size}: heads draft with tables of both ends of the model; "
            "use the method draft_model, ngram or suffix"
        )
    if options.weights_host_bytes is not None:
        raise ModelError(
            f"{FIELD}.method is {chosen.method!r}, and weights_host_bytes is given: heads draft "
            "with the model's own tables, which must be on the device; use the method "
            "draft_model, ngram or suffix"
        )
    own_folder = folder if chosen.model is None else draft_folder(chosen, options)
    heads = draft_heads.read_heads(own_folder, config, chosen.method)
    if redundancy_of(heads.model):
        raise ModelError(
            f"{FIELD}.method is {chosen.method!r} with expert_redundancy: its experts have one "
            "copy each"
        )
    load = partial(load_heads, own_folder, heads, options.load_format, mesh)
    if chosen.method == "medusa":
        if heads.count < chosen.depth:
            what = (
                "num_speculative_tokens is"
                if len(chosen.paths) == 1
                else "speculative_token_tree has the depth"
            )
            raise ModelError(
                f"{FIELD}.{what} {chosen.depth}, and {FIELD}.model has "
                f"{heads.count} heads, each of which drafts one token; use {heads.count} or less"
            )
        return DraftSource(MedusaDrafter(heads, config, chosen.paths), heads.model, load)
    check_pages(heads.model, config, max_len)
    check_split(heads.model, chosen, mesh)
    drafter = FeatureDrafter(
        heads, with_layers(config, heads.model), len(config.layers), chosen.paths
    )
    return DraftSource(drafter, heads.model, load)


def load_heads(folder: Path, heads: DraftHeads, load_format: str, mesh: Mesh | None) -> Any:
    """Their weights.

    On several devices layers are split as the model's, and each has the whole of the rest.
    """
    if load_format == "dummy":
        weights = loader.random_weights(draft_heads.abstract(heads))
    else:
        weights = draft_heads.load(folder, heads, skip_packing=mesh is not None)
    if mesh is None:
        return weights
    place = Location(mesh)
    whole = NamedSharding(mesh, P())
    layers = jax.tree.map(
        lambda spec, leaf: place.shard(spec, np.asarray(leaf)),
        draft_heads.abstract(heads).layers,
        weights.layers,
    )
    return jax.device_put(weights.replace(layers=()), whole).replace(layers=layers)


def check_pages(own: ModelConfig, config: ModelConfig, max_len: int) -> None:
    """Refuse a drafter whose keys and values have no place beside the model's."""
    if own.max_len < max_len:
        raise ModelError(
            f"{FIELD}.model was made for {own.max_len} positions, and max_model_len is {max_len}; "
            f"use --max-model-len {own.max_len} or less"
        )
    if own.state_layers:
        raise ModelError(
            f"{FIELD}.model has layers that keep a state for each sequence, which drafts would "
            "change; use a model whose layers all have attention"
        )
    if others := [window for window in own.windows if window not in config.windows]:
        kind = "without a window" if others[0] is None else f"with a window of {others[0]}"
        raise ModelError(
            f"{FIELD}.model has layers {kind}, which the model itself has not: they would need "
            "pages of their own"
        )


def draft_folder(chosen: SpeculativeConfig, options: EngineOptions) -> Path:
    return hub.resolve(chosen.model, hub.FILES, chosen.revision, options.download_dir)
