"""Sparse attention with an indexer, as in DeepSeek-V3.2: rows attend to their top-k positions.

The indexer scores every position of the context with small queries and keys of its own, and
selects the `count` best. A row with at most `count` positions attends to all of them, by one of the
dense implementations. Rows are computed independently, so results are batch-invariant.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ...sharding import struct
from ..ordered_sum import sum_pairs
from ..precision import precision
from ..state_rows import sequence_for_row
from . import KVPages, QueryRows, paged_attention
from .backend import AttentionParams
from .xla import BLOCK, read

TILE = 4  # rows that are computed at once


class IndexQueries(struct.PyTreeNode):
    """The indexer's queries: a position's score is the sum over heads of weight * relu(q @ k).

    The indexer's keys are the last dimensions of the cached keys. Without queries, a layer uses the
    positions that an earlier layer has selected.
    """

    q_TIH: Any = None
    weight_TI: Any = None
    count: int = struct.field(pytree_node=False, default=0)


def sparse_attention(
    q_TNH,
    k_T1H,
    pages: KVPages,
    rows: QueryRows,
    index_queries: IndexQueries,
    slots_TC,
    params: AttentionParams,
):
    """Append the new keys and attend, each row to at most `index_queries.count` positions.

    Args:
        slots_TC: Slots that an earlier layer has selected, for layers without an indexer.

    Returns:
        (out_TNH, pages, slots_TC): `slots_TC` are the slots of the selected positions.
    """
    dense_rows = rows.replace(positions_T=jnp.minimum(rows.positions_T, index_queries.count - 1))
    padding = pages.k_PSKH.shape[-1] - q_TNH.shape[-1]
    padded_TNH = jnp.pad(q_TNH, ((0, 0), (0, 0), (0, padding)))
    dense_TNH, pages = paged_attention(padded_TNH, k_T1H, None, pages, dense_rows, params)
    is_sparse_T = rows.positions_T >= index_queries.count
    if index_queries.q_TIH is not None:
        slots_TC = select_slots(index_queries, pages, rows, is_sparse_T)
    sparse_TNH = attend_slots(q_TNH, pages, slots_TC, is_sparse_T, params.scale, params.value_dim)
    return jnp.where(is_sparse_T[:, None, None], sparse_TNH, dense_TNH), pages, slots_TC


def select_slots(index_queries: IndexQueries, pages: KVPages, rows: QueryRows, is_sparse_T):
    """Select the slots of the best-scoring positions, in the order of the positions.

    Rows that are not sparse get zeros, if no row of their tile is sparse.
    """
    P, S = pages.k_PSKH.shape[:2]
    M = rows.tables_BM.shape[1]
    dim = index_queries.q_TIH.shape[-1]
    exact = precision(index_queries.q_TIH)
    pages_a_block = max(1, BLOCK // S)
    max_blocks = -(-M // pages_a_block)
    J = pages_a_block * S
    table_BM = jnp.pad(rows.tables_BM, ((0, 0), (0, max_blocks * pages_a_block - M)))
    seq_T = jnp.minimum(
        sequence_for_row(rows.starts_B1, jnp.arange(len(is_sparse_T))), len(table_BM) - 1
    )

    def pick(is_sparse_R, position_R, seq_R, q_RIH, weight_RI):
        table_RM = table_BM[seq_R]

        def score(block, score_RL):
            page_RJ = jax.lax.dynamic_slice_in_dim(
                table_RM, block * pages_a_block, pages_a_block, axis=1
            )
            key_RJH = read(pages.k_PSKH, pages.k_scale_PKS, page_RJ)[:, 0, :, -dim:]
            score_RIJ = jnp.einsum(
                "RIH,RJH->RIJ", q_RIH, key_RJH, precision=exact, preferred_element_type=jnp.float32
            )
            score_RJ = sum_pairs(jnp.moveaxis(weight_RI[:, :, None] * jax.nn.relu(score_RIJ), 1, 2))
            position_J = block * J + jnp.arange(J)
            score_RJ = jnp.where(position_J <= position_R[:, None], score_RJ, -jnp.inf)
            return jax.lax.dynamic_update_slice_in_dim(score_RL, score_RJ, block * J, axis=1)

        num_blocks = jnp.max(jnp.where(is_sparse_R, position_R, -1)) // J + 1
        score_RL = jax.lax.fori_loop(
            0, num_blocks, score, jnp.full((len(is_sparse_R), max_blocks * J), -jnp.inf)
        )
        position_RC = jnp.sort(jax.lax.top_k(score_RL, index_queries.count)[1], axis=1)
        page_RC = jnp.take_along_axis(table_RM, position_RC // S, axis=1)
        return page_RC * S + position_RC % S

    inputs = (
        is_sparse_T,
        rows.positions_T,
        seq_T,
        index_queries.q_TIH.astype(jnp.float32),
        index_queries.weight_TI,
    )
    return map_tiles(pick, inputs, (index_queries.count,), jnp.int32)


def attend_slots(q_TNH, pages: KVPages, slots_TC, is_sparse_T, scale, value_dim):
    """Attend to the positions in these slots; results of rows that are not sparse are unused."""
    P, S, exact = *pages.k_PSKH.shape[:2], precision(q_TNH)
    H = q_TNH.shape[-1]
    dtype = q_TNH.dtype
    # Viewed as pages of one position, so that slots are page numbers.
    flat_P1H = pages.k_PSKH.reshape(P * S, 1, *pages.k_PSKH.shape[2:])
    scales = pages.k_scale_PKS
    scale_P11 = None if scales is None else jnp.swapaxes(scales, 1, 2).reshape(P * S, -1, 1)

    def attend(is_sparse_R, q_RNH, slot_RC):
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

    inputs = is_sparse_T, q_TNH.astype(jnp.float32) * scale, slots_TC
    return map_tiles(attend, inputs, (q_TNH.shape[1], value_dim), dtype)


def map_tiles(compute, inputs, shape, dtype):
    """Call `compute` for tiles of rows, and skip tiles without a sparse row.

    Args:
        inputs: Arrays by row; the first is `is_sparse_T`.
        shape: Shape of a row's result.
    """
    T = len(inputs[0])
    tiled_inputs = [jnp.pad(x, ((0, -T % TILE), *[(0, 0)] * (x.ndim - 1))) for x in inputs]
    tiled_inputs = [x.reshape(-1, TILE, *x.shape[1:]) for x in tiled_inputs]
    zeros = jnp.zeros((TILE, *shape), dtype)

    def compute_tile(tile):
        return jax.lax.cond(jnp.any(tile[0]), lambda: compute(*tile), lambda: zeros)

    outputs = jax.lax.map(compute_tile, tuple(tiled_inputs))
    return outputs.reshape(math.prod(outputs.shape[:2]), *shape)[:T]
