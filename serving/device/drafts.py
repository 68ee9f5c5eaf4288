"""Tokens that the step itself drafts, after those that it draws: by a model of its own, or by a part of the target."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from ...model import decoder
from ...model.config import ModelConfig
from ...ops import sampling
from ...ops.attention import QueryRows
from ...sharding.device_axes import ONE_DEVICE
from .attend import attend_with
from .batch import Batch
from .state import State


@dataclass(frozen=True)
class DraftModel:
    """A model that drafts token by token.

    Its keys and values lie in pages of its own, under the numbers of the target's: what the page table does, it does
    for both. Or it is the beginning of the target, whose keys and values are its own.
    """

    config: ModelConfig
    paged: ModelConfig  # the target's layers and then its own, where it has pages
    first: int  # of its layers among these; 0: those of the target


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


def weights_of(drafter: DraftModel, weights: WithDrafter) -> Any:
    if weights.drafter is not None:
        return weights.drafter
    return weights.model.replace(layers=weights.model.layers[: len(drafter.config.layers)])


def follow(drafter: DraftModel, weights: WithDrafter, state: State, batch: Batch, tokens_T) -> State:
    """The drafter's keys and values of the step's rows."""
    if not drafter.first:
        return state  # the target has written them
    rows = [
        QueryRows(batch.positions_T, batch.starts_B1, table_BM, slots_T)
        for table_BM, slots_T in zip(batch.tables_GBM, batch.slots_GT, strict=True)
    ]
    return run(drafter, weights_of(drafter, weights), state, rows, tokens_T)[1]


def run(drafter: DraftModel, weights, state: State, rows: list[QueryRows], tokens_T):
    """(hidden states, state) of some rows; `rows` by cache group."""
    config, positions_T = drafter.config, rows[0].positions_T
    prepare, attend = attend_with(drafter.paged, lambda group: rows[group], drafter.first)
    x = decoder.embed(weights, tokens_T, positions_T, config, ONE_DEVICE)
    (x_TD, _), state = decoder.run_layers(
        weights.layers, 0, x, state, positions_T, config, attend, ONE_DEVICE, None, None, prepare
    )
    return decoder.final_norm(weights, x_TD, config), state


@jax.named_scope("draft")
def draft(
    drafter: DraftModel, weights: WithDrafter, state: State, batch: Batch, sampled: sampling.Sampled, accepted_R, plain
):
    """(drafts a sequence, state): `batch.num_drafts` tokens after the next one, each drawn as the target would draw it.

    With the same seed and position, so that it says the same wherever its distribution is the same.
    """
    B, (R, J) = batch.starts_B1.shape[0] - 1, batch.sampling.drafted_RJ.shape
    own, page_size = weights_of(drafter, weights), page_size_of(state)
    ends_R = sampling.ends(accepted_R, batch.depths_R) & (batch.store_R < state.last_tokens_B.shape[0]) & sampled.ok_R
    seq_R = (batch.starts_B1[None, 1:] <= batch.sample_rows_R[:, None]).sum(axis=1)
    row_B = jnp.full(B, R).at[jnp.where(ends_R, seq_R, B)].set(jnp.arange(R), mode="drop")
    goes_B = row_B < R
    inputs = jax.tree.map(lambda leaf: leaf[jnp.minimum(row_B, R - 1)], batch.sampling)
    off_B = jnp.zeros(B, bool)
    inputs = inputs.replace(
        bias_rows_R=jnp.zeros(B, jnp.int32), targets_R=jnp.full(B, -1), ban_RX=jnp.full((B, 1), -1),
        ban_stop_R=off_B, biased_R=off_B, wants_logprobs_R=off_B,
    )  # fmt: skip
    first_B = jnp.where(goes_B, inputs.positions_R, -1)
    token_B = jnp.where(goes_B, sampled.tokens_R[jnp.minimum(row_B, R - 1)], 0)
    tokens_BJ = jnp.full((B, J), -1).at[:, 0].set(token_B)  # the next token, and the drafts after it
    length = batch.tables_GBM[0].shape[1] * page_size

    def one(number, carry):
        tokens_BJ, state = carry
        positions_B = jnp.where(goes_B & (first_B + number < length), first_B + number, -1)
        token_B = jnp.maximum(jax.lax.dynamic_index_in_dim(tokens_BJ, number, 1, False), 0)
        page_B, offset_B = jnp.maximum(positions_B, 0) // page_size, jnp.maximum(positions_B, 0) % page_size
        rows = [
            QueryRows(
                positions_B,
                jnp.arange(B + 1),
                table_BM,
                jnp.where(positions_B < 0, 0, table_BM[jnp.arange(B), page_B] * page_size + offset_B),
            )
            for table_BM in batch.tables_GBM
        ]
        hidden_BD, state = run(drafter, own, state, rows, token_B)
        logits_BV = fitted(decoder.logits(own, hidden_BD, drafter.config), state.slots.stop_BV.shape[1])
        given = inputs.replace(positions_R=inputs.positions_R + 1 + number, drafted_RJ=tokens_BJ)
        drawn = sampling.sample(logits_BV, state.slots, given, plain)
        return tokens_BJ.at[:, number + 1].set(drawn.tokens_R), state

    tokens_BJ, state = jax.lax.fori_loop(0, batch.num_drafts_1[0], one, (tokens_BJ, state))
    return tokens_BJ[:, 1:], state


def fitted(logits_BV, V: int):
    """With as many tokens as the target has, some of which are padding in one model or the other."""
    own = logits_BV.shape[1]
    return logits_BV[:, :V] if own >= V else jnp.pad(logits_BV, ((0, 0), (0, V - own)), constant_values=-jnp.inf)


def page_size_of(state: State) -> int:
    pages = next(iter(state.pages.values()))
    return next(array for array in (pages.k_PSKH, pages.kv_PSYH) if array is not None).shape[1]
