"""FlashInfer's paged prefill kernel in numpy: the same arguments, the same reads of the plan.

It follows `BatchPrefillWithPagedKVCacheRun` of FlashInfer 0.7.2, the kernel that it launches and
the merge kernel.
"""

from typing import Any

import numpy as np

from quire.ops.attention.flashinfer_kernel.library import CAUSAL, POSITION_MAJOR


def paged_run(
    scratch: Any,
    words: Any,
    info: Any,
    q: Any,
    k: Any,
    v: Any,
    starts: Any,
    first_page: Any,
    pages: Any,
    last_page: Any,
    out: Any,
    sums: Any,
    mask: int,
    layout: int,
    window_left: int,
    enable_pdl: bool,
    *sinks_and_scalars: Any,
) -> None:
    *sinks, soft_cap, scale = sinks_and_scalars
    assert (sums, mask, layout, enable_pdl) == (None, CAUSAL, POSITION_MAJOR, False)
    scratch, words, q, k, v, starts, first_page, pages, last_page, out, *sinks = map(
        np.from_dlpack, (scratch, words, q, k, v, starts, first_page, pages, last_page, out, *sinks)
    )
    (
        items,
        max_rows,
        rows_at,
        tile,
        sequence_at,
        tile_at,
        kv_chunk_at,
        merge_indptr_at,
        first_at,
        keys_at,
        v_at,
        s_at,
        counts_at,
        graph,
        split,
    ) = (int(number) for number in info)
    assert graph and split and tile in (16, 64, 128)
    assert not any(at % 16 for at in (v_at, s_at)) and not any(
        at % 4 for at in (rows_at, keys_at, merge_indptr_at)
    )
    T, N, H = q.shape
    K = k.shape[2]
    S = k.shape[1]
    B = len(starts) - 1
    G = N // K  # queries per KV head
    num_scratch_rows = (scratch.nbytes - s_at) // (4 * N)
    assert max_rows == T and s_at - v_at >= num_scratch_rows * N * H * 2

    def int32_array(at: int, count: int) -> np.ndarray:
        return words.view(np.uint8)[at : at + 4 * count].view(np.int32)

    sequence, qo_tile, kv_chunk = (
        int32_array(at, items) for at in (sequence_at, tile_at, kv_chunk_at)
    )
    first = int32_array(first_at, B + 1)
    merge_indptr = int32_array(merge_indptr_at, T + 1)
    (keys_per_chunk,) = int32_array(keys_at, 1)
    (total,) = int32_array(rows_at, 1)
    counts = words.view(np.uint8)[counts_at : counts_at + items]
    assert set(counts) <= {0, 1}
    out[:] = scratch[:] = np.nan
    result = np.full((num_scratch_rows, N, H), np.nan)
    weight = np.full((num_scratch_rows, N), np.nan)
    for b, at, kv in ((sequence[i], qo_tile[i], kv_chunk[i]) for i in np.flatnonzero(counts)):
        rows = int(starts[b + 1] - starts[b])
        num_pages = int(first_page[b + 1] - first_page[b])
        length = (num_pages - 1) * S + int(last_page[b]) if num_pages else 0
        window = window_left if window_left >= 0 else length
        start = max(length + at * tile // G - rows - window, 0)
        low, high = (min(n * int(keys_per_chunk) + start, length) for n in (kv, kv + 1))
        chunks_per_row = -(-min(max(length, 1), window + tile) // int(keys_per_chunk))
        index = np.arange(low, high)
        page = pages[first_page[b] + index // S]
        k_JKH, v_JKH = (x[page, index % S].astype(np.float64) for x in (k, v))
        pair = np.arange(at * tile, min((at + 1) * tile, rows * G))
        row_I = pair // G
        head_I = pair % G
        for kv_head in range(K):
            n_I = kv_head * G + head_I
            score_IJ = q[starts[b] + row_I, n_I].astype(np.float64) @ k_JKH[:, kv_head].T * scale
            if soft_cap:
                score_IJ = soft_cap * np.tanh(score_IJ / soft_cap)
            mask_IJ = index <= length - rows + row_I[:, None]
            mask_IJ &= index + rows + window >= length + row_I[:, None]
            score_IJ = np.where(mask_IJ, score_IJ, -np.inf)
            if sinks and kv == 0:
                score_IJ = np.concatenate(
                    [score_IJ, sinks[0][n_I].astype(np.float64)[:, None]], axis=1
                )
            best_I = np.max(score_IJ, axis=1, initial=-np.inf)
            weight_IJ = np.exp(score_IJ - np.where(np.isneginf(best_I), 0, best_I)[:, None])
            sum_I = weight_IJ.sum(axis=1)
            # As on the GPU, a masked value is multiplied by 0, which gives NaN for NaN.
            mixed_IH = (
                weight_IJ[:, : len(index)]
                @ v_JKH[:, kv_head]
                / np.where(sum_I == 0, 1, sum_I)[:, None]
            )
            place_I = first[b] + row_I * chunks_per_row + kv
            assert place_I.max() < num_scratch_rows, "a partial result is outside of the scratch"
            assert np.isnan(weight[place_I, n_I]).all(), "two partial results share a place"
            with np.errstate(divide="ignore"):
                result[place_I, n_I], weight[place_I, n_I] = mixed_IH, np.log(sum_I) + best_I
    for row in range(total):
        partials = slice(merge_indptr[row], merge_indptr[row + 1])
        assert merge_indptr[row + 1] > merge_indptr[row], "a row has no partial result"
        weight_PN = np.exp(weight[partials] - weight[partials].max(axis=0))
        out[row] = (
            (weight_PN[..., None] * result[partials]).sum(axis=0) / weight_PN.sum(axis=0)[:, None]
        ).astype(out.dtype)
