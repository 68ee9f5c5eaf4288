"""The method `self`: the target's first layers, or its weights in fewer bits."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ....model.checkpoint import loader
from ....model.checkpoint.placement import Placement
from ....model.config import ModelConfig, ModelError
from ....sharding.mesh import Mesh
from ...api.options import EngineOptions
from ...device.state import State
from .draft_model import DraftModel
from .drafting import SpeculativeWeights, TargetStep
from .loading import FIELD, DrafterContext, DraftSource, check_partition


class TargetLayers(DraftModel):
    """Drafts with the target's own keys and values, which the target has written."""

    can_prefill_later = False

    def model_weights(self, weights: SpeculativeWeights) -> Any:
        if weights.drafter is not None:
            return weights.drafter
        return weights.model.replace(layers=weights.model.layers[: len(self.config.layers)])

    def prefill(
        self, weights: SpeculativeWeights, state: State, target: TargetStep
    ) -> tuple[Any, State]:
        return (), state


def load_drafter(context: DrafterContext) -> DraftSource:
    config = context.config
    options = context.options
    speculation = context.speculation
    if config.state_layers:
        raise ModelError(
            f"{FIELD}.method is 'self', and this model has layers that keep a state for each "
            "sequence, which drafts would change; use the method draft_model, ngram or suffix"
        )
    if options.pipeline_parallel_size > 1:
        raise ModelError(
            f"{FIELD}.method is 'self' with pipeline_parallel_size "
            f"{options.pipeline_parallel_size}: the first layers are on other devices than the "
            "last, which draw; use the method draft_model, ngram or suffix"
        )
    num_layers = len(config.layers) if speculation.num_layers is None else speculation.num_layers
    if num_layers > len(config.layers) or (
        num_layers == len(config.layers) and speculation.quantization is None
    ):
        raise ModelError(
            f"{FIELD}.num_layers is {num_layers}; the model has {len(config.layers)} layers, and "
            "fewer of them must draft"
        )
    draft_config = config
    load = None
    if speculation.quantization is not None:
        draft_config = loader.read_config(
            context.folder,
            config.dtype,
            config.max_len,
            speculation.quantization,
            options.kv_cache_dtype,
            options.hf_overrides,
        )
        draft_config = replace(draft_config, activation_dtype=config.activation_dtype)
        check_partition(draft_config, speculation, context.mesh)
        load = partial(load_layers, context.folder, draft_config, num_layers, options, context.mesh)
    draft_config = replace(draft_config, layers=draft_config.layers[:num_layers])
    return DraftSource(TargetLayers(draft_config, config, 0), draft_config, load)


def load_layers(
    folder: Path, config: ModelConfig, num_layers: int, options: EngineOptions, mesh: Mesh | None
) -> Any:
    weights = loader.load(
        folder,
        config,
        Placement(mesh),
        load_format=options.load_format,
        cached=options.weight_cache,
    )
    return weights.replace(layers=weights.layers[:num_layers])
