"""The methods `eagle`, `eagle3` and `mtp`: layers that continue from the target's hidden states."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from ....model import draft_heads
from ....model.config import ModelConfig
from ....model.draft_heads import DraftHeads
from ....model.mixers import LayerHooks
from ....model.partition import local_config
from ....ops.attention import QueryRows
from ....sharding.mesh import Mesh
from ...device.attend import attend_with
from ...device.state import State
from .drafting import SpeculativeWeights, TargetStep, append_layers
from .heads import read_heads
from .loading import DrafterContext, DraftSource, check_kv, check_partition


@dataclass(frozen=True)
class FeatureDrafter:
    """Layers over pairs of the target's hidden state at a position and the token after it.

    A pair has the position of its hidden state. The KV pages have the numbers of the target's. The
    last pair of a page depends on the token after the page, which may differ for another request
    with the same prefix; that one then drafts a little worse there.
    """

    heads: DraftHeads
    kv_config: ModelConfig
    first_layer: int  # of its layers in `kv_config`
    can_prefill_later = False  # the target's hidden states are not stored
    is_skippable = False

    @property
    def feature_layers(self) -> tuple[int, ...]:
        last = () if self.heads.normed else (self.first_layer - 1,)
        return self.heads.features or last

    def localize(self, mesh: Mesh) -> "FeatureDrafter":
        heads = replace(self.heads, model=local_config(self.heads.model, mesh))
        return replace(self, heads=heads, kv_config=local_config(self.kv_config, mesh))

    def prefill(
        self, weights: SpeculativeWeights, state: State, target: TargetStep
    ) -> tuple[Any, State]:
        outputs_TF = target.hidden_TD
        if self.feature_layers:
            outputs = [target.features[index] for index in self.feature_layers]
            outputs_TF = jnp.concatenate(outputs, axis=1)
        features_TD = draft_heads.take_features(self.heads, weights.drafter, outputs_TF)
        tokens_T = next_tokens(target, state)
        _, _, state = self.run(weights, state, target, target.rows, tokens_T, features_TD)
        return features_TD, state

    def begin(self, features, target: TargetStep, rows_B) -> Any:
        return target.axes.rows.take(features, rows_B)

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
        rows = target.single_rows(state, jnp.maximum(position_B - 1, -1))
        feature_BD, hidden_BD, state = self.run(weights, state, target, rows, token_B, carry)
        logits_BV = draft_heads.logits(
            self.heads, weights.drafter, weights.model, hidden_BD, target.axes
        )
        return logits_BV, feature_BD, state

    def run(
        self,
        weights: SpeculativeWeights,
        state: State,
        target: TargetStep,
        rows: list[QueryRows],
        tokens_T,
        features_TD,
    ):
        """(features for the next tokens, hidden states, state) of some rows.

        Each device has the features of its own rows.
        """
        axes = target.axes
        positions_T = axes.rows.local_slice(rows[0].positions_T)
        tokens_T = axes.rows.local_slice(tokens_T)
        prepare, attend = attend_with(
            self.kv_config, lambda group: rows[group], self.first_layer, axes
        )
        return draft_heads.run(
            self.heads,
            weights.drafter,
            weights.model,
            tokens_T,
            features_TD,
            positions_T,
            state,
            LayerHooks(attend, prepare),
            axes,
        )


def next_tokens(target: TargetStep, state: State):
    """The token after each row: the next row's, one that the host knows, or the sampled one."""
    batch = target.batch
    T = target.tokens_T.shape[0]
    starts_B = batch.starts_B1[:-1]
    row_ends_B = batch.starts_B1[1:]
    last_row_B = jnp.where(row_ends_B > starts_B, row_ends_B - 1, T)
    next_T = jnp.roll(target.tokens_T, -1).at[last_row_B].set(batch.following_B, mode="drop")
    is_sampling_R = batch.store_R < state.last_tokens_B.shape[0]
    rows_R = jnp.where(is_sampling_R, batch.sample_rows_R, T)
    return next_T.at[rows_R].set(target.sampled.tokens_R, mode="drop")


def load_drafter(context: DrafterContext) -> DraftSource:
    heads, load = read_heads(context)
    config = context.config
    check_kv(heads.model, config, context.max_len)
    check_partition(heads.model, context.speculation, context.mesh)
    kv_config = append_layers(config, heads.model)
    return DraftSource(FeatureDrafter(heads, kv_config, len(config.layers)), heads.model, load)
