"""The model that drafts in the step, where one does: its configuration, and where its weights come from."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..model import draft_heads
from ..model.checkpoint import hub, loader
from ..model.checkpoint.placement import Placement
from ..model.config import ModelConfig, ModelError
from ..model.text.tokenizer import Tokenizer
from .api.options import PARALLEL, EngineOptions
from .api.speculation import HEADS, SpeculativeConfig
from .device.drafts import DraftModel, StepDrafter, with_layers
from .device.head_drafter import FeatureDrafter, MedusaDrafter

FIELD = "speculative_config"


class DraftSource(NamedTuple):
    """A drafter, and what loads its weights; None: they are a part of the model's."""

    drafter: StepDrafter
    config: ModelConfig  # its own
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
    if chosen.method in HEADS:
        return heads_on(chosen, options, folder, config, max_len)
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
    return DraftSource(DraftModel(own, config, 0), own, load)


def first_layers(folder: Path, config: ModelConfig, count: int, load_format: str) -> Any:
    weights = loader.load(folder, config, Placement(), load_format=load_format)
    return weights.replace(layers=weights.layers[:count])


def other_model(
    chosen: SpeculativeConfig, options: EngineOptions, folder: Path, config: ModelConfig, max_len: int
) -> DraftSource:
    """A smaller model with the same tokenizer."""
    own_folder = draft_folder(chosen, options)
    own = loader.read_config(own_folder, config.dtype, None, chosen.quantization, options.kv_cache_dtype)
    check_pages(own, config, max_len)
    tokens = Tokenizer(Path(options.tokenizer or folder)).get_vocab()
    theirs = Tokenizer(own_folder).get_vocab()
    if tokens != theirs:
        different = sum(theirs.get(token) != number for token, number in tokens.items())
        raise ModelError(
            f"{FIELD}.model has another vocabulary: {different} of {len(tokens)} tokens have another number there, "
            "or none; a drafter must have the model's own tokenizer"
        )
    load = partial(loader.load, own_folder, own, Placement(), load_format=options.load_format)
    return DraftSource(DraftModel(own, with_layers(config, own), len(config.layers)), own, load)


def heads_on(
    chosen: SpeculativeConfig, options: EngineOptions, folder: Path, config: ModelConfig, max_len: int
) -> DraftSource:
    """Heads that were trained for the model, from a folder of their own or its own."""
    own_folder = folder if chosen.model is None else draft_folder(chosen, options)
    heads = draft_heads.read_heads(own_folder, config, chosen.method)
    if options.load_format == "dummy":
        load = partial(loader.draw, draft_heads.abstract(heads))
    else:
        load = partial(draft_heads.load, own_folder, heads)
    if chosen.method == "medusa":
        if heads.count < chosen.num_speculative_tokens:
            raise ModelError(
                f"{FIELD}.num_speculative_tokens is {chosen.num_speculative_tokens}, and {FIELD}.model has "
                f"{heads.count} heads, each of which drafts one token; use {heads.count} or less"
            )
        return DraftSource(MedusaDrafter(heads, config), heads.model, load)
    check_pages(heads.model, config, max_len)
    drafter = FeatureDrafter(heads, with_layers(config, heads.model), len(config.layers))
    return DraftSource(drafter, heads.model, load)


def check_pages(own: ModelConfig, config: ModelConfig, max_len: int) -> None:
    """Refuse a drafter whose keys and values have no place beside the model's."""
    if own.max_len < max_len:
        raise ModelError(
            f"{FIELD}.model was made for {own.max_len} positions, and max_model_len is {max_len}; use --max-model-len "
            f"{own.max_len} or less"
        )
    if others := [window for window in own.windows if window not in config.windows]:
        kind = "without a window" if others[0] is None else f"with a window of {others[0]}"
        raise ModelError(
            f"{FIELD}.model has layers {kind}, which the model itself has not: they would need pages of their own"
        )


def draft_folder(chosen: SpeculativeConfig, options: EngineOptions) -> Path:
    return hub.resolve(chosen.model, hub.FILES, chosen.revision, options.download_dir)
