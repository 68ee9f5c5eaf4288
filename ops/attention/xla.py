"""Paged attention in plain XLA: blockwise over pages with an online softmax, no gather of the whole
table.

A row's bits are the same in any batch and any chunk: blocks lie at multiples of `BLOCK`, a block
that a row does not see does not change it, and every sum runs in an order that does not depend on
the number of rows.

Where each device has a part of every page's positions, each attends to its own, and their results
are merged.
"""

import jax
import jax.numpy as jnp

from ..ordered_sum import sum_pairs
from ..precision import precision
from . import KVPages, four_bits
from .backend import AttentionBackend, AttentionParams, AttentionShape

BLOCK = 64  # key positions of a loop step
TILE = 16  # query rows of a tile where sequences have more than one


def attend(q_TNH, k_TKH, v_TKH, pages, rows, params: AttentionParams, sinks_N=None):
    """See `quire.ops.attention.paged_attention`.

    R: the rows of a tile times the query heads of a KV head.
    """
    T, N, H = q_TNH.shape
    exact = precision(q_TNH)
    window = params.window
    soft_cap = params.soft_cap
    context = params.context
    paired = pages.kv_PSYH is not None
    packed = four_bits.packed(pages.k_PSKH)
    # own: positions of a page on this device
    own, K = (pages.kv_PSYH if paired else pages.k_PSKH).shape[1:3]
    S = own * context.size
    first = own * context.index()
    if k_TKH is not None:
        pages = append(pages, k_TKH, v_TKH, own_slots(rows.slots_T, pages, S, own, first))
    K = K // 2 if paired else K
    B = rows.starts_B1.shape[0] - 1
    G = N // K
    width = (
        (H if paired else pages.v_PSKH.shape[-1] * (1 + packed))
        if params.value_dim is None
        else params.value_dim
    )
    row_CQ, seq_C, valid_CQ = tiles(rows.starts_B1, T, tile_size(T, B, G, width))
    row_CQ = jnp.minimum(row_CQ, T - 1)
    position_CQ = jnp.where(valid_CQ, rows.positions_T[row_CQ], -1)
    position_CR = jnp.repeat(position_CQ, G, axis=1)
    sees_CR = position_CR  # the last position that a row sees
    if params.lookahead:
        last_C = rows.positions_T[jnp.maximum(rows.starts_B1[seq_C + 1] - 1, 0)]
        sees_CR = jnp.where(
            position_CR < 0, -1, jnp.minimum(position_CR + params.lookahead, last_C[:, None])
        )
    C, Q = row_CQ.shape
    turned_TNH = four_bits.rotate(q_TNH) if packed else q_TNH
    q_CQKGH = turned_TNH[row_CQ].reshape(C, Q, K, G, H).astype(jnp.float32) * params.scale
    q_CKRH = jnp.moveaxis(q_CQKGH, 2, 1).reshape(C, K, Q * G, H)

    pages_a_block = max(1, BLOCK // own)
    J = pages_a_block * S
    offset_J = (jnp.arange(pages_a_block)[:, None] * S + first + jnp.arange(own)).reshape(-1)
    newest_C = jnp.max(sees_CR, axis=1)
    oldest_C = jnp.min(jnp.where(valid_CQ, position_CQ, jnp.iinfo(jnp.int32).max), axis=1)

    def hidden(position):
        """The last position before those that a row sees."""
        return position // window * window - 1 if params.chunked else position - window

    first_C = (
        jnp.zeros_like(newest_C) if window is None else jnp.maximum(hidden(oldest_C) + 1, 0) // J
    )
    first_C = jnp.where(newest_C < 0, 0, first_C)
    trips = jnp.max(newest_C // J + 1 - first_C)

    def attend_block(i, carry):
        best, total, out = carry
        block_C = first_C + i
        page_CJ = jnp.minimum(
            block_C[:, None] * pages_a_block + jnp.arange(pages_a_block),
            rows.tables_BM.shape[1] - 1,
        )
        page_CJ = rows.tables_BM[seq_C[:, None], page_CJ]
        key_CKJH, value_CKJH = read_both(pages, page_CJ, width)
        # Elsewhere a page holds what its last owner left, which may be NaN: 0 * NaN is NaN.
        position_CJ = block_C[:, None] * J + offset_J
        owned_CJ = position_CJ <= newest_C[:, None]
        seen_CRJ = position_CJ[:, None, :] <= sees_CR[:, :, None]
        if window is not None:
            owned_CJ &= position_CJ > hidden(oldest_C)[:, None]
            seen_CRJ &= position_CJ[:, None, :] > hidden(position_CR)[:, :, None]
        value_CKJH = jnp.where(owned_CJ[:, None, :, None], value_CKJH, 0)

        score = jnp.einsum(
            "CKRH,CKJH->CKRJ", q_CKRH, key_CKJH, precision=exact, preferred_element_type=jnp.float32
        )
        if soft_cap is not None:
            score = soft_cap * jnp.tanh(score / soft_cap)
        score = jnp.where(seen_CRJ[:, None], score, -jnp.inf)
        new_best = jnp.maximum(best, jnp.max(score, axis=-1))
        finite = jnp.where(jnp.isneginf(new_best), 0.0, new_best)
        shrink = jnp.exp(best - finite)
        weight = jnp.exp(score - finite[..., None])
        mixed = jnp.einsum(
            "CKRJ,CKJH->CKRH",
            weight,
            value_CKJH,
            precision=exact,
            preferred_element_type=jnp.float32,
        )
        return new_best, total * shrink + sum_pairs(weight), out * shrink[..., None] + mixed

    shape = (C, K, Q * G)
    if sinks_N is None:
        best = jnp.full(shape, -jnp.inf)
        total = jnp.zeros(shape)
    else:  # a sink is one more score in the softmax, without a value
        best = jnp.tile(sinks_N.astype(jnp.float32).reshape(K, G), (C, 1, Q))
        total = jnp.ones(shape)
        if context.size > 1:  # one of the devices adds it
            best = jnp.where(context.index() == 0, best, -jnp.inf)
            total = jnp.where(context.index() == 0, total, 0)
    start = (best, total, jnp.zeros((*shape, width)))
    best, total, out = jax.lax.fori_loop(0, trips, attend_block, start)

    def by_row(x_CKRX, dtype):
        """From tiles to rows."""
        x_CQNX = jnp.moveaxis(x_CKRX.reshape(C, K, Q, G, -1), 1, 2).reshape(C * Q, N, -1)
        flat = jnp.where(valid_CQ, row_CQ, T).reshape(-1)
        return (
            jnp.zeros((T, N, x_CQNX.shape[-1]), dtype)
            .at[flat]
            .set(x_CQNX.astype(dtype), mode="drop")
        )

    if context.size > 1:
        found_TNX = by_row(
            jnp.concatenate((out, total[..., None], best[..., None]), axis=-1), jnp.float32
        )
        if params.split_rows:
            found_nTNX = context.exchange(found_TNX.reshape(context.size, -1, *found_TNX.shape[1:]))
        else:
            found_nTNX = context.gather(found_TNX)
        return merge(found_nTNX).astype(q_TNH.dtype), pages
    return by_row(out / jnp.where(total == 0, 1, total)[..., None], q_TNH.dtype), pages


def limits(params: AttentionParams, shape: AttentionShape) -> str | None:
    return latent_int4(shape)


def latent_int4(shape: AttentionShape) -> str | None:
    """Why pages of int4 cannot be served; None if they can, or are none."""
    if shape.page_dtype == "uint8" and shape.layout == "latent":
        return "keys of four bits are rotated, and cannot hold the values"
    return None


BACKEND = AttentionBackend(attend, limits, chunked=True, lookahead=True, context_parallel=True)


def merge(found_nTNX):
    """One softmax from those of the devices: of each a weighted sum, the sum of the weights, and
    the best score.
    """
    best_nTN = found_nTNX[..., -1]
    most_TN = jnp.max(best_nTN, axis=0)
    weight_nTN = jnp.exp(best_nTN - jnp.where(jnp.isneginf(most_TN), 0, most_TN))
    # Single additions in a written order: a row's bits must not depend on the number of rows.
    parts = [
        found[..., :-1] * weight[..., None]
        for found, weight in zip(found_nTNX, weight_nTN, strict=True)
    ]
    sum_TNX = sum(parts[1:], start=parts[0])
    total_TN1 = sum_TNX[..., -1:]
    return sum_TNX[..., :-1] / jnp.where(total_TN1 == 0, 1, total_TN1)


def own_slots(slots_T, pages: KVPages, S: int, own: int, first):
    """Where rows go in this device's part of the pages; those of other devices go past the end and
    are dropped.
    """
    if own == S:
        return slots_T
    offset_T = slots_T % S - first
    here_T = (offset_T >= 0) & (offset_T < own)
    return jnp.where(
        here_T, slots_T // S * own + offset_T, jax.tree.leaves(pages)[0].shape[0] * own
    )


def tile_size(T: int, B: int, G: int, width: int) -> int:
    """Query rows of a tile: so many that XLA on a CPU sums in the same order for any T and B.

    Measured: `weight @ value` keeps its order for 2 to 48 rows, and for more where the width is a
    multiple of 64; a single row has another order. (JAX 0.12 does not keep it for a width of 8 or
    less, which no model has.)
    """
    if T == B:
        return 1 if G > 1 else 2
    return TILE if width % 64 == 0 else max(1, min(TILE, 48 // G))


def read_both(pages: KVPages, page_CJ, width: int):
    """The keys and the values of each tile's pages, in any form of pages."""
    if pages.kv_PSYH is not None:
        both_CYJH = read(pages.kv_PSYH, None, page_CJ)
        return both_CYJH[:, 0::2], both_CYJH[:, 1::2]
    key_CKJH = read(pages.k_PSKH, pages.k_scale_PKS, page_CJ)
    if pages.v_PSKH is None:
        return key_CKJH, key_CKJH[..., :width]
    return key_CKJH, read(pages.v_PSKH, pages.v_scale_PKS, page_CJ)


def read(pages_PSKH, scale_PKS, page_CJ):
    """The pages of each tile one after another, in float32: [C, K, positions, H]."""
    block_CJKH = pages_PSKH[page_CJ].reshape(page_CJ.shape[0], -1, *pages_PSKH.shape[2:])
    if four_bits.packed(pages_PSKH):
        block_CJKH = four_bits.codes(block_CJKH)
    if scale_PKS is not None:
        scale_CJK = jnp.swapaxes(scale_PKS[page_CJ], 2, 3).reshape(block_CJKH.shape[:3])
        block_CJKH = block_CJKH.astype(jnp.float32) * scale_CJK[..., None]
    if block_CJKH.dtype == jnp.uint16:  # a bfloat16 is the upper half of a float32
        block_CJKH = jax.lax.bitcast_convert_type(block_CJKH.astype(jnp.uint32) << 16, jnp.float32)
    return jnp.moveaxis(block_CJKH.astype(jnp.float32), 1, 2)


def append(pages: KVPages, k_TKH, v_TKH, slots_T) -> KVPages:
    """Write each row's key and value to its slot, in place where the cache is donated."""
    gpu = jax.default_backend() == "gpu"
    if gpu:
        slots_T = distinct(slots_T, *jax.tree.leaves(pages)[0].shape[:2])
    plain = {"unique_indices": True, "mode": "drop"} if gpu else {}

    def write(pages_PSX, new_TX):
        P, S, *rest = pages_PSX.shape
        if pages_PSX.dtype == jnp.uint16:
            new_TX = jax.lax.bitcast_convert_type(new_TX.astype(jnp.bfloat16), jnp.uint16)
        flat = (
            pages_PSX.reshape(P * S, *rest).at[slots_T].set(new_TX.astype(pages_PSX.dtype), **plain)
        )
        return flat.reshape(P, S, *rest)

    def write_scaled(pages_PSKH, scale_PKS, new_TKH):
        if scale_PKS is None:
            return (None if pages_PSKH is None else write(pages_PSKH, new_TKH)), None
        codes_TKH, scale_TK = quantise(new_TKH, pages_PSKH.dtype)
        page_T = slots_T // pages_PSKH.shape[1]
        offset_T = slots_T % pages_PSKH.shape[1]
        return write(pages_PSKH, codes_TKH), scale_PKS.at[page_T, :, offset_T].set(
            scale_TK, **plain
        )

    if pages.kv_PSYH is not None:
        kv_TYH = jnp.stack((k_TKH, v_TKH), axis=2).reshape(len(k_TKH), *pages.kv_PSYH.shape[2:])
        return pages.replace(kv_PSYH=write(pages.kv_PSYH, kv_TYH))
    k_TKH = four_bits.rotate(k_TKH) if four_bits.packed(pages.k_PSKH) else k_TKH
    k_PSKH, k_scale_PKS = write_scaled(pages.k_PSKH, pages.k_scale_PKS, k_TKH)
    v_PSKH, v_scale_PKS = write_scaled(pages.v_PSKH, pages.v_scale_PKS, v_TKH)
    return KVPages(k_PSKH, v_PSKH, k_scale_PKS, v_scale_PKS)


def distinct(slots_T, P: int, S: int):
    """Slots of which no two are equal: padding, which names the dummy page or none, goes to slots
    past the end.

    Where they could be equal, XLA writes each number of a narrow type by a compare-and-swap loop on
    a GPU.
    """
    return jnp.where(
        (slots_T < S) | (slots_T >= P * S), P * S + jnp.arange(slots_T.shape[0]), slots_T
    )


def quantise(x_TKH, dtype=jnp.int8):
    """(codes, scales): the largest value of each row becomes the largest code.

    The kernels round in the same way.
    """
    if dtype == jnp.uint8:
        return four_bits.quantise(x_TKH)
    x_TKH = x_TKH.astype(jnp.float32)
    whole = jnp.issubdtype(dtype, jnp.integer)
    largest = 127.0 if whole else float(jnp.finfo(dtype).max)
    most_TK = jnp.max(jnp.abs(x_TKH), axis=-1)
    inverse_TK = largest / jnp.where(most_TK == 0, 1, most_TK)
    codes_TKH = x_TKH * inverse_TK[..., None]
    # Multiplied by a constant: a compiler may or may not replace a division by one, with other
    # bits.
    return (jnp.round(codes_TKH) if whole else codes_TKH).astype(dtype), most_TK * jnp.float32(
        1 / largest
    )


def varies() -> str | None:
    if jax.default_backend() == "cpu":
        return None  # sums run in an order that was seen not to depend on the number of rows
    return (
        f"attention by XLA on a {jax.default_backend()} may sum in an order that depends on "
        "the number of rows"
    )


def tiles(starts_B1, T: int, Q: int):
    """Cut each sequence's rows into tiles of Q: (row_CQ, seq_C, valid_CQ), with as many tiles as
    could be needed.
    """
    B = starts_B1.shape[0] - 1
    rows_B = starts_B1[1:] - starts_B1[:-1]
    tiles_B = (rows_B + Q - 1) // Q
    end_B = jnp.cumsum(tiles_B)
    tile_C = jnp.arange(min(T, B + T // Q))
    seq_C = jnp.minimum(
        jnp.searchsorted(end_B, tile_C, side="right", method="compare_all"), B - 1
    ).astype(jnp.int32)
    offset_CQ = (tile_C - (end_B[seq_C] - tiles_B[seq_C]))[:, None] * Q + jnp.arange(Q)
    valid_CQ = (offset_CQ < rows_B[seq_C][:, None]) & (tile_C < end_B[-1])[:, None]
    return starts_B1[seq_C][:, None] + offset_CQ, seq_C, valid_CQ
