"""Sorting of (token, expert) pairs into blocks of one expert: fixed sizes, and no loops."""

from typing import Any, NamedTuple

import jax.numpy as jnp

CHUNK = 32  # tokens whose experts are counted together


class Blocks(NamedTuple):
    """Blocks of pairs. The place of a pair is its index among the rows of all blocks."""

    place_Z: Any  # the place of each pair; past the end if it has no expert here
    pair_P: Any  # the pair at each place; the number of pairs at empty places
    weight_P: Any  # the weight of the pair at each place, in float32; 0 at empty places
    experts_B: Any  # the expert of each block; longer than the number of blocks
    count_1: Any  # the number of blocks


def max_blocks(pairs: int, experts: int, rows: int) -> int:
    """The largest possible number of blocks: all experts may have one block that is not full."""
    return max(1, min(pairs, (pairs + experts * (rows - 1)) // rows))


def align(experts_TX, weights_TX, experts: int, rows: int) -> Blocks:
    """See `quire.ops.moe.routing.align`."""
    T, X = experts_TX.shape
    size = max_blocks(T * X, experts, rows)
    expert_E = jnp.arange(experts, dtype=jnp.int32)
    is_chosen_TXE = (experts_TX[..., None] == expert_E).astype(jnp.int32)
    rank_TE, counts_E = exclusive_sums(jnp.sum(is_chosen_TXE, 1))
    blocks_E = (counts_E + rows - 1) // rows
    # the end of each expert's blocks
    last_E = jnp.sum(jnp.where(expert_E[:, None] >= expert_E, blocks_E, 0), 1)
    earlier_TX = jnp.sum(
        (experts_TX[:, :, None] == experts_TX[:, None]) & (jnp.arange(X)[:, None] > jnp.arange(X)),
        2,
    )
    start_TE = rank_TE + (last_E - blocks_E) * rows
    place_TX = jnp.sum(is_chosen_TXE * start_TE[:, None], 2) + earlier_TX
    pair_Z = jnp.arange(T * X, dtype=jnp.int32)
    place_Z = jnp.where(
        experts_TX.reshape(-1) < experts, place_TX.reshape(-1), size * rows + pair_Z
    )
    empty_P = jnp.full(size * rows, T * X, jnp.int32)
    pair_P = empty_P.at[place_Z].set(pair_Z, mode="drop", unique_indices=True)
    weight_P = weights_TX.reshape(-1).at[pair_P].get(mode="fill", fill_value=0).astype(jnp.float32)
    expert_B = jnp.sum(last_E <= jnp.arange(size, dtype=jnp.int32)[:, None], 1, dtype=jnp.int32)
    return Blocks(place_Z, pair_P, weight_P, jnp.minimum(expert_B, experts - 1), last_E[-1:])


def exclusive_sums(counts_TE):
    """(exclusive prefix sums over tokens, the total), by chunks and then within chunks instead of a
    scan.
    """
    T, E = counts_TE.shape
    size = min(CHUNK, T)
    chunks_ACE = jnp.pad(counts_TE, ((0, -T % size), (0, 0))).reshape(-1, size, E)
    sums_AE = jnp.sum(chunks_ACE, 1)
    earlier_AE = exclusive_sum(sums_AE)
    inside_ACE = exclusive_sum(chunks_ACE)
    return (earlier_AE[:, None] + inside_ACE).reshape(-1, E)[:T], jnp.sum(sums_AE, 0)


def exclusive_sum(x_CE):
    """Exclusive prefix sums over the last axis but one."""
    index_C = jnp.arange(x_CE.shape[-2])
    return jnp.sum(jnp.where((index_C[:, None] > index_C)[..., None], x_CE[..., None, :, :], 0), -2)
