"""Adapter products by XLA, in blocks of tokens that have the same adapter."""

import jax
import jax.numpy as jnp

from ..moe.xla import BLOCK
from ..precision import precision
from . import Adapted


def adapt(weight: Adapted, x_TD, out_TO):
    """See `Adapted.adapt`.

    Every block writes BLOCK rows of the sorted results. The padding rows at its end are then
    overwritten by the next block, which starts after its last token.
    """
    adapter_rows = weight.adapter_rows
    T, D = x_TD.shape
    O = out_TO.shape[1]
    rank = weight.up.shape[1 if weight.matrix is None else 2]
    assert adapter_rows is not None

    def add(block, added_PO):
        # Without the barrier XLA converts the whole stacks to float32 ahead of the loop.
        stacks = jax.lax.optimization_barrier(
            (weight.down, weight.up, adapter_rows.slots_C[block], weight.matrix)
        )
        down, up, slot, matrix = stacks
        index = stack_index(slot, matrix)
        x_QD = x_TD.at[adapter_rows.tokens_CQ[block]].get(mode="fill", fill_value=0)
        inner_QR = dot(x_QD, down[index].reshape(D, -1))
        up_RO = up[index].reshape(rank, O)
        added = [
            dot(inner_QR[:, range_index * rank :][:, :rank], up_RO[:, range_start:range_end])
            for range_index, (range_start, range_end) in enumerate(weight.output_ranges)
        ]
        added_QO = added[0] if len(added) == 1 else jnp.concatenate(added, axis=1)
        return jax.lax.dynamic_update_slice(added_PO, added_QO, (adapter_rows.offsets_C[block], 0))

    with jax.named_scope("adapters"):
        added_PO = jax.lax.fori_loop(
            0, adapter_rows.num_blocks, add, jnp.zeros((T + BLOCK, O), jnp.float32)
        )
        added_TO = added_PO.at[adapter_rows.index_T].get(mode="fill", fill_value=0)
        index_T = stack_index(adapter_rows.slots_T, weight.matrix)
        dora_gain_TO = weight.dora_gain.at[index_T].get(mode="fill", fill_value=0)
    return out_TO + (added_TO + dora_gain_TO.reshape(out_TO.shape) * out_TO)


def stack_index(slots, matrix):
    """The index of these slots' adapters in the stacks."""
    return slots if matrix is None else (slots, matrix)


def dot(x_QI, w_IO):
    """Matrix product summed in float32."""
    return jnp.dot(x_QI, w_IO, precision=precision(x_QI, w_IO), preferred_element_type=jnp.float32)


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""
