"""Tokens that the step itself drafts, after those that it draws: by a model of its own, or by a
part of the target.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ...model import decoder
from ...model.config import ModelConfig
from ...model.mixers import LayerHooks
from ...model.partition import local_config
from ...ops import sampling
from ...ops.attention import QueryRows, new_arrivals
from ...ops.sampling.ranking import runners_up
from ...ops.state_rows import sequence_for_row
from ...sharding import struct
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

    @property
    def rests(self) -> bool:
        """A step that neither drafts nor follows may leave it out."""
        ...

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The drafts of each path by their ranks, 0 being the likeliest; none: there is one path,
        of these.
        """
        ...

    def copy_pages(self, state: State, pages_GL2) -> State:
        """The state with pages of its own layers copied, of each cache group: from, to."""
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
        """(logits of the token after `token_B`, carry, state); `number` of the drafts are there,
        -1: no position.
        """
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
        B = position_B.shape[0]
        page_size = page_size_of(state) * self.axes.context.size
        page_B, offset_B = jnp.divmod(jnp.maximum(position_B, 0), page_size)
        arrivals = new_arrivals()
        return [
            QueryRows(
                position_B,
                jnp.arange(B + 1),
                table_BM,
                jnp.where(
                    position_B < 0, 0, table_BM[jnp.arange(B), page_B] * page_size + offset_B
                ),
                arrivals,
            )
            for table_BM in self.batch.tables_GBM
        ]


@dataclass(frozen=True)
class DraftModel:
    """A model that drafts token by token.

    Its keys and values lie in pages of its own, under the numbers of the target's: what the page
    table does, it does for both. Or it is the beginning of the target, whose keys and values are
    its own.
    """

    config: ModelConfig
    paged: ModelConfig
    first: int  # of its layers among these; 0: those of the target
    features = ()
    rests = True
    paths = ()

    def copy_pages(self, state: State, pages_GL2) -> State:
        return state

    @property
    def catches_up(self) -> bool:
        return self.first > 0

    def on(self, mesh: Mesh) -> "DraftModel":
        return replace(
            self, config=local_config(self.config, mesh), paged=local_config(self.paged, mesh)
        )

    def follow(self, weights: "WithDrafter", state: State, seen: Seen) -> tuple[Any, State]:
        if not self.first:
            return (), state  # the target has written its keys and values
        return (), self.run(weights, state, seen, seen.rows, seen.tokens_T)[1]

    def begin(self, known, seen: Seen, at_B) -> Any:
        return ()

    def guess(
        self, weights: "WithDrafter", state: State, seen: Seen, token_B, position_B, number, carry
    ):
        hidden_BD, state = self.run(
            weights, state, seen, seen.single_rows(state, position_B), token_B
        )
        return (
            decoder.logits(self.weights_of(weights), hidden_BD, self.config, seen.axes),
            carry,
            state,
        )

    def run(
        self, weights: "WithDrafter", state: State, seen: Seen, rows: list[QueryRows], tokens_T
    ):
        """(hidden states, state) of some rows."""
        config = self.config
        own = self.weights_of(weights)
        axes = seen.axes
        fetch = seen.fetch if weights.drafter is None else None
        positions_T = axes.rows.local_slice(rows[0].positions_T)
        tokens_T = axes.rows.local_slice(tokens_T)
        prepare, attend = attend_with(self.paged, lambda group: rows[group], self.first, axes)
        x = decoder.embed(own, tokens_T, positions_T, config, axes)
        hooks = LayerHooks(attend, prepare, fetch_weights=fetch)
        (x_TD, _), state = decoder.run_layers(
            own.layers, 0, x, state, positions_T, config, hooks, axes
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
        return (
            layer
            if source is None
            else replace(layer, attention=replace(layer.attention, kv_source=count + source))
        )

    return replace(config, layers=config.layers + tuple(map(moved, drafter.layers)))


@jax.named_scope("draft")
def draft(drafter: StepDrafter, weights: WithDrafter, state: State, seen: Seen, store_R, plain):
    """(drafts a sequence, state): `batch.num_drafts` tokens after the next one, each drawn as the
    target would draw it.

    With the same seed and position, so that it says the same wherever its distribution is the same.
    `store_R` are the slots of the sequences whose next token a row draws. Where there are several
    paths of drafts, their tokens come one path after the other.
    """
    batch = seen.batch
    known = ()
    if not drafter.catches_up:  # what it does not follow now, it never knows
        known, state = drafter.follow(weights, state, seen)

    def one(_, held):
        state = held[1]
        if drafter.catches_up:
            arrivals = new_arrivals()  # a loop cannot share it
            rows = [each.replace(arrivals=arrivals) for each in seen.rows]
            state = drafter.follow(weights, state, replace(seen, rows=rows))[1]
        return propose(drafter, weights, state, seen, known, store_R, plain)

    # A loop of one turn or none: it leaves the pages where they are, as a branch may not.
    turns = (batch.follows_1[0] | (batch.num_drafts_1[0] > 0)).astype(jnp.int32)
    A, Q = (
        batch.spares_GAQW[0].shape[:2] if batch.spares_GAQW else (batch.starts_B1.shape[0] - 1, 1)
    )
    J = batch.sampling.drafted_RJ.shape[1]
    return jax.lax.fori_loop(0, turns, one, (jnp.full((A, Q * (J - 1)), -1), state))


def propose(
    drafter: StepDrafter, weights: WithDrafter, state: State, seen: Seen, known, store_R, plain
):
    """The same, once the drafter has followed. Each path of each sequence is a row."""
    batch = seen.batch
    sampled = seen.sampled
    axis = seen.axes.tensor
    R, J = batch.sampling.drafted_RJ.shape
    page_size = page_size_of(state) * seen.axes.context.size
    # a row of each sequence, which all devices have
    single = replace(seen, axes=replace(seen.axes, rows=UNSPLIT))
    ends_R = (store_R < state.last_tokens_B.shape[0]) & sampled.ok_R
    numbers_R, paths_R = path_of(batch)
    A, Q = (
        batch.spares_GAQW[0].shape[:2] if batch.spares_GAQW else (batch.starts_B1.shape[0] - 1, 1)
    )
    row_A = jnp.full(A, R).at[jnp.where(ends_R, numbers_R, A)].set(jnp.arange(R), mode="drop")
    goes_A = row_A < R
    row_A = jnp.minimum(row_A, R - 1)
    if Q > 1:
        next_A = jnp.where(goes_A, batch.sampling.positions_R[row_A], -1)
        tables_GLM, pages_GL2 = branched(
            batch, entry_of(batch)[row_A], paths_R[row_A], next_A, page_size
        )
        state = drafter.copy_pages(state, pages_GL2)
        single = replace(single, batch=batch.replace(tables_GBM=tables_GLM))
    goes_L = jnp.repeat(goes_A, Q)
    row_L = jnp.repeat(row_A, Q)
    L = A * Q
    inputs = jax.tree.map(lambda leaf: leaf[row_L], batch.sampling)
    off_L = jnp.zeros(L, bool)
    inputs = inputs.replace(
        bias_rows_R=jnp.zeros(L, jnp.int32), targets_R=jnp.full(L, -1), ban_RX=jnp.full((L, 1), -1),
        ban_stop_R=off_L, biased_R=off_L, wants_logprobs_R=off_L,
    )  # fmt: skip
    token_L = jnp.where(goes_L, sampled.tokens_R[row_L], 0)
    # the next token, and the drafts after it
    tokens_LJ = jnp.full((L, J), -1).at[:, 0].set(token_L)
    length = batch.tables_GBM[0].shape[1] * page_size
    ranks_QJ = np.full((Q, J - 1), -1)
    for path, ranks in enumerate(drafter.paths):
        ranks_QJ[path, : len(ranks)] = ranks
    lowest = ranks_QJ.max(initial=0)

    def one(number, held):
        tokens_LJ, carry, state = held
        position_L = inputs.positions_R + number
        position_L = jnp.where(goes_L & (position_L < length), position_L, -1)
        token_L = jnp.maximum(jax.lax.dynamic_index_in_dim(tokens_LJ, number, 1, False), 0)
        logits_LV, carry, state = drafter.guess(
            weights, state, single, token_L, position_L, number, carry
        )
        logits_LV = fitted(logits_LV, state.slots.stop_BV.shape[1], axis)
        given = inputs.replace(positions_R=inputs.positions_R + 1 + number, drafted_RJ=tokens_LJ)
        drawn_L = sampling.sample(logits_LV, state.slots, given, plain, axis).tokens_R
        if Q > 1:
            others_LX = runners_up(logits_LV, drawn_L, lowest, axis)
            rank_L = jnp.tile(jnp.asarray(ranks_QJ)[:, number], A)
            others_LX = jnp.concatenate([jnp.full((L, 1), -1), drawn_L[:, None], others_LX], axis=1)
            drawn_L = jnp.take_along_axis(others_LX, 1 + rank_L[:, None], axis=1)[:, 0]
        return tokens_LJ.at[:, number + 1].set(drawn_L), carry, state

    held = tokens_LJ, drafter.begin(known, seen, batch.sample_rows_R[row_L]), state
    tokens_LJ, _, state = jax.lax.fori_loop(0, batch.num_drafts_1[0], one, held)
    return tokens_LJ[:, 1:].reshape(A, -1), state


def entry_of(batch: Batch):
    """Of each row that draws, which of the step's sequences it is of: each path of drafts is
    one.
    """
    return sequence_for_row(batch.starts_B1, batch.sample_rows_R)


def path_of(batch: Batch):
    """(the sequence, without its paths; the path) of each row that draws."""
    entry_R = entry_of(batch)
    if batch.paths_B is None:
        return entry_R, jnp.zeros_like(entry_R)
    entry_R = jnp.minimum(entry_R, batch.paths_B.shape[0] - 1)
    return (jnp.cumsum(batch.paths_B == 0) - 1)[entry_R], batch.paths_B[entry_R]


def branched(batch: Batch, entry_A, won_A, next_A, page_size: int):
    """(tables of each path, by cache group; which pages are to be copied for them: from, to) after
    the next tokens.

    `won_A` is the path that the step has verified with most success, and has the sequence's pages
    now; what was the first one's is spare, then.

        table of the sequence   [ 7 ][ 3 ][ 9 ][ 2 ]        next token in page 9 of another path
        [ 7 ][ 3 ][ 5 ][ 8 ]        5 and 8 are spare; what 9 holds is copied to 5
    """
    tables = []
    copied = []
    first_A1 = jnp.maximum(next_A, 0)[:, None] // page_size
    for table_BM, spare_AQW in zip(batch.tables_GBM, batch.spares_GAQW, strict=True):
        A, Q, W = spare_AQW.shape
        path_AQ = jnp.broadcast_to(jnp.arange(Q), (A, Q))
        path_AQ = jnp.where(path_AQ == won_A[:, None], 0, path_AQ)
        own_AQW = jnp.take_along_axis(spare_AQW, path_AQ[:, :, None], axis=1)[:, 1:]
        own_AQW = jnp.where(next_A[:, None, None] < 0, 0, own_AQW)
        table_AM = table_BM[entry_A]
        at = (
            jnp.arange(A)[:, None, None],
            jnp.arange(1, Q)[None, :, None],
            (first_A1 + jnp.arange(W))[:, None],
        )
        table_AQM = jnp.repeat(table_AM[:, None], Q, axis=1).at[at].set(own_AQW, mode="drop")
        tables.append(table_AQM.reshape(A * Q, -1))
        from_AQ = jnp.repeat(
            jnp.take_along_axis(table_AM, first_A1, axis=1, mode="clip"), Q - 1, axis=1
        )
        copied.append(jnp.stack([from_AQ, own_AQW[:, :, 0]], axis=-1).reshape(-1, 2))
    return tuple(tables), copied


def fitted(logits_BV, V: int, axis: Axis):
    """With as many tokens on each device as the target has, some of which are padding in one model
    or the other.
    """
    if logits_BV.shape[1] == V:
        return logits_BV
    logits_VB = axis.join(logits_BV.T)[: V * axis.size]
    spare = V * axis.size - len(logits_VB)
    return axis.local_slice(jnp.pad(logits_VB, ((0, spare), (0, 0)), constant_values=-jnp.inf)).T


def page_size_of(state: State) -> int:
    pages = next(iter(state.pages.values()))
    return next(array for array in (pages.k_PSKH, pages.kv_PSYH) if array is not None).shape[1]
