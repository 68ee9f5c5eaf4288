"""Tokens that the step itself drafts, after those that it draws: by a model of its own, or by a part of the target."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from ...model import decoder
from ...model.config import ModelConfig
from ...model.partition import local_config
from ...ops import sampling
from ...ops.attention import QueryRows, new_arrivals
from ...sharding.device_axes import UNSPLIT, Axis, DeviceAxes
from ...sharding.mesh import Mesh
from .attend import attend_with
from .batch import Batch
from .state import State


class StepDrafter(Protocol):
    """What drafts in the step. `carry` is what one draft leaves for the next."""

    @property
    def paged(self) -> ModelConfig:
        """The target's layers, and then its own, as those that own pages."""
        ...

    @property
    def features(self) -> tuple[int, ...]:
        """The target's layers whose rows it wants to see."""
        ...

    @property
    def catches_up(self) -> bool:
        """What it did not follow it can compute later, from the tokens alone."""
        ...

    def on(self, mesh: Mesh) -> "StepDrafter":
        """As one device of a mesh computes it."""
        ...

    def follow(self, weights: "WithDrafter", state: State, seen: "Seen") -> tuple[Any, State]:
        """(what it knows of each of the step's rows, the state with their keys and values)."""
        ...

    def begin(self, known, seen: "Seen", at_B) -> Any:
        """The first `carry`: `at_B` are the rows that drew the sequences' next tokens."""
        ...

    def guess(
        self, weights: "WithDrafter", state: State, seen: "Seen", token_B, position_B, number, carry
    ) -> tuple[Any, Any, State]:
        """(logits of the token after `token_B`, carry, state); `number` of the drafts are there, -1: no position."""
        ...


@dataclass(frozen=True)
class Seen:
    """What the step has just computed, and how."""

    batch: Batch
    rows: list[QueryRows]  # by cache group
    tokens_T: Any
    hidden_TD: Any  # after the final norm
    features: dict[int, Any]  # rows after the layers that the drafter wants to see
    sampled: sampling.Sampled
    axes: DeviceAxes
    fetch: Any  # brings the target's layers where they do not lie ready

    def single_rows(self, state: State, position_B) -> list[QueryRows]:
        """A row of each sequence, by cache group; at position -1 there is none."""
        B, page_size = position_B.shape[0], page_size_of(state) * self.axes.context.size
        page_B, offset_B = jnp.divmod(jnp.maximum(position_B, 0), page_size)
        arrivals = new_arrivals()
        return [
            QueryRows(
                position_B,
                jnp.arange(B + 1),
                table_BM,
                jnp.where(position_B < 0, 0, table_BM[jnp.arange(B), page_B] * page_size + offset_B),
                arrivals,
            )
            for table_BM in self.batch.tables_GBM
        ]


@dataclass(frozen=True)
class DraftModel:
    """A model that drafts token by token.

    Its keys and values lie in pages of its own, under the numbers of the target's: what the page table does, it does
    for both. Or it is the beginning of the target, whose keys and values are its own.
    """

    config: ModelConfig
    paged: ModelConfig
    first: int  # of its layers among these; 0: those of the target
    features = ()

    @property
    def catches_up(self) -> bool:
        return self.first > 0

    def on(self, mesh: Mesh) -> "DraftModel":
        return replace(self, config=local_config(self.config, mesh), paged=local_config(self.paged, mesh))

    def follow(self, weights: "WithDrafter", state: State, seen: Seen) -> tuple[Any, State]:
        if not self.first:
            return (), state  # the target has written its keys and values
        return (), self.run(weights, state, seen, seen.rows, seen.tokens_T)[1]

    def begin(self, known, seen: Seen, at_B) -> Any:
        return ()

    def guess(self, weights: "WithDrafter", state: State, seen: Seen, token_B, position_B, number, carry):
        hidden_BD, state = self.run(weights, state, seen, seen.single_rows(state, position_B), token_B)
        return decoder.logits(self.weights_of(weights), hidden_BD, self.config, seen.axes), carry, state

    def run(self, weights: "WithDrafter", state: State, seen: Seen, rows: list[QueryRows], tokens_T):
        """(hidden states, state) of some rows."""
        config, own, axes = self.config, self.weights_of(weights), seen.axes
        fetch = seen.fetch if weights.drafter is None else None
        positions_T, tokens_T = axes.rows.part(rows[0].positions_T), axes.rows.part(tokens_T)
        prepare, attend = attend_with(self.paged, lambda group: rows[group], self.first, axes)
        x = decoder.embed(own, tokens_T, positions_T, config, axes)
        (x_TD, _), state = decoder.run_layers(
            own.layers, 0, x, state, positions_T, config, attend, axes, None, fetch, prepare
        )
        return decoder.final_norm(own, x_TD, config), state

    def weights_of(self, weights: "WithDrafter") -> Any:
        if weights.drafter is not None:
            return weights.drafter
        return weights.model.replace(layers=weights.model.layers[: len(self.config.layers)])


@struct.dataclass
class WithDrafter:
    """The weights of both; None: the drafter's are a part of the model's."""

    model: Any
    drafter: Any


def with_layers(config: ModelConfig, drafter: ModelConfig) -> ModelConfig:
    """The layers of both, as those that own pages: the drafter's stand behind the target's."""
    count = len(config.layers)

    def moved(layer):
        source = layer.attention.kv_source
        return layer if source is None else replace(layer, attention=replace(layer.attention, kv_source=count + source))

    return replace(config, layers=config.layers + tuple(map(moved, drafter.layers)))


@jax.named_scope("draft")
def draft(drafter: StepDrafter, weights: WithDrafter, state: State, seen: Seen, accepted_R, plain):
    """(drafts a sequence, state): `batch.num_drafts` tokens after the next one, each drawn as the target would draw it.

    With the same seed and position, so that it says the same wherever its distribution is the same.
    """
    batch, known = seen.batch, ()
    if not drafter.catches_up:  # what it does not follow now, it never knows
        known, state = drafter.follow(weights, state, seen)

    def one(_, held):
        state = held[1]
        if drafter.catches_up:
            arrivals = new_arrivals()  # a loop cannot share it
            rows = [each.replace(arrivals=arrivals) for each in seen.rows]
            state = drafter.follow(weights, state, replace(seen, rows=rows))[1]
        return propose(drafter, weights, state, seen, known, accepted_R, plain)

    # A loop of one turn or none: it leaves the pages where they are, as a branch may not.
    turns = (batch.follows_1[0] | (batch.num_drafts_1[0] > 0)).astype(jnp.int32)
    B, J = batch.starts_B1.shape[0] - 1, batch.sampling.drafted_RJ.shape[1]
    return jax.lax.fori_loop(0, turns, one, (jnp.full((B, J - 1), -1), state))


def propose(drafter: StepDrafter, weights: WithDrafter, state: State, seen: Seen, known, accepted_R, plain):
    """The same, once the drafter has followed."""
    batch, sampled, axis = seen.batch, seen.sampled, seen.axes.tensor
    B, (R, J) = batch.starts_B1.shape[0] - 1, batch.sampling.drafted_RJ.shape
    ends_R = sampling.ends(accepted_R, batch.depths_R) & (batch.store_R < state.last_tokens_B.shape[0]) & sampled.ok_R
    seq_R = (batch.starts_B1[None, 1:] <= batch.sample_rows_R[:, None]).sum(axis=1)
    row_B = jnp.full(B, R).at[jnp.where(ends_R, seq_R, B)].set(jnp.arange(R), mode="drop")
    goes_B, row_B = row_B < R, jnp.minimum(row_B, R - 1)
    inputs = jax.tree.map(lambda leaf: leaf[row_B], batch.sampling)
    off_B = jnp.zeros(B, bool)
    inputs = inputs.replace(
        bias_rows_R=jnp.zeros(B, jnp.int32), targets_R=jnp.full(B, -1), ban_RX=jnp.full((B, 1), -1),
        ban_stop_R=off_B, biased_R=off_B, wants_logprobs_R=off_B,
    )  # fmt: skip
    token_B = jnp.where(goes_B, sampled.tokens_R[row_B], 0)
    tokens_BJ = jnp.full((B, J), -1).at[:, 0].set(token_B)  # the next token, and the drafts after it
    length = batch.tables_GBM[0].shape[1] * page_size_of(state) * seen.axes.context.size

    single = replace(seen, axes=replace(seen.axes, rows=UNSPLIT))  # a row of each sequence, which all devices have

    def one(number, held):
        tokens_BJ, carry, state = held
        position_B = inputs.positions_R + number
        position_B = jnp.where(goes_B & (position_B < length), position_B, -1)
        token_B = jnp.maximum(jax.lax.dynamic_index_in_dim(tokens_BJ, number, 1, False), 0)
        logits_BV, carry, state = drafter.guess(weights, state, single, token_B, position_B, number, carry)
        logits_BV = fitted(logits_BV, state.slots.stop_BV.shape[1], axis)
        given = inputs.replace(positions_R=inputs.positions_R + 1 + number, drafted_RJ=tokens_BJ)
        drawn = sampling.sample(logits_BV, state.slots, given, plain, axis)
        return tokens_BJ.at[:, number + 1].set(drawn.tokens_R), carry, state

    held = tokens_BJ, drafter.begin(known, seen, batch.sample_rows_R[row_B]), state
    tokens_BJ, _, state = jax.lax.fori_loop(0, batch.num_drafts_1[0], one, held)
    return tokens_BJ[:, 1:], state


def fitted(logits_BV, V: int, axis: Axis):
    """With as many tokens on each device as the target has, some of which are padding in one model or the other."""
    if logits_BV.shape[1] == V:
        return logits_BV
    logits_VB = axis.join(logits_BV.T)[: V * axis.size]
    spare = V * axis.size - len(logits_VB)
    return axis.part(jnp.pad(logits_VB, ((0, spare), (0, 0)), constant_values=-jnp.inf)).T


def page_size_of(state: State) -> int:
    pages = next(iter(state.pages.values()))
    return next(array for array in (pages.k_PSKH, pages.kv_PSYH) if array is not None).shape[1]
