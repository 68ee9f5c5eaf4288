"""Paged attention in plain XLA: blockwise over pages with an online softmax, no gather of the whole table.

A row's result has the same bits in any batch and any chunk: blocks lie at fixed multiples of `BLOCK`, a block that a
row does not see leaves it as it is, and every sum runs in an order that the number of rows does not change.
"""

import jax
import jax.numpy as jnp

from ..sums import sum_pairs
from . import KVPages

BLOCK = 64  # key positions a loop step
TILE = 16  # query rows a tile where sequences bring more than one


def paged_attention(q_TNH, k_TKH, v_TKH, pages, rows, *, scale, window, soft_cap, sinks_N, value_dim):
    """See `quire.ops.attention.paged_attention`. R is the rows of a tile times the query heads of a KV head."""
    if k_TKH is not None:
        pages = append(pages, k_TKH, v_TKH, rows.slots_T)
    T, N, H = q_TNH.shape
    P, S, K, _ = pages.k_PSKH.shape
    B, G = rows.starts_B1.shape[0] - 1, N // K
    width = pages.v_PSKH.shape[-1] if value_dim is None else value_dim
    row_CQ, seq_C, valid_CQ = tiles(rows.starts_B1, T, tile_size(T, B, G, width))
    row_CQ = jnp.minimum(row_CQ, T - 1)
    position_CQ = jnp.where(valid_CQ, rows.positions_T[row_CQ], -1)
    position_CR = jnp.repeat(position_CQ, G, axis=1)
    C, Q = row_CQ.shape
    q_CQKGH = q_TNH[row_CQ].reshape(C, Q, K, G, H).astype(jnp.float32) * scale
    q_CKRH = jnp.moveaxis(q_CQKGH, 2, 1).reshape(C, K, Q * G, H)

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
        key_CKJH = read(pages.k_PSKH, pages.k_scale_PSK, page_CJ)
        latent = pages.v_PSKH is None
        value_CKJH = key_CKJH[..., :width] if latent else read(pages.v_PSKH, pages.v_scale_PSK, page_CJ)
        # Outside these positions a page holds whatever its last owner left: 0 * NaN would poison the sum.
        position_CJ = block_C[:, None] * J + jnp.arange(J)
        owned_CJ = position_CJ <= newest_C[:, None]
        seen_CRJ = position_CJ[:, None, :] <= position_CR[:, :, None]
        if window is not None:
            owned_CJ &= position_CJ > oldest_C[:, None] - window
            seen_CRJ &= position_CJ[:, None, :] > position_CR[:, :, None] - window
        value_CKJH = jnp.where(owned_CJ[:, None, :, None], value_CKJH, 0)

        score = jnp.einsum("CKRH,CKJH->CKRJ", q_CKRH, key_CKJH, preferred_element_type=jnp.float32)
        if soft_cap is not None:
            score = soft_cap * jnp.tanh(score / soft_cap)
        score = jnp.where(seen_CRJ[:, None], score, -jnp.inf)
        new_best = jnp.maximum(best, jnp.max(score, axis=-1))
        finite = jnp.where(jnp.isneginf(new_best), 0.0, new_best)
        shrink = jnp.exp(best - finite)
        weight = jnp.exp(score - finite[..., None])
        mixed = jnp.einsum("CKRJ,CKJH->CKRH", weight, value_CKJH, preferred_element_type=jnp.float32)
        return new_best, total * shrink + sum_pairs(weight), out * shrink[..., None] + mixed

    shape = (C, K, Q * G)
    if sinks_N is None:
        best, total = jnp.full(shape, -jnp.inf), jnp.zeros(shape)
    else:  # a sink is one more score in the softmax that carries no value
        best, total = jnp.tile(sinks_N.astype(jnp.float32).reshape(K, G), (C, 1, Q)), jnp.ones(shape)
    start = (best, total, jnp.zeros((*shape, width)))
    _, total, out = jax.lax.fori_loop(0, trips, attend_block, start)
    out = out / jnp.where(total == 0, 1, total)[..., None]
    out_CQNH = jnp.moveaxis(out.reshape(C, K, Q, G, width), 1, 2).reshape(C, Q, N, width)
    flat = jnp.where(valid_CQ, row_CQ, T).reshape(-1)
    out_TNH = (
        jnp.zeros((T, N, width), q_TNH.dtype)
        .at[flat]
        .set(out_CQNH.reshape(-1, N, width).astype(q_TNH.dtype), mode="drop")
    )
    return out_TNH, pages


def tile_size(T: int, B: int, G: int, width: int) -> int:
    """Query rows a tile: such that XLA's CPU picks kernels that sum in the same order for any T and B.

    It was seen to keep the order of `weight @ value` for 2 to 48 rows, and for any more where the width is a multiple
    of 64; a single row is summed in another.
    """
    if T == B:
        return 1 if G > 1 else 2
    return TILE if width % 64 == 0 else max(1, min(TILE, 48 // G))


def read(pages_PSKH, scale_PSK, page_CJ):
    """The pages of each tile one after another, in float32: [C, K, positions, H]."""
    block_CJKH = pages_PSKH[page_CJ].reshape(page_CJ.shape[0], -1, *pages_PSKH.shape[2:])
    if scale_PSK is not None:
        scale_CJK = scale_PSK[page_CJ].reshape(block_CJKH.shape[:3])
        block_CJKH = block_CJKH.astype(jnp.float32) * scale_CJK[..., None]
    if block_CJKH.dtype == jnp.uint16:  # a bfloat16 is the upper half of a float32
        block_CJKH = jax.lax.bitcast_convert_type(block_CJKH.astype(jnp.uint32) << 16, jnp.float32)
    return jnp.moveaxis(block_CJKH.astype(jnp.float32), 1, 2)


def append(pages: KVPages, k_TKH, v_TKH, slots_T) -> KVPages:
    """Write each row's key and value to its slot, in place when the cache is donated."""

    def write(pages_PSX, new_TX):
        P, S, *rest = pages_PSX.shape
        if pages_PSX.dtype == jnp.uint16:
            new_TX = jax.lax.bitcast_convert_type(new_TX.astype(jnp.bfloat16), jnp.uint16)
        flat = pages_PSX.reshape(P * S, *rest).at[slots_T].set(new_TX.astype(pages_PSX.dtype))
        return flat.reshape(P, S, *rest)

    def write_scaled(pages_PSKH, scale_PSK, new_TKH):
        if scale_PSK is None:
            return (None if pages_PSKH is None else write(pages_PSKH, new_TKH)), None
        codes_TKH, scale_TK = quantise(new_TKH)
        return write(pages_PSKH, codes_TKH), write(scale_PSK, scale_TK)

    k_PSKH, k_scale_PSK = write_scaled(pages.k_PSKH, pages.k_scale_PSK, k_TKH)
    v_PSKH, v_scale_PSK = write_scaled(pages.v_PSKH, pages.v_scale_PSK, v_TKH)
    return KVPages(k_PSKH, v_PSKH, k_scale_PSK, v_scale_PSK)


def quantise(x_TKH):
    """(signed bytes, the scale of each row): the largest of a row becomes 127. The kernels round in the same way."""
    x_TKH = x_TKH.astype(jnp.float32)
    most_TK = jnp.max(jnp.abs(x_TKH), axis=-1)
    inverse_TK = 127.0 / jnp.where(most_TK == 0, 1, most_TK)
    # Times a constant and not divided by one: what a compiler would make of that is not always the same.
    return jnp.round(x_TKH * inverse_TK[..., None]).astype(jnp.int8), most_TK * jnp.float32(1 / 127)


def tiles(starts_B1, T: int, Q: int):
    """Cut each sequence's rows into tiles of Q: (row_CQ, seq_C, valid_CQ), with as many tiles as could be needed."""
    B = starts_B1.shape[0] - 1
    rows_B = starts_B1[1:] - starts_B1[:-1]
    tiles_B = (rows_B + Q - 1) // Q
    end_B = jnp.cumsum(tiles_B)
    tile_C = jnp.arange(min(T, B + T // Q))
    seq_C = jnp.minimum(jnp.searchsorted(end_B, tile_C, side="right"), B - 1).astype(jnp.int32)
    offset_CQ = (tile_C - (end_B[seq_C] - tiles_B[seq_C]))[:, None] * Q + jnp.arange(Q)
    valid_CQ = (offset_CQ < rows_B[seq_C][:, None]) & (tile_C < end_B[-1])[:, None]
    return starts_B1[seq_C][:, None] + offset_CQ, seq_C, valid_CQ
