"""Paged attention in plain XLA, with an online softmax over blocks of pages.

Results are batch-invariant and do not depend on how a prompt is cut into chunks: blocks begin at
multiples of `BLOCK`, a block that is masked for a row does not change the row's result, and the
order of every sum is independent of the number of rows.

With context parallelism each device has some positions of every page and attends to these; the
results of the devices are then merged.
"""

import jax
import jax.numpy as jnp

from ..ordered_sum import sum_pairs
from ..precision import precision
from . import KVPages, four_bits
from .backend import AttentionBackend, AttentionParams, AttentionShape

BLOCK = 64  # key positions that a loop iteration reads
TILE = 16  # query rows of a tile if sequences have more than one row


def attend(q_TNH, k_TKH, v_TKH, pages, rows, params: AttentionParams, sinks_N=None):
    """See `quire.ops.attention.paged_attention`.

    Dimensions: C tiles, Q query rows of a tile, R = Q * G rows of one KV head, J key positions.
    """
    T, N, H = q_TNH.shape
    exact = precision(q_TNH)
    window = params.window
    soft_cap = params.soft_cap
    context = params.context
    is_paired = pages.kv_PSYH is not None
    is_int4 = four_bits.is_packed(pages.k_PSKH)
    local_page_size, K = (pages.kv_PSYH if is_paired else pages.k_PSKH).shape[1:3]
    S = local_page_size * context.size
    local_start = local_page_size * context.index()
    if k_TKH is not None:
        pages = append(
            pages, k_TKH, v_TKH, local_slots(rows.slots_T, pages, S, local_page_size, local_start)
        )
    K = K // 2 if is_paired else K
    B = rows.starts_B1.shape[0] - 1
    G = N // K
    width = (
        (H if is_paired else pages.v_PSKH.shape[-1] * (1 + is_int4))
        if params.value_dim is None
        else params.value_dim
    )
    row_CQ, seq_C, valid_CQ = tiles(rows.starts_B1, T, tile_size(T, B, G, width))
    row_CQ = jnp.minimum(row_CQ, T - 1)
    position_CQ = jnp.where(valid_CQ, rows.positions_T[row_CQ], -1)
    position_CR = jnp.repeat(position_CQ, G, axis=1)
    last_visible_CR = position_CR  # the last position to which a row attends
    if params.lookahead:
        last_C = rows.positions_T[jnp.maximum(rows.starts_B1[seq_C + 1] - 1, 0)]
        last_visible_CR = jnp.where(
            position_CR < 0, -1, jnp.minimum(position_CR + params.lookahead, last_C[:, None])
        )
    if params.spans and rows.sees_T is not None:
        sees_CQ = jnp.where(valid_CQ, rows.sees_T[row_CQ], -1)
        last_visible_CR = jnp.repeat(sees_CQ, G, axis=1)
    C, Q = row_CQ.shape
    rotated_TNH = four_bits.rotate(q_TNH) if is_int4 else q_TNH
    q_CQKGH = rotated_TNH[row_CQ].reshape(C, Q, K, G, H).astype(jnp.float32) * params.scale
    q_CKRH = jnp.moveaxis(q_CQKGH, 2, 1).reshape(C, K, Q * G, H)

    pages_a_block = max(1, BLOCK // local_page_size)
    J = pages_a_block * S
    offset_J = (
        jnp.arange(pages_a_block)[:, None] * S + local_start + jnp.arange(local_page_size)
    ).reshape(-1)
    newest_C = jnp.max(last_visible_CR, axis=1)
    oldest_C = jnp.min(jnp.where(valid_CQ, position_CQ, jnp.iinfo(jnp.int32).max), axis=1)

    def last_hidden(position):
        """The last position before those to which the row at `position` attends."""
        return position // window * window - 1 if params.chunked else position - window

    first_C = (
        jnp.zeros_like(newest_C)
        if window is None
        else jnp.maximum(last_hidden(oldest_C) + 1, 0) // J
    )
    first_C = jnp.where(newest_C < 0, 0, first_C)
    num_blocks = jnp.max(newest_C // J + 1 - first_C)

    def attend_block(i, carry):
        best, total, out = carry
        block_C = first_C + i
        page_CJ = jnp.minimum(
            block_C[:, None] * pages_a_block + jnp.arange(pages_a_block),
            rows.tables_BM.shape[1] - 1,
        )
        page_CJ = rows.tables_BM[seq_C[:, None], page_CJ]
        key_CKJH, value_CKJH = read_keys_values(pages, page_CJ, width)
        # Other positions of a page may hold NaN from a previous owner, and 0 * NaN is NaN.
        position_CJ = block_C[:, None] * J + offset_J
        owned_CJ = position_CJ <= newest_C[:, None]
        visible_CRJ = position_CJ[:, None, :] <= last_visible_CR[:, :, None]
        if window is not None:
            owned_CJ &= position_CJ > last_hidden(oldest_C)[:, None]
            visible_CRJ &= position_CJ[:, None, :] > last_hidden(position_CR)[:, :, None]
        value_CKJH = jnp.where(owned_CJ[:, None, :, None], value_CKJH, 0)

        score_CKRJ = jnp.einsum(
            "CKRH,CKJH->CKRJ", q_CKRH, key_CKJH, precision=exact, preferred_element_type=jnp.float32
        )
        if soft_cap is not None:
            score_CKRJ = soft_cap * jnp.tanh(score_CKRJ / soft_cap)
        score_CKRJ = jnp.where(visible_CRJ[:, None], score_CKRJ, -jnp.inf)
        new_best = jnp.maximum(best, jnp.max(score_CKRJ, axis=-1))
        finite = jnp.where(jnp.isneginf(new_best), 0.0, new_best)
        shrink = jnp.exp(best - finite)
        weight_CKRJ = jnp.exp(score_CKRJ - finite[..., None])
        mixed_CKRH = jnp.einsum(
            "CKRJ,CKJH->CKRH",
            weight_CKRJ,
            value_CKJH,
            precision=exact,
            preferred_element_type=jnp.float32,
        )
        return (
            new_best,
            total * shrink + sum_pairs(weight_CKRJ),
            out * shrink[..., None] + mixed_CKRH,
        )

    shape = (C, K, Q * G)
    if sinks_N is None:
        best = jnp.full(shape, -jnp.inf)
        total = jnp.zeros(shape)
    else:  # a sink is one more score in the softmax, without a value
        best = jnp.tile(sinks_N.astype(jnp.float32).reshape(K, G), (C, 1, Q))
        total = jnp.ones(shape)
        if context.size > 1:  # only the first device adds the sink
            best = jnp.where(context.index() == 0, best, -jnp.inf)
            total = jnp.where(context.index() == 0, total, 0)
    start = (best, total, jnp.zeros((*shape, width)))
    best, total, out = jax.lax.fori_loop(0, num_blocks, attend_block, start)

    def by_row(x_CKRX, dtype):
        """Reorder results from tiles to rows: [T, N, X], zeros for padding rows."""
        x_CQNX = jnp.moveaxis(x_CKRX.reshape(C, K, Q, G, -1), 1, 2).reshape(C * Q, N, -1)
        flat = jnp.where(valid_CQ, row_CQ, T).reshape(-1)
        return (
            jnp.zeros((T, N, x_CQNX.shape[-1]), dtype)
            .at[flat]
            .set(x_CQNX.astype(dtype), mode="drop")
        )

    if context.size > 1:
        partial_TNX = by_row(
            jnp.concatenate((out, total[..., None], best[..., None]), axis=-1), jnp.float32
        )
        if params.split_rows:
            partial_nTNX = context.exchange(
                partial_TNX.reshape(context.size, -1, *partial_TNX.shape[1:])
            )
        else:
            partial_nTNX = context.gather(partial_TNX)
        return merge(partial_nTNX).astype(q_TNH.dtype), pages
    return by_row(out / jnp.where(total == 0, 1, total)[..., None], q_TNH.dtype), pages


def limits(params: AttentionParams, shape: AttentionShape) -> str | None:
    """Why a call is not supported; None if it is."""
    return latent_int4(shape)


def latent_int4(shape: AttentionShape) -> str | None:
    """Why int4 pages are not supported for MLA; None for other calls."""
    if shape.page_dtype == "uint8" and shape.layout == "latent":
        return "keys of four bits are rotated, and cannot hold the values"
    return None


BACKEND = AttentionBackend(
    attend, limits, chunked=True, lookahead=True, spans=True, context_parallel=True
)


def merge(partial_nTNX):
    """Merge the softmaxes of n devices.

    Args:
        partial_nTNX: For each device the weighted sum of the values, the sum of the weights, and
            the largest score, along the last axis.
    """
    best_nTN = partial_nTNX[..., -1]
    best_TN = jnp.max(best_nTN, axis=0)
    weight_nTN = jnp.exp(best_nTN - jnp.where(jnp.isneginf(best_TN), 0, best_TN))
    # Added one after the other, so that the order does not depend on the number of rows.
    weighted_nTNX = [
        partial_TNX[..., :-1] * weight_TN[..., None]
        for partial_TNX, weight_TN in zip(partial_nTNX, weight_nTN, strict=True)
    ]
    sum_TNX = sum(weighted_nTNX[1:], start=weighted_nTNX[0])
    total_TN1 = sum_TNX[..., -1:]
    return sum_TNX[..., :-1] / jnp.where(total_TN1 == 0, 1, total_TN1)


def local_slots(slots_T, pages: KVPages, S: int, local_page_size: int, local_start):
    """The slots of rows in this device's part of the pages.

    Rows that belong to other devices get a slot past the end, where writes are dropped.

    Args:
        S: Positions of a page on all devices together.
        local_start: First offset in a page that this device has.
    """
    if local_page_size == S:
        return slots_T
    offset_T = slots_T % S - local_start
    is_local_T = (offset_T >= 0) & (offset_T < local_page_size)
    return jnp.where(
        is_local_T,
        slots_T // S * local_page_size + offset_T,
        jax.tree.leaves(pages)[0].shape[0] * local_page_size,
    )


def tile_size(T: int, B: int, G: int, width: int) -> int:
    """Query rows of a tile, chosen so that XLA on a CPU sums in the same order for any T and B.

    Measured: `weight @ value` has the same order for 2 to 48 rows, and for more if the width is a
    multiple of 64; a single row has another order. (In JAX 0.12 the order varies for widths of 8
    or less, which no model has.)
    """
    if T == B:
        return 1 if G > 1 else 2
    return TILE if width % 64 == 0 else max(1, min(TILE, 48 // G))


def read_keys_values(pages: KVPages, page_CJ, width: int):
    """Read the keys and values of each tile's pages, for every layout of the pages."""
    if pages.kv_PSYH is not None:
        kv_CYJH = read(pages.kv_PSYH, None, page_CJ)
        return kv_CYJH[:, 0::2], kv_CYJH[:, 1::2]
    key_CKJH = read(pages.k_PSKH, pages.k_scale_PKS, page_CJ)
    if pages.v_PSKH is None:
        return key_CKJH, key_CKJH[..., :width]
    return key_CKJH, read(pages.v_PSKH, pages.v_scale_PKS, page_CJ)


def read(pages_PSKH, scale_PKS, page_CJ):
    """Gather and dequantise the pages of each tile: float32 [C, K, positions, H]."""
    block_CJKH = pages_PSKH[page_CJ].reshape(page_CJ.shape[0], -1, *pages_PSKH.shape[2:])
    if four_bits.is_packed(pages_PSKH):
        block_CJKH = four_bits.unpack(block_CJKH)
    if scale_PKS is not None:
        scale_CJK = jnp.swapaxes(scale_PKS[page_CJ], 2, 3).reshape(block_CJKH.shape[:3])
        block_CJKH = block_CJKH.astype(jnp.float32) * scale_CJK[..., None]
    if block_CJKH.dtype == jnp.uint16:  # a bfloat16 is the upper half of a float32
        block_CJKH = jax.lax.bitcast_convert_type(block_CJKH.astype(jnp.uint32) << 16, jnp.float32)
    return jnp.moveaxis(block_CJKH.astype(jnp.float32), 1, 2)


def append(pages: KVPages, k_TKH, v_TKH, slots_T) -> KVPages:
    """Write each row's key and value to its slot, in place if the cache is donated."""
    gpu = jax.default_backend() == "gpu"
    if gpu:
        slots_T = distinct(slots_T, *jax.tree.leaves(pages)[0].shape[:2])
    set_options = {"unique_indices": True, "mode": "drop"} if gpu else {}

    def write(pages_PSX, new_TX):
        P, S, *trailing = pages_PSX.shape
        if pages_PSX.dtype == jnp.uint16:
            new_TX = jax.lax.bitcast_convert_type(new_TX.astype(jnp.bfloat16), jnp.uint16)
        flat_pages = (
            pages_PSX.reshape(P * S, *trailing)
            .at[slots_T]
            .set(new_TX.astype(pages_PSX.dtype), **set_options)
        )
        return flat_pages.reshape(P, S, *trailing)

    def write_scaled(pages_PSKH, scale_PKS, new_TKH):
        if scale_PKS is None:
            return (None if pages_PSKH is None else write(pages_PSKH, new_TKH)), None
        codes_TKH, scale_TK = quantise(new_TKH, pages_PSKH.dtype)
        page_T = slots_T // pages_PSKH.shape[1]
        offset_T = slots_T % pages_PSKH.shape[1]
        return write(pages_PSKH, codes_TKH), scale_PKS.at[page_T, :, offset_T].set(
            scale_TK, **set_options
        )

    if pages.kv_PSYH is not None:
        kv_TYH = jnp.stack((k_TKH, v_TKH), axis=2).reshape(len(k_TKH), *pages.kv_PSYH.shape[2:])
        return pages.replace(kv_PSYH=write(pages.kv_PSYH, kv_TYH))
    k_TKH = four_bits.rotate(k_TKH) if four_bits.is_packed(pages.k_PSKH) else k_TKH
    k_PSKH, k_scale_PKS = write_scaled(pages.k_PSKH, pages.k_scale_PKS, k_TKH)
    v_PSKH, v_scale_PKS = write_scaled(pages.v_PSKH, pages.v_scale_PKS, v_TKH)
    return KVPages(k_PSKH, v_PSKH, k_scale_PKS, v_scale_PKS)


def distinct(slots_T, P: int, S: int):
    """Make slots unique: padding rows get different slots past the end.

    If slots could be equal, XLA on a GPU would write each element of an 8- or 16-bit type by a
    compare-and-swap loop.
    """
    return jnp.where(
        (slots_T < S) | (slots_T >= P * S), P * S + jnp.arange(slots_T.shape[0]), slots_T
    )


def quantise(x_TKH, dtype=jnp.int8):
    """Quantise keys or values with a scale for each row and head, in the way of the kernels.

    The largest magnitude becomes the largest code.

    Returns:
        (codes, scales).
    """
    if dtype == jnp.uint8:
        return four_bits.quantise(x_TKH)
    x_TKH = x_TKH.astype(jnp.float32)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    largest_code = 127.0 if is_integer else float(jnp.finfo(dtype).max)
    largest_TK = jnp.max(jnp.abs(x_TKH), axis=-1)
    inverse_TK = largest_code / jnp.where(largest_TK == 0, 1, largest_TK)
    codes_TKH = x_TKH * inverse_TK[..., None]
    codes_TKH = (jnp.round(codes_TKH) if is_integer else codes_TKH).astype(dtype)
    # A multiplication, since a compiler may or may not replace a division by a constant by one,
    # which changes bits.
    return codes_TKH, largest_TK * jnp.float32(1 / largest_code)


def varies() -> str | None:
    if jax.default_backend() == "cpu":
        return None  # measured: the order of sums does not depend on the number of rows
    return (
        f"attention by XLA on a {jax.default_backend()} may sum in an order that depends on "
        "the number of rows"
    )


def tiles(starts_B1, T: int, Q: int):
    """Cut the rows of each sequence into tiles of Q rows.

    Returns:
        (row_CQ, seq_C, valid_CQ): the rows and the sequence of each tile, and which rows exist. C
        is the largest number of tiles that any step of this shape has.
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
