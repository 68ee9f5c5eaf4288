"""The method `medusa`: one head for each position, from the target's last hidden state."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from ....model import draft_heads
from ....model.config import ModelConfig, ModelError
from ....model.draft_heads import DraftHeads
from ....sharding.mesh import Mesh
from ...device.state import State
from .drafting import SpeculativeWeights, TargetStep
from .heads import read_heads
from .loading import FIELD, DrafterContext, DraftSource


@dataclass(frozen=True)
class MedusaDrafter:
    """All heads predict from the hidden state that sampled the next token."""

    heads: DraftHeads
    kv_config: ModelConfig
    feature_layers = ()
    can_prefill_later = False
    is_skippable = True

    def localize(self, mesh: Mesh) -> "MedusaDrafter":
        return self  # the heads are replicated

    def prefill(
        self, weights: SpeculativeWeights, state: State, target: TargetStep
    ) -> tuple[Any, State]:
        return target.hidden_TD, state

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
        def head_logits(head, hidden_BD):
            head_weights = weights.drafter.replace(heads=(head,))
            (logits_BV,) = draft_heads.medusa_logits(
                self.heads, head_weights, weights.model, hidden_BD, target.axes
            )
            return logits_BV

        branches = [partial(head_logits, head) for head in weights.drafter.heads]
        return jax.lax.switch(num_drafted, branches, carry), carry, state


def load_drafter(context: DrafterContext) -> DraftSource:
    heads, load = read_heads(context)
    num_drafts = context.speculation.num_speculative_tokens
    if heads.count < num_drafts:
        raise ModelError(
            f"{FIELD}.num_speculative_tokens is {num_drafts}, and {FIELD}.model has {heads.count} "
            f"heads, each of which drafts one token; use {heads.count} or less"
        )
    return DraftSource(MedusaDrafter(heads, context.config), heads.model, load)
