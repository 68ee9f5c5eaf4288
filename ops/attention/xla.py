"""Paged attention in plain XLA: blockwise over pages with an online softmax, no gather of the whole table."""

import jax
import jax.numpy as jnp

from . import KVPages

BLOCK = 64  # key positions a loop step; blocks lie at multiples of it, so a row's sums do not depend on the batch
TILE = 16  # query rows a tile where sequences bring more than one


def paged_attention(q_TNH, k_TKH, v_TKH, pages, rows, *, scale, window, soft_cap, sinks_N, value_dim):
    """See `quire.ops.attention.paged_attention`."""
    if k_TKH is not None:
        pages = append(pages, k_TKH, v_TKH, rows.slots_T)
    T, N, H = q_TNH.shape
    P, S, K, _ = pages.k_PSKH.shape
    B = rows.starts_B1.shape[0] - 1
    width = pages.v_PSKH.shape[-1] if value_dim is None else value_dim
    row_CQ, seq_C, valid_CQ = tiles(rows.starts_B1, T, 1 if T == B else TILE)
    row_CQ = jnp.minimum(row_CQ, T - 1)
    position_CQ = jnp.where(valid_CQ, rows.positions_T[row_CQ], -1)
    q_CQKGH = q_TNH[row_CQ].reshape(*row_CQ.shape, K, N // K, H).astype(jnp.float32) * scale

    pages_a_block = max(1, BLOCK // S)
    J = pages_a_block * S
    newest_C = jnp.max(position_CQ, axis=1)
    oldest_C = jnp.min(jnp.where(valid_CQ, position_CQ, jnp.iinfo(jnp.int32).max), axis=1)
    first_C = jnp.zeros_like(newest_C) if window is None else jnp.maximum(oldest_C - window + 1, 0) // J
    first_C = jnp.where(newest_C < 0, 0, first_C)
    trips = jnp.max(newest_C // J + 1 - first_C)

    def attend_block(i, carry):
        best, total, out = carry
        block_C = first_C + i
        page_CJ = jnp.minimum(block_C[:, None] * pages_a_block + jnp.arange(pages_a_block), rows.tables_BM.shape[1] - 1)
        page_CJ = rows.tables_BM[seq_C[:, None], page_CJ]
        key_CJKH = pages.k_PSKH[page_CJ].reshape(-1, J, K, H).astype(jnp.float32)
        key_position_CJ = block_C[:, None] * J + jnp.arange(J)
        if pages.v_PSKH is None:
            value_CJKH = key_CJKH[..., :width]
        else:
            value_CJKH = pages.v_PSKH[page_CJ].reshape(-1, J, K, width).astype(jnp.float32)
        # Outside of what the tile sees a page holds whatever its last owner left: 0 * NaN would poison the sum.
        owned_CJ = key_position_CJ <= newest_C[:, None]
        if window is not None:
            owned_CJ &= key_position_CJ > oldest_C[:, None] - window
        value_CJKH = jnp.where(owned_CJ[:, :, None, None], value_CJKH, 0)

        score = jnp.einsum("CQKGH,CJKH->CKGQJ", q_CQKGH, key_CJKH, preferred_element_type=jnp.float32)
        if soft_cap is not None:
            score = soft_cap * jnp.tanh(score / soft_cap)
        seen_CQJ = key_position_CJ[:, None, :] <= position_CQ[:, :, None]
        if window is not None:
            seen_CQJ &= key_position_CJ[:, None, :] > position_CQ[:, :, None] - window
        score = jnp.where(seen_CQJ[:, None, None], score, -jnp.inf)
        new_best = jnp.maximum(best, jnp.max(score, axis=-1))
        finite = jnp.where(jnp.isneginf(new_best), 0.0, new_best)
        shrink = jnp.exp(best - finite)
        weight = jnp.exp(score - finite[..., None])
        total = total * shrink + jnp.sum(weight, axis=-1)
        mixed = jnp.einsum("CKGQJ,CJKH->CKGQH", weight, value_CJKH, preferred_element_type=jnp.float32)
        return new_best, total, out * shrink[..., None] + mixed

    shape = (seq_C.shape[0], K, N // K, row_CQ.shape[1])
    if sinks_N is None:
        best, total = jnp.full(shape, -jnp.inf), jnp.zeros(shape)
    else:  # a sink is one more score in the softmax that carries no value
        best, total = jnp.broadcast_to(sinks_N.astype(jnp.float32).reshape(K, N // K, 1), shape), jnp.ones(shape)
    start = (best, total, jnp.zeros((*shape, width)))
    _, total, out = jax.lax.fori_loop(0, trips, attend_block, start)
    out = out / jnp.where(total == 0, 1, total)[..., None]
    out_CQNH = jnp.moveaxis(out, 3, 1).reshape(*row_CQ.shape, N, width)
    flat = jnp.where(valid_CQ, row_CQ, T).reshape(-1)
    out_TNH = (
        jnp.zeros((T, N, width), q_TNH.dtype)
        .at[flat]
        .set(out_CQNH.reshape(-1, N, width).astype(q_TNH.dtype), mode="drop")
    )
    return out_TNH, pages


def append(pages: KVPages, k_TKH, v_TKH, slots_T) -> KVPages:
    """Write each row's key and value to its slot, in place when the cache is donated."""

    def write(page_PSKH, new_TKH):
        P, S, K, H = page_PSKH.shape
        flat, new = page_PSKH.reshape(P * S, K, H), new_TKH.astype(page_PSKH.dtype)
        if flat.dtype == jnp.bfloat16:  # XLA's CPU scatter goes through float32 and copies the array; integers do not
            flat, new = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (flat, new))
            return jax.lax.bitcast_convert_type(flat.at[slots_T].set(new), jnp.bfloat16).reshape(P, S, K, H)
        return flat.at[slots_T].set(new).reshape(P, S, K, H)

    return KVPages(
        k_PSKH=write(pages.k_PSKH, k_TKH),
        v_PSKH=None if pages.v_PSKH is None else write(pages.v_PSKH, v_TKH),
    )


def tiles(starts_B1, T: int, Q: int):
    """Cut each sequence's rows into tiles of Q: (row_CQ, seq_C, valid_CQ), with as many tiles as could be needed."""
    B = starts_B1.shape[0] - 1
    rows_B = starts_B1[1:] - starts_B1[:-1]
    tiles_B = (rows_B + Q - 1) // Q
    end_B = jnp.cumsum(tiles_B)
    C = B if Q == 1 else min(T, B + T // Q)
    tile_C = jnp.arange(C)
    seq_C = jnp.minimum(jnp.searchsorted(end_B, tile_C, side="right"), B - 1).astype(jnp.int32)
    offset_CQ = (tile_C - (end_B[seq_C] - tiles_B[seq_C]))[:, None] * Q + jnp.arange(Q)
    valid_CQ = (offset_CQ < rows_B[seq_C][:, None]) & (tile_C < end_B[-1])[:, None]
    return starts_B1[seq_C][:, None] + offset_CQ, seq_C, valid_CQ
