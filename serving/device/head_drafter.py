"""Heads on the target that draft: Medusa's, and layers that go on from its hidden states, as
EAGLE's do.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ...model import draft_heads
from ...model.config import ModelConfig
from ...model.draft_heads import DraftHeads
from ...model.mixers import LayerHooks
from ...model.partition import local_config
from ...ops.attention import QueryRows
from ...sharding.mesh import Mesh
from .attend import attend_with
from .drafts import Seen, WithDrafter
from .state import State


@dataclass(frozen=True)
class MedusaDrafter:
    """A head for each draft, all from the one hidden state that drew the next token."""

    heads: DraftHeads
    paged: ModelConfig
    paths: tuple[tuple[int, ...], ...]
    features = ()
    catches_up = False
    rests = True

    def copy_pages(self, state: State, pages_GL2) -> State:
        return state

    def on(self, mesh: Mesh) -> "MedusaDrafter":
        return self  # each device has all heads

    def follow(self, weights: WithDrafter, state: State, seen: Seen) -> tuple[Any, State]:
        return seen.hidden_TD, state

    def begin(self, known, seen: Seen, at_B) -> Any:
        return seen.axes.rows.take(known, at_B)

    def guess(
        self, weights: WithDrafter, state: State, seen: Seen, token_B, position_B, number, carry
    ):
        def guess(head, hidden_BD):
            own = weights.drafter.replace(heads=(head,))
            return draft_heads.medusa_logits(self.heads, own, weights.model, hidden_BD, seen.axes)[
                0
            ]

        ways = [partial(guess, head) for head in weights.drafter.heads]
        return jax.lax.switch(number, ways, carry), carry, state


@dataclass(frozen=True)
class FeatureDrafter:
    """Layers of its own over pairs: what the target knows at a position, and the token that came
    after it.

    Each pair has the position of the first. Its keys and values lie in pages of its own under the
    target's numbers. Those at the end of a page know the token after it, which another request with
    the same beginning need not have: it then drafts a little worse there.
    """

    heads: DraftHeads
    paged: ModelConfig
    first: int  # of its layers among these
    paths: tuple[tuple[int, ...], ...]
    catches_up = False  # the target's hidden states are gone
    rests = False

    def copy_pages(self, state: State, pages_GL2) -> State:
        pages = dict(state.pages)
        for index in range(self.first, len(self.paged.layers)):
            if index in pages:
                from_L, to_L = pages_GL2[self.paged.group(index)].T
                pages[index] = jax.tree.map(
                    lambda leaf, i=from_L, o=to_L: leaf.at[o].set(leaf[i]), pages[index]
                )
        return state.replace(pages=pages)

    @property
    def features(self) -> tuple[int, ...]:
        last = () if self.heads.normed else (self.first - 1,)
        return self.heads.features or last

    def on(self, mesh: Mesh) -> "FeatureDrafter":
        heads = replace(self.heads, model=local_config(self.heads.model, mesh))
        return replace(self, heads=heads, paged=local_config(self.paged, mesh))

    def follow(self, weights: WithDrafter, state: State, seen: Seen) -> tuple[Any, State]:
        raw_TF = seen.hidden_TD
        if self.features:
            raw_TF = jnp.concatenate([seen.features[index] for index in self.features], axis=1)
        features_TD = draft_heads.take_features(self.heads, weights.drafter, raw_TF)
        return features_TD, self.run(
            weights, state, seen, seen.rows, next_tokens(seen, state), features_TD
        )[2]

    def begin(self, known, seen: Seen, at_B) -> Any:
        return seen.axes.rows.take(known, at_B)

    def guess(
        self, weights: WithDrafter, state: State, seen: Seen, token_B, position_B, number, carry
    ):
        rows = seen.single_rows(state, jnp.maximum(position_B - 1, -1))
        feature_BD, hidden_BD, state = self.run(weights, state, seen, rows, token_B, carry)
        logits_BV = draft_heads.logits(
            self.heads, weights.drafter, weights.model, hidden_BD, seen.axes
        )
        return logits_BV, feature_BD, state

    def run(
        self,
        weights: WithDrafter,
        state: State,
        seen: Seen,
        rows: list[QueryRows],
        tokens_T,
        features_TD,
    ):
        """(features for the next tokens, hidden states, state) of some rows, of which each device
        has its features.
        """
        own = weights.drafter
        model = weights.model
        axes = seen.axes
        positions_T = axes.rows.local_slice(rows[0].positions_T)
        tokens_T = axes.rows.local_slice(tokens_T)
        prepare, attend = attend_with(self.paged, lambda group: rows[group], self.first, axes)
        hooks = LayerHooks(attend, prepare)
        return draft_heads.run(
            self.heads, own, model, tokens_T, features_TD, positions_T, state, hooks, axes
        )


def next_tokens(seen: Seen, state: State):
    """The token after each row: of the same sequence in the step, or known to the host, or just
    drawn.
    """
    batch = seen.batch
    T = seen.tokens_T.shape[0]
    first_B = batch.starts_B1[:-1]
    end_B = batch.starts_B1[1:]
    last_B = jnp.where(end_B > first_B, end_B - 1, T)
    next_T = jnp.roll(seen.tokens_T, -1).at[last_B].set(batch.following_B, mode="drop")
    draws_R = batch.store_R < state.last_tokens_B.shape[0]
    rows_R = jnp.where(draws_R, batch.sample_rows_R, T)
    return next_T.at[rows_R].set(seen.sampled.tokens_R, mode="drop")
