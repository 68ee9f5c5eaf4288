"""The gated delta rule in plain XLA: the first row of each sequence, then the second of each, and
so on.
"""

import jax
import jax.numpy as jnp

from ..ordered_sum import sum_pairs


def delta_rule(q_TKH, k_TKH, v_TNV, decay_TN, beta_TN, memory_BNHV, rows, corrects):
    """See `quire.ops.delta_net.delta_rule`. A step that only decodes takes one turn."""
    T, N, V = v_TNV.shape
    shared = N // q_TKH.shape[1]
    counts_B = rows.starts_B1[1:] - rows.starts_B1[:-1]

    def turn(number, carry):
        memory, kept, out_TNV = carry
        row_B = rows.starts_B1[:-1] + number
        live_B = number < counts_B
        at_B = jnp.minimum(row_B, T - 1)
        q_BNH1, k_BNH1 = (
            jnp.repeat(x_TKH[at_B], shared, axis=1)[..., None] for x_TKH in (q_TKH, k_TKH)
        )
        decay_BN = decay_TN[at_B]
        faded = memory * (decay_BN[..., None] if decay_BN.ndim == 3 else decay_BN[..., None, None])
        error_BNV = v_TNV[at_B] - sum_pairs(faded * k_BNH1, -2) if corrects else v_TNV[at_B]
        error_BNV = error_BNV * beta_TN[at_B][..., None]
        faded = faded + k_BNH1 * error_BNV[:, :, None]
        out_TNV = out_TNV.at[jnp.where(live_B, row_B, T)].set(
            sum_pairs(faded * q_BNH1, -2), mode="drop"
        )
        kept = jnp.where((number < rows.num_kept_B)[:, None, None, None], faded, kept)
        return jnp.where(live_B[:, None, None, None], faded, memory), kept, out_TNV

    before = rows.states(memory_BNHV)
    _, kept, out_TNV = jax.lax.fori_loop(
        0, jnp.max(counts_B), turn, (before, before, jnp.zeros((T, N, V)))
    )
    return out_TNV, memory_BNHV.at[rows.slots_B].set(kept, mode="drop")


def varies() -> None:
    """A row's bits are the same in any company: what is added up is so in an order that is written
    down.
    """
