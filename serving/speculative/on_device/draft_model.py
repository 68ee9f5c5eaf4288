"""The method `draft_model`: a smaller model with the target's tokenizer."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ....model import decoder
from ....model.checkpoint import loader
from ....model.checkpoint.placement import Placement
from ....model.config import ModelConfig, ModelError
from ....model.mixers import LayerHooks
from ....model.partition import local_config
from ....model.text.tokenizer import Tokenizer
from ....ops.attention import QueryRows
from ....sharding.mesh import Mesh
from ...device.attend import attend_with
from ...device.state import State
from .drafting import SpeculativeWeights, TargetStep, append_layers
from .loading import FIELD, DrafterContext, DraftSource, check_kv, check_partition, draft_folder


@dataclass(frozen=True)
class DraftModel:
    """A model that drafts token by token.

    Its KV pages have the numbers of the target's, so that one page table serves both.
    """

    config: ModelConfig
    kv_config: ModelConfig
    first_layer: int  # of its layers in `kv_config`
    feature_layers = ()
    can_prefill_later = True
    is_skippable = True

    def localize(self, mesh: Mesh) -> "DraftModel":
        config = local_config(self.config, mesh)
        return replace(self, config=config, kv_config=local_config(self.kv_config, mesh))

    def model_weights(self, weights: SpeculativeWeights) -> Any:
        return weights.drafter

    def prefill(
        self, weights: SpeculativeWeights, state: State, target: TargetStep
    ) -> tuple[Any, State]:
        _, state = self.run(weights, state, target, target.rows, target.tokens_T)
        return (), state

    def begin(self, features, target: TargetStep, rows_B) -> Any:
        return ()

    def next_logits(
        self,
        weights: SpeculativeWeights,
        state: State,
        target: TargetStep,
        token_B,
        position_B,
        num_drafted,
        carry,
    ):
        rows = target.single_rows(state, position_B)
        hidden_BD, state = self.run(weights, state, target, rows, token_B)
        model_weights = self.model_weights(weights)
        logits_BV = decoder.logits(model_weights, hidden_BD, self.config, target.axes)
        return logits_BV, carry, state

    def run(
        self,
        weights: SpeculativeWeights,
        state: State,
        target: TargetStep,
        rows: list[QueryRows],
        tokens_T,
    ):
        """(hidden states after the final norm, state) of some rows."""
        config = self.config
        axes = target.axes
        model_weights = self.model_weights(weights)
        positions_T = axes.rows.local_slice(rows[0].positions_T)
        tokens_T = axes.rows.local_slice(tokens_T)
        prepare, attend = attend_with(
            self.kv_config, lambda group: rows[group], self.first_layer, axes
        )
        x = decoder.embed(model_weights, tokens_T, positions_T, config, axes)
        fetch_weights = target.fetch_weights if weights.drafter is None else None
        hooks = LayerHooks(attend, prepare, fetch_weights=fetch_weights)
        (x_TD, _), state = decoder.run_layers(
            model_weights.layers, 0, x, state, positions_T, config, hooks, axes
        )
        return decoder.final_norm(model_weights, x_TD, config), state


def load_drafter(context: DrafterContext) -> DraftSource:
    config = context.config
    options = context.options
    speculation = context.speculation
    folder = draft_folder(speculation, options)
    draft_config = loader.read_config(
        folder, config.dtype, None, speculation.quantization, options.kv_cache_dtype
    )
    draft_config = replace(draft_config, activation_dtype=config.activation_dtype)
    check_kv(draft_config, config, context.max_len)
    vocab = Tokenizer(Path(options.tokenizer or context.folder)).get_vocab()
    draft_vocab = Tokenizer(folder).get_vocab()
    if vocab != draft_vocab:
        num_different = sum(draft_vocab.get(token) != number for token, number in vocab.items())
        raise ModelError(
            f"{FIELD}.model has another vocabulary: {num_different} of {len(vocab)} tokens have "
            "another number there, or none; a drafter must have the model's own tokenizer"
        )
    check_partition(draft_config, speculation, context.mesh)
    load = partial(
        loader.load,
        folder,
        draft_config,
        Placement(context.mesh),
        load_format=options.load_format,
        cached=options.weight_cache,
    )
    kv_config = append_layers(config, draft_config)
    return DraftSource(DraftModel(draft_config, kv_config, len(config.layers)), draft_config, load)
