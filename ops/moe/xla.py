"""Experts by XLA: a loop over blocks of tokens with the same expert, which skips experts that no
token chose.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Tokens of a block. The shape is fixed, so that sums are batch-invariant.
BLOCK = 16


def mix_experts(x_TD, weights_TX, experts_TX, num_experts: int, expert):
    """The weighted sum of each token's experts.

    Args:
        x_TD: the tokens.
        weights_TX: the weight of each (token, expert) pair.
        experts_TX: the experts; pairs with the expert `num_experts` add nothing.
        num_experts: the number of experts.
        expert: `expert(e, rows_QD, row_Q)` computes expert e for a block of tokens, whose indices
            are row_Q.
    """
    X = experts_TX.shape[1]

    def run_expert(e, pair_Q):
        row_Q = pair_Q // X
        # zeros for the padding: native kernels skip the zero rows at the end of a block
        rows_QD = x_TD.at[row_Q].get(mode="fill", fill_value=0)
        return weight_results(expert(e, rows_QD, row_Q), weights_TX.reshape(-1)[pair_Q])

    out_ZD = by_expert(experts_TX.reshape(-1), num_experts, run_expert, x_TD.shape[1], jnp.float32)
    return add_pairs(out_ZD, X).astype(x_TD.dtype)


def weight_results(result_QD, weights_Q):
    """Each result times its weight.

    It must be called in the loop that computes the results. Otherwise XLA may fuse the
    multiplication with the sum, which changes the rounding.
    """
    return result_QD.astype(jnp.float32) * weights_Q[:, None]


def add_pairs(out_ZD, X: int) -> Any:
    """The sum over each token's X pairs, in a fixed order.

    (A reduction could round differently for another number of tokens.)
    """
    out_TXD = out_ZD.reshape(-1, X, out_ZD.shape[1])
    return sum((out_TXD[:, x] for x in range(1, X)), start=out_TXD[:, 0])


class SortedBlocks(NamedTuple):
    """Pairs sorted by expert and cut into blocks of one expert each:

        pairs   |e0 e0 e0|e2|e3 e3 e3 e3 e3|          sorted, no pair dropped
        blocks  [e0 e0 e0 .] [e2 . . .] [e3 e3 e3 e3] [e3 . . .]

    A dot is padding. Pairs without an expert are in no block.
    """

    order_Z: Any  # the pairs, sorted by expert
    counts_E: Any  # the number of pairs of each expert
    first_pair_E: Any  # the index of each expert's first pair among the sorted ones
    blocks_E: Any  # the number of blocks of each expert
    last_block_E: Any  # the end of each expert's blocks

    @classmethod
    def of(cls, experts_Z, num_experts: int) -> "SortedBlocks":
        order_Z = jnp.argsort(experts_Z, stable=True)
        counts_E = jnp.zeros(num_experts, jnp.int32).at[experts_Z].add(1, mode="drop")
        first_pair_E = jnp.cumsum(counts_E) - counts_E
        blocks_E = (counts_E + BLOCK - 1) // BLOCK
        return cls(order_Z, counts_E, first_pair_E, blocks_E, jnp.cumsum(blocks_E))

    @property
    def num_blocks(self):
        return self.last_block_E[-1]

    def at(self, block) -> tuple[Any, Any, Any]:
        """(the block's expert, its pairs, their indices among the sorted pairs).

        For padding both are the number of pairs.
        """
        num_pairs = self.order_Z.shape[0]
        e = jnp.searchsorted(self.last_block_E, block, side="right").astype(jnp.int32)
        offset_Q = (block - (self.last_block_E[e] - self.blocks_E[e])) * BLOCK + jnp.arange(BLOCK)
        valid_Q = offset_Q < self.counts_E[e]
        place_Q = jnp.where(valid_Q, self.first_pair_E[e] + offset_Q, num_pairs)
        return (
            e,
            jnp.where(valid_Q, self.order_Z[jnp.minimum(place_Q, num_pairs - 1)], num_pairs),
            place_Q,
        )


def by_expert(experts_Z, num_experts: int, run, width: int, dtype):
    """Compute `run(e, pair_Q)` for each pair: [Z, width]; zeros for the expert `num_experts`.

    The loop runs over the existing blocks only, so experts that no token chose are never read.
    """
    num_pairs = experts_Z.shape[0]
    blocks = SortedBlocks.of(experts_Z, num_experts)

    def run_block(block, out_ZD):
        e, pair_Q, place_Q = blocks.at(block)
        return out_ZD.at[place_Q].set(run(e, pair_Q).astype(dtype), mode="drop")

    out_ZD = jax.lax.fori_loop(
        0, blocks.num_blocks, run_block, jnp.zeros((num_pairs, width), dtype)
    )
    place_Z = (
        jnp.zeros(num_pairs, jnp.int32)
        .at[blocks.order_Z]
        .set(jnp.arange(num_pairs, dtype=jnp.int32))
    )
    return out_ZD[place_Z]


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""
