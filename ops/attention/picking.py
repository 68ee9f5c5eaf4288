"""Attention to a part of a long context: each row picks the positions that score best by keys of
their own.

Rows that have no more positions than may be picked attend to all of them, by whichever
implementation serves. The others score every position with small queries and keys, keep the best,
and attend to these alone. Each row does so by itself, so that its bits are the same in any company.
"""

import math

import jax
import jax.numpy as jnp

from ...sharding import struct
from ..ordered_sum import sum_pairs
from ..precision import precision
from ..state_rows import sequence_for_row
from . import KVPages, QueryRows, paged_attention
from .backend import AttentionParams
from .xla import BLOCK, read

TILE = 4  # rows that pick together


@struct.dataclass
class Picks:
    """How rows choose: by the sum over heads of weight * relu(query . key); the keys are the last
    part of the pages'.

    Without queries they read what the layer before has picked.
    """

    q_TIH: jax.Array | None = None
    weight_TI: jax.Array | None = None
    count: int = struct.field(pytree_node=False, default=0)


def picking_attention(
    q_TNH, k_T1H, pages: KVPages, rows: QueryRows, picks: Picks, slots_TC, params: AttentionParams
):
    """(out_TNH, pages, slots_TC): where each row that picks has found what it reads; `slots_TC` are
    another layer's.
    """
    near = rows.replace(positions_T=jnp.minimum(rows.positions_T, picks.count - 1))
    spare = pages.k_PSKH.shape[-1] - q_TNH.shape[-1]
    wide_TNH = jnp.pad(q_TNH, ((0, 0), (0, 0), (0, spare)))
    near_TNH, pages = paged_attention(wide_TNH, k_T1H, None, pages, near, params)
    far_T = rows.positions_T >= picks.count
    if picks.q_TIH is not None:
        slots_TC = picked(picks, pages, rows, far_T)
    far_TNH = read_picked(q_TNH, pages, slots_TC, far_T, params.scale, params.value_dim)
    return jnp.where(far_T[:, None, None], far_TNH, near_TNH), pages, slots_TC


def picked(picks: Picks, pages: KVPages, rows: QueryRows, far_T):
    """The slots of the positions that score best, in the order of the positions; zeros for rows
    that read all.
    """
    P, S = pages.k_PSKH.shape[:2]
    M = rows.tables_BM.shape[1]
    dim = picks.q_TIH.shape[-1]
    exact = precision(picks.q_TIH)
    pages_a_block = max(1, BLOCK // S)
    blocks = -(-M // pages_a_block)
    J = pages_a_block * S
    table_BM = jnp.pad(rows.tables_BM, ((0, 0), (0, blocks * pages_a_block - M)))
    seq_T = jnp.minimum(sequence_for_row(rows.starts_B1, jnp.arange(len(far_T))), len(table_BM) - 1)

    def pick(far_R, position_R, seq_R, q_RIH, weight_RI):
        table_RM = table_BM[seq_R]

        def score(block, score_RL):
            page_RJ = jax.lax.dynamic_slice_in_dim(
                table_RM, block * pages_a_block, pages_a_block, axis=1
            )
            key_RJH = read(pages.k_PSKH, pages.k_scale_PKS, page_RJ)[:, 0, :, -dim:]
            own_RIJ = jnp.einsum(
                "RIH,RJH->RIJ", q_RIH, key_RJH, precision=exact, preferred_element_type=jnp.float32
            )
            score_RJ = sum_pairs(jnp.moveaxis(weight_RI[:, :, None] * jax.nn.relu(own_RIJ), 1, 2))
            position_J = block * J + jnp.arange(J)
            score_RJ = jnp.where(position_J <= position_R[:, None], score_RJ, -jnp.inf)
            return jax.lax.dynamic_update_slice_in_dim(score_RL, score_RJ, block * J, axis=1)

        trips = jnp.max(jnp.where(far_R, position_R, -1)) // J + 1
        score_RL = jax.lax.fori_loop(0, trips, score, jnp.full((len(far_R), blocks * J), -jnp.inf))
        position_RC = jnp.sort(jax.lax.top_k(score_RL, picks.count)[1], axis=1)
        page_RC = jnp.take_along_axis(table_RM, position_RC // S, axis=1)
        return page_RC * S + position_RC % S

    given = far_T, rows.positions_T, seq_T, picks.q_TIH.astype(jnp.float32), picks.weight_TI
    return by_tile(pick, given, (picks.count,), jnp.int32)


def read_picked(q_TNH, pages: KVPages, slots_TC, far_T, scale, value_dim):
    """What rows read of the positions in these slots; zeros for rows that read all."""
    P, S, exact = *pages.k_PSKH.shape[:2], precision(q_TNH)
    H = q_TNH.shape[-1]
    dtype = q_TNH.dtype
    # A page of a single position each, so that slots are pages.
    flat_P1H = pages.k_PSKH.reshape(P * S, 1, *pages.k_PSKH.shape[2:])
    scales = pages.k_scale_PKS
    scale_P11 = None if scales is None else jnp.swapaxes(scales, 1, 2).reshape(P * S, -1, 1)

    def attend(far_R, q_RNH, slot_RC):
        key_RCH = read(flat_P1H, scale_P11, slot_RC)[:, 0]
        score_RNC = jnp.einsum(
            "RNH,RCH->RNC",
            q_RNH,
            key_RCH[..., :H],
            precision=exact,
            preferred_element_type=jnp.float32,
        )
        weight_RNC = jnp.exp(score_RNC - jnp.max(score_RNC, axis=-1, keepdims=True))
        out_RNV = jnp.einsum(
            "RNC,RCV->RNV",
            weight_RNC,
            key_RCH[..., :value_dim],
            precision=exact,
            preferred_element_type=jnp.float32,
        )
        return (out_RNV / sum_pairs(weight_RNC)[..., None]).astype(dtype)

    given = far_T, q_TNH.astype(jnp.float32) * scale, slots_TC
    return by_tile(attend, given, (q_TNH.shape[1], value_dim), dtype)


def by_tile(compute, given, shape, dtype):
    """`compute` of a few rows at a time; of those tiles alone in which a row picks."""
    T = len(given[0])
    tiled = [jnp.pad(x, ((0, -T % TILE), *[(0, 0)] * (x.ndim - 1))) for x in given]
    tiled = [x.reshape(-1, TILE, *x.shape[1:]) for x in tiled]
    nothing = jnp.zeros((TILE, *shape), dtype)

    def one(tile):
        return jax.lax.cond(jnp.any(tile[0]), lambda: compute(*tile), lambda: nothing)

    found = jax.lax.map(one, tuple(tiled))
    return found.reshape(math.prod(found.shape[:2]), *shape)[:T]
