"""What adapters add, by XLA: in blocks of one slot each."""

import jax
import jax.numpy as jnp

from ..moe.xla import BLOCK
from ..precision import precision
from . import Adapted


def adapt(weight: Adapted, x_TD, out_TO):
    """See `Adapted.adapt`. A block may write more rows than it has: the next one, which begins
    behind its last, writes over them."""
    own = weight.rows_of
    T, D = x_TD.shape
    O = out_TO.shape[1]
    rank = weight.up.shape[1 if weight.which is None else 2]
    assert own is not None

    def add(block, added_PO):
        # Without the barrier XLA widens the whole stacks to float32 ahead of the loop.
        found = jax.lax.optimization_barrier(
            (weight.down, weight.up, own.slots_C[block], weight.which)
        )
        down, up, slot, which = found
        at = place(slot, which)
        x_QD = x_TD.at[own.rows_CQ[block]].get(mode="fill", fill_value=0)
        inner_QR = dot(x_QD, down[at].reshape(D, -1))
        up_RO = up[at].reshape(rank, O)
        added = [
            dot(inner_QR[:, part * rank :][:, :rank], up_RO[:, first:last])
            for part, (first, last) in enumerate(weight.parts)
        ]
        added_QO = added[0] if len(added) == 1 else jnp.concatenate(added, axis=1)
        return jax.lax.dynamic_update_slice(added_PO, added_QO, (own.starts_C[block], 0))

    with jax.named_scope("adapters"):
        added_PO = jax.lax.fori_loop(0, own.num_blocks, add, jnp.zeros((T + BLOCK, O), jnp.float32))
        added_TO = added_PO.at[own.places_T].get(mode="fill", fill_value=0)
        longer_T = weight.longer.at[place(own.slots_T, weight.which)].get(mode="fill", fill_value=0)
    return out_TO + (added_TO + longer_T.reshape(out_TO.shape) * out_TO)


def place(slots, which):
    """Where in the stacks the matrices of these slots are."""
    return slots if which is None else (slots, which)


def dot(x_QI, w_IO):
    """Summed in float32."""
    return jnp.dot(x_QI, w_IO, precision=precision(x_QI, w_IO), preferred_element_type=jnp.float32)


def varies() -> None:
    """A row's bits are the same in any company."""
