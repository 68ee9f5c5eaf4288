"""The model that drafts in the step, where one does: its configuration, and where its weights come from."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..model.checkpoint import hub, loader
from ..model.checkpoint.placement import Placement
from ..model.config import ModelConfig, ModelError
from ..model.text.tokenizer import Tokenizer
from .api.options import PARALLEL, EngineOptions
from .api.speculation import SpeculativeConfig
from .device.drafts import DraftModel, with_layers

FIELD = "speculative_config"


class DraftSource(NamedTuple):
    """A drafter, and what loads its weights; None: they are a part of the model's."""

    drafter: DraftModel
    load: Callable[[], Any] | None


def draft_source(options: EngineOptions, folder: Path, config: ModelConfig, max_len: int) -> DraftSource | None:
    """The drafter of an engine whose model is `config` and serves `max_len` positions."""
    chosen = options.speculation
    if chosen is None or not chosen.in_step:
        return None
    for name in (*PARALLEL.values(), "num_processes"):
        if getattr(options, name) > 1:
            raise ModelError(
                f"{FIELD}.method is {chosen.method!r} with {name} {getattr(options, name)}: a model that drafts is on "
                "one device; use the method ngram or suffix"
            )
    if options.weights_host_bytes is not None:
        raise ModelError(f"{FIELD}.method is {chosen.method!r}, and weights_host_bytes is given: use ngram or suffix")
    if chosen.method == "self":
        return part_of(chosen, options, folder, config)
    return other_model(chosen, options, folder, config, max_len)


def part_of(chosen: SpeculativeConfig, options: EngineOptions, folder: Path, config: ModelConfig) -> DraftSource:
    """The model itself, with fewer layers or bits; it reads the keys and values of the whole."""
    count = len(config.layers) if chosen.num_layers is None else chosen.num_layers
    if count > len(config.layers) or (count == len(config.layers) and chosen.quantization is None):
        raise ModelError(
            f"{FIELD}.num_layers is {count}; the model has {len(config.layers)} layers, and fewer of them must draft"
        )
    own, load = config, None
    if chosen.quantization is not None:
        own = loader.read_config(
            folder, config.dtype, config.max_len, chosen.quantization, options.kv_cache_dtype, options.hf_overrides
        )
        load = partial(first_layers, folder, own, count, options.load_format)
    own = replace(own, layers=own.layers[:count])
    return DraftSource(DraftModel(own, config, 0), load)


def first_layers(folder: Path, config: ModelConfig, count: int, load_format: str) -> Any:
    weights = loader.load(folder, config, Placement(), load_format=load_format)
    return weights.replace(layers=weights.layers[:count])


def other_model(
    chosen: SpeculativeConfig, options: EngineOptions, folder: Path, config: ModelConfig, max_len: int
) -> DraftSource:
    """A smaller model with the same tokenizer."""
    own_folder = draft_folder(chosen, options)
    own = loader.read_config(own_folder, config.dtype, None, chosen.quantization, options.kv_cache_dtype)
    if own.max_len < max_len:
        raise ModelError(
            f"{FIELD}.model was made for {own.max_len} positions, and max_model_len is {max_len}; use --max-model-len "
            f"{own.max_len} or less"
        )
    if others := [window for window in own.windows if window not in config.windows]:
        raise ModelError(
            f"{FIELD}.model has layers with a window of {others[0]}, which the model itself has not: they would need "
            "pages of their own"
        )
    tokens = Tokenizer(Path(options.tokenizer or folder)).get_vocab()
    theirs = Tokenizer(own_folder).get_vocab()
    if tokens != theirs:
        different = sum(theirs.get(token) != number for token, number in tokens.items())
        raise ModelError(
            f"{FIELD}.model has another vocabulary: {different} of {len(tokens)} tokens have another number there, "
            "or none; a drafter must have the model's own tokenizer"
        )
    load = partial(loader.load, own_folder, own, Placement(), load_format=options.load_format)
    return DraftSource(DraftModel(own, with_layers(config, own), len(config.layers)), load)


def draft_folder(chosen: SpeculativeConfig, options: EngineOptions) -> Path:
    return hub.resolve(chosen.model, hub.FILES, chosen.revision, options.download_dir)
