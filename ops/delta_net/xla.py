"""The gated delta rule by XLA, token by token for all sequences together."""

import jax
import jax.numpy as jnp

from ..ordered_sum import sum_pairs


def delta_rule(q_TKH, k_TKH, v_TNV, decay_TN, beta_TN, memory_BNHV, rows, corrects):
    """See `quire.ops.delta_net.delta_rule`. A pure decode step takes one iteration."""
    T, N, V = v_TNV.shape
    heads_per_key = N // q_TKH.shape[1]
    counts_B = rows.starts_B1[1:] - rows.starts_B1[:-1]

    def compute_token(index, carry):
        memory, kept_state, out_TNV = carry
        row_B = rows.starts_B1[:-1] + index
        live_B = index < counts_B
        index_B = jnp.minimum(row_B, T - 1)
        q_BNH1, k_BNH1 = (
            jnp.repeat(x_TKH[index_B], heads_per_key, axis=1)[..., None] for x_TKH in (q_TKH, k_TKH)
        )
        decay_BN = decay_TN[index_B]
        decayed = memory * (
            decay_BN[..., None] if decay_BN.ndim == 3 else decay_BN[..., None, None]
        )
        error_BNV = v_TNV[index_B] - sum_pairs(decayed * k_BNH1, -2) if corrects else v_TNV[index_B]
        error_BNV = error_BNV * beta_TN[index_B][..., None]
        updated = decayed + k_BNH1 * error_BNV[:, :, None]
        out_TNV = out_TNV.at[jnp.where(live_B, row_B, T)].set(
            sum_pairs(updated * q_BNH1, -2), mode="drop"
        )
        kept_state = jnp.where((index < rows.num_kept_B)[:, None, None, None], updated, kept_state)
        return jnp.where(live_B[:, None, None, None], updated, memory), kept_state, out_TNV

    initial_state = rows.states(memory_BNHV)
    _, kept_state, out_TNV = jax.lax.fori_loop(
        0, jnp.max(counts_B), compute_token, (initial_state, initial_state, jnp.zeros((T, N, V)))
    )
    return out_TNV, memory_BNHV.at[rows.slots_B].set(kept_state, mode="drop")


def varies() -> None:
    """Batch-invariant: all sums have a fixed order; see `quire.ops.implementations`."""
