"""Blocks of rows, each of one expert: where each pair of a row and an expert lies in them.

Fixed sizes, and no loop.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

CHUNK = 32  # rows whose experts are counted together


class Blocks(NamedTuple):
    """A pair's place is its position among all rows of all blocks."""

    place_Z: Any  # of each pair; past the end if its expert is not here
    pair_P: Any  # which pair is at each place; the number of pairs where there is none
    weight_P: Any  # of that pair, in float32; 0 where there is none
    experts_B: Any  # whose the rows of each block are; there may be more numbers than blocks
    count_1: Any  # blocks that there are


def most_blocks(pairs: int, experts: int, rows: int) -> int:
    """Blocks that there can be: each expert has one that is not full, and no block is empty."""
    return max(1, min(pairs, (pairs + experts * (rows - 1)) // rows))


def align(experts_TX, weights_TX, experts: int, rows: int) -> Blocks:
    """See `quire.ops.moe.routing.align`."""
    T, X = experts_TX.shape
    size = most_blocks(T * X, experts, rows)
    expert_E = jnp.arange(experts, dtype=jnp.int32)
    chosen_TXE = (experts_TX[..., None] == expert_E).astype(jnp.int32)
    before_TE, counts_E = sums_before(jnp.sum(chosen_TXE, 1))
    blocks_E = (counts_E + rows - 1) // rows
    # where each expert's blocks end
    last_E = jnp.sum(jnp.where(expert_E[:, None] >= expert_E, blocks_E, 0), 1)
    earlier_TX = jnp.sum(
        (experts_TX[:, :, None] == experts_TX[:, None]) & (jnp.arange(X)[:, None] > jnp.arange(X)),
        2,
    )
    start_TE = before_TE + (last_E - blocks_E) * rows
    place_TX = jnp.sum(chosen_TXE * start_TE[:, None], 2) + earlier_TX
    pair_Z = jnp.arange(T * X, dtype=jnp.int32)
    place_Z = jnp.where(
        experts_TX.reshape(-1) < experts, place_TX.reshape(-1), size * rows + pair_Z
    )
    empty_P = jnp.full(size * rows, T * X, jnp.int32)
    pair_P = empty_P.at[place_Z].set(pair_Z, mode="drop", unique_indices=True)
    weight_P = weights_TX.reshape(-1).at[pair_P].get(mode="fill", fill_value=0).astype(jnp.float32)
    expert_B = jnp.sum(last_E <= jnp.arange(size, dtype=jnp.int32)[:, None], 1, dtype=jnp.int32)
    return Blocks(place_Z, pair_P, weight_P, jnp.minimum(expert_B, experts - 1), last_E[-1:])


def sums_before(counts_TE):
    """(of each row the sum of the rows before it, the sum of all), without a scan: by chunks, and
    then within each.
    """
    T, E = counts_TE.shape
    size = min(CHUNK, T)
    chunks_ACE = jnp.pad(counts_TE, ((0, -T % size), (0, 0))).reshape(-1, size, E)
    sums_AE = jnp.sum(chunks_ACE, 1)
    earlier_AE = before(sums_AE)
    inside_ACE = before(chunks_ACE)
    return (earlier_AE[:, None] + inside_ACE).reshape(-1, E)[:T], jnp.sum(sums_AE, 0)


def before(x_CE):
    """Of each place along the last axis but one, the sum of those before it."""
    at_C = jnp.arange(x_CE.shape[-2])
    return jnp.sum(jnp.where((at_C[:, None] > at_C)[..., None], x_CE[..., None, :, :], 0), -2)
