"""Experts by XLA: blocks of rows, each of one expert, and products with the experts that were
chosen alone.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# rows of one expert computed together: one fixed shape, so that a row's sums never depend on the
# batch
BLOCK = 16


def mix_experts(x_TD, weights_TX, experts_TX, num_experts: int, expert):
    """sum_x weight * expert(x), where `expert(e, rows_QD, row_Q)` computes one expert over a block
    of rows.

    A pair whose expert is `num_experts` belongs to no expert here and adds nothing.
    """
    X = experts_TX.shape[1]

    def run(e, pair_Q):
        row_Q = pair_Q // X
        # kernels stop at the last row that is not zeros
        rows_QD = x_TD.at[row_Q].get(mode="fill", fill_value=0)
        return weighed(expert(e, rows_QD, row_Q), weights_TX.reshape(-1)[pair_Q])

    out_ZD = by_expert(experts_TX.reshape(-1), num_experts, run, x_TD.shape[1], jnp.float32)
    return add_pairs(out_ZD, X).astype(x_TD.dtype)


def weighed(result_QD, weights_Q):
    """Each result times its weight. It must be called in the loop that makes the results: a product
    that XLA fuses with the sum may round differently."""
    return result_QD.astype(jnp.float32) * weights_Q[:, None]


def add_pairs(out_ZD, X: int):
    """The sum over each row's X pairs, by bare additions in a written order: a reduction may round
    differently at another number of rows."""
    out_TXD = out_ZD.reshape(-1, X, out_ZD.shape[1])
    return sum((out_TXD[:, x] for x in range(1, X)), start=out_TXD[:, 0])


class Blocks(NamedTuple):
    """Pairs sorted by expert, each expert's share padded to whole blocks:

        pairs   |e0 e0 e0|e2|e3 e3 e3 e3 e3|          sorted, no pair dropped
        blocks  [e0 e0 e0 .] [e2 . . .] [e3 e3 e3 e3] [e3 . . .]

    A dot is padding. A pair of no expert is in no block.
    """

    order_Z: Any
    counts_E: Any
    first_pair_E: Any
    blocks_E: Any
    last_block_E: Any

    @classmethod
    def of(cls, experts_Z, num_experts: int) -> "Blocks":
        order_Z = jnp.argsort(experts_Z, stable=True)
        counts_E = jnp.zeros(num_experts, jnp.int32).at[experts_Z].add(1, mode="drop")
        first_pair_E = jnp.cumsum(counts_E) - counts_E
        blocks_E = (counts_E + BLOCK - 1) // BLOCK
        return cls(order_Z, counts_E, first_pair_E, blocks_E, jnp.cumsum(blocks_E))

    @property
    def num_blocks(self):
        return self.last_block_E[-1]

    def at(self, block) -> tuple[Any, Any, Any]:
        """(a block's expert, its pairs, their places among those sorted); of padding both are one
        past the last.
        """
        pairs = self.order_Z.shape[0]
        e = jnp.searchsorted(self.last_block_E, block, side="right").astype(jnp.int32)
        offset = (block - (self.last_block_E[e] - self.blocks_E[e])) * BLOCK + jnp.arange(BLOCK)
        valid = offset < self.counts_E[e]
        place_Q = jnp.where(valid, self.first_pair_E[e] + offset, pairs)
        return e, jnp.where(valid, self.order_Z[jnp.minimum(place_Q, pairs - 1)], pairs), place_Q


def by_expert(experts_Z, num_experts: int, run, width: int, dtype):
    """`run(e, pair_Q)` of each pair and its expert, [Z, width]; zeros where the expert is
    `num_experts`.

    The loop runs over the blocks that exist, so an expert that no row chose is never read.
    """
    pairs = experts_Z.shape[0]
    blocks = Blocks.of(experts_Z, num_experts)

    def run_block(block, out_ZD):
        e, pair_Q, place_Q = blocks.at(block)
        return out_ZD.at[place_Q].set(run(e, pair_Q).astype(dtype), mode="drop")

    out_ZD = jax.lax.fori_loop(0, blocks.num_blocks, run_block, jnp.zeros((pairs, width), dtype))
    place = jnp.zeros(pairs, jnp.int32).at[blocks.order_Z].set(jnp.arange(pairs, dtype=jnp.int32))
    return out_ZD[place]


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""
