"""The part of a step that drafts tokens, after the target has sampled."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ....model.config import ModelConfig
from ....ops import sampling
from ....ops.attention import QueryRows, new_arrivals
from ....ops.state_rows import sequence_for_row
from ....sharding import struct
from ....sharding.device_axes import UNSPLIT, Axis, DeviceAxes
from ....sharding.mesh import Mesh
from ...device.batch import Batch
from ...device.state import State


class DeviceDrafter(Protocol):
    """Drafts within the step.

    First `prefill` computes the step's own tokens, then each draft token is one call of
    `next_logits`, which hands a `carry` to the next.
    """

    @property
    def kv_config(self) -> ModelConfig:
        """The layers that own KV pages: the target's, then the drafter's."""
        ...

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's layers whose outputs it needs (`TargetStep.features`)."""
        ...

    @property
    def can_prefill_later(self) -> bool:
        """Whether `prefill` needs tokens only, so that steps without drafts may go without it."""
        ...

    @property
    def is_skippable(self) -> bool:
        """Whether a step that neither drafts nor prefills may be compiled without it."""
        ...

    def localize(self, mesh: Mesh) -> "DeviceDrafter":
        """The drafter as one device of a mesh computes it."""
        ...

    def prefill(
        self, weights: "SpeculativeWeights", state: State, target: "TargetStep"
    ) -> tuple[Any, State]:
        """(features of each of the step's tokens, the state with their keys and values)."""
        ...

    def begin(self, features: Any, target: "TargetStep", rows_B: Any) -> Any:
        """The first `carry`; `rows_B` are the rows that sampled the sequences' next tokens."""
        ...

    def next_logits(
        self,
        weights: "SpeculativeWeights",
        state: State,
        target: "TargetStep",
        token_B: Any,
        position_B: Any,
        num_drafted: Any,
        carry: Any,
    ) -> tuple[Any, Any, State]:
        """(logits of the token after `token_B`, carry, state), after `num_drafted` draft tokens.

        Sequences at position -1 draft nothing.
        """
        ...


@dataclass(frozen=True)
class TargetStep:
    """What the target has computed in the step, for the drafter."""

    batch: Batch
    rows: list[QueryRows]  # by cache group
    tokens_T: Any
    hidden_TD: Any  # after the final norm
    features: dict[int, Any]  # outputs of `DeviceDrafter.feature_layers`
    sampled: Any  # sampling.Sampled; None in a prefill
    axes: DeviceAxes
    fetch_weights: Any  # see `LayerHooks`

    def single_rows(self, state: State, position_B) -> list[QueryRows]:
        """One row of each sequence at these positions, by cache group; none at -1."""
        B = position_B.shape[0]
        page_size = kv_page_size(state) * self.axes.context.size
        page_B, offset_B = jnp.divmod(jnp.maximum(position_B, 0), page_size)
        arrivals = new_arrivals()
        rows = []
        for table_BM in self.batch.tables_GBM:
            slots_B = table_BM[jnp.arange(B), page_B] * page_size + offset_B
            slots_B = jnp.where(position_B < 0, 0, slots_B)
            rows.append(QueryRows(position_B, jnp.arange(B + 1), table_BM, slots_B, arrivals))
        return rows


class SpeculativeWeights(struct.PyTreeNode):
    """The weights of the target and of its drafter (None: a part of the target's)."""

    model: Any
    drafter: Any


def append_layers(config: ModelConfig, drafter: ModelConfig) -> ModelConfig:
    """The target's configuration with the drafter's layers after its own, for the KV pages."""
    num_layers = len(config.layers)

    def shift_kv_source(layer):
        source = layer.attention.kv_source
        if source is None:
            return layer
        return replace(layer, attention=replace(layer.attention, kv_source=num_layers + source))

    return replace(config, layers=config.layers + tuple(map(shift_kv_source, drafter.layers)))


@jax.named_scope("draft")
def draft(
    drafter: DeviceDrafter,
    weights: SpeculativeWeights,
    state: State,
    target: TargetStep,
    store_R,
    is_plain,
):
    """(draft tokens of each sequence, state): `batch.num_drafts_1` tokens after the sampled one.

    Each is sampled with the seed and position with which the target will sample in its place, so
    that it is the same token wherever the distribution is the same. `store_R` are the slots of the
    sequences whose next token a row sampled.
    """
    batch = target.batch
    features = ()
    if not drafter.can_prefill_later:
        features, state = drafter.prefill(weights, state, target)

    def prefill_and_propose(_, loop_state):
        _, state = loop_state
        if drafter.can_prefill_later:
            arrivals = new_arrivals()  # a loop body cannot use those from outside
            rows = [rows.replace(arrivals=arrivals) for rows in target.rows]
            _, state = drafter.prefill(weights, state, replace(target, rows=rows))
        return propose(drafter, weights, state, target, features, store_R, is_plain)

    # A loop of at most one iteration: unlike a conditional it updates the pages in place.
    is_needed = (batch.prefills_1[0] | (batch.num_drafts_1[0] > 0)).astype(jnp.int32)
    B = batch.starts_B1.shape[0] - 1
    J = batch.sampling.drafted_RJ.shape[1]
    nothing = jnp.full((B, J - 1), -1), state
    return jax.lax.fori_loop(0, is_needed, prefill_and_propose, nothing)


def propose(
    drafter: DeviceDrafter,
    weights: SpeculativeWeights,
    state: State,
    target: TargetStep,
    features,
    store_R,
    is_plain,
):
    """`draft`, after the prefill."""
    batch = target.batch
    sampled = target.sampled
    axis = target.axes.tensor
    B = batch.starts_B1.shape[0] - 1
    R, J = batch.sampling.drafted_RJ.shape
    # one row of each sequence, which all devices have
    single = replace(target, axes=replace(target.axes, rows=UNSPLIT))
    is_last_R = (store_R < state.last_tokens_B.shape[0]) & sampled.ok_R
    sequence_R = sampled_sequence(batch)
    row_B = jnp.full(B, R).at[jnp.where(is_last_R, sequence_R, B)].set(jnp.arange(R), mode="drop")
    is_drafting_B = row_B < R
    row_B = jnp.minimum(row_B, R - 1)
    inputs = jax.tree.map(lambda leaf: leaf[row_B], batch.sampling)
    off_B = jnp.zeros(B, bool)
    inputs = inputs.replace(
        bias_rows_R=jnp.zeros(B, jnp.int32),
        targets_R=jnp.full(B, -1),
        ban_RX=jnp.full((B, 1), -1),
        ban_stop_R=off_B,
        biased_R=off_B,
        wants_logprobs_R=off_B,
    )
    token_B = jnp.where(is_drafting_B, sampled.tokens_R[row_B], 0)
    # the sampled token, and the draft tokens after it
    tokens_BJ = jnp.full((B, J), -1).at[:, 0].set(token_B)
    max_len = batch.tables_GBM[0].shape[1] * kv_page_size(state) * target.axes.context.size

    def draft_one(num_drafted, loop_state):
        tokens_BJ, carry, state = loop_state
        position_B = inputs.positions_R + num_drafted
        position_B = jnp.where(is_drafting_B & (position_B < max_len), position_B, -1)
        token_B = jnp.maximum(jax.lax.dynamic_index_in_dim(tokens_BJ, num_drafted, 1, False), 0)
        logits_BV, carry, state = drafter.next_logits(
            weights, state, single, token_B, position_B, num_drafted, carry
        )
        logits_BV = fit_vocab(logits_BV, state.slots.stop_BV.shape[1], axis)
        positions_B = inputs.positions_R + 1 + num_drafted
        sampling_inputs = inputs.replace(positions_R=positions_B, drafted_RJ=tokens_BJ)
        drawn = sampling.sample(logits_BV, state.slots, sampling_inputs, is_plain, axis)
        return tokens_BJ.at[:, num_drafted + 1].set(drawn.tokens_R), carry, state

    carry = drafter.begin(features, target, batch.sample_rows_R[row_B])
    tokens_BJ, _, state = jax.lax.fori_loop(
        0, batch.num_drafts_1[0], draft_one, (tokens_BJ, carry, state)
    )
    return tokens_BJ[:, 1:], state


def sampled_sequence(batch: Batch):
    """The index, among the step's sequences, of the sequence that each sampled row belongs to."""
    return sequence_for_row(batch.starts_B1, batch.sample_rows_R)


def fit_vocab(logits_BV, V: int, axis: Axis):
    """Pad or cut each device's logits to the target's V: the padding of two models may differ."""
    if logits_BV.shape[1] == V:
        return logits_BV
    logits_VB = axis.join(logits_BV.T)[: V * axis.size]
    missing = V * axis.size - len(logits_VB)
    return axis.local_slice(jnp.pad(logits_VB, ((0, missing), (0, 0)), constant_values=-jnp.inf)).T


def kv_page_size(state: State) -> int:
    pages = next(iter(state.pages.values()))
    return next(array for array in (pages.k_PSKH, pages.kv_PSYH) if array is not None).shape[1]
