"""FlashInfer's paged kernel as a function of numpy: its arguments and what it reads of a plan.

Written from FlashInfer 0.7.2's `BatchPrefillWithPagedKVCacheRun`, the kernel that it launches, and
the one that merges.
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
    early: bool,
    *rest: Any,
) -> None:
    *sinks, soft_cap, scale = rest
    assert (sums, mask, layout, early) == (None, CAUSAL, POSITION_MAJOR, False)
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
        part_at,
        before_at,
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
        at % 4 for at in (rows_at, keys_at, before_at)
    )
    T, N, H = q.shape
    K = k.shape[2]
    S = k.shape[1]
    B = len(starts) - 1
    G = N // K  # results that scratch has room for
    room = (scratch.nbytes - s_at) // (4 * N)
    assert max_rows == T and s_at - v_at >= room * N * H * 2

    def listed(at: int, count: int) -> np.ndarray:
        return words.view(np.uint8)[at : at + 4 * count].view(np.int32)

    sequence, qo_tile, part = (listed(at, items) for at in (sequence_at, tile_at, part_at))
    first = listed(first_at, B + 1)
    before = listed(before_at, T + 1)
    (keys_a_part,) = listed(keys_at, 1)
    (total,) = listed(rows_at, 1)
    counts = words.view(np.uint8)[counts_at : counts_at + items]
    assert set(counts) <= {0, 1}
    out[:] = scratch[:] = np.nan
    result = np.full((room, N, H), np.nan)
    weight = np.full((room, N), np.nan)
    for b, at, kv in ((sequence[i], qo_tile[i], part[i]) for i in np.flatnonzero(counts)):
        rows = int(starts[b + 1] - starts[b])
        own = int(first_page[b + 1] - first_page[b])
        length = (own - 1) * S + int(last_page[b]) if own else 0
        left = window_left if window_left >= 0 else length
        start = max(length + at * tile // G - rows - left, 0)
        low, high = (min(n * int(keys_a_part) + start, length) for n in (kv, kv + 1))
        each = -(-min(max(length, 1), left + tile) // int(keys_a_part))
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
            seen_IJ = index <= length - rows + row_I[:, None]
            seen_IJ &= index + rows + left >= length + row_I[:, None]
            score_IJ = np.where(seen_IJ, score_IJ, -np.inf)
            if sinks and kv == 0:
                score_IJ = np.concatenate(
                    [score_IJ, sinks[0][n_I].astype(np.float64)[:, None]], axis=1
                )
            best_I = np.max(score_IJ, axis=1, initial=-np.inf)
            weight_IJ = np.exp(score_IJ - np.where(np.isneginf(best_I), 0, best_I)[:, None])
            sum_I = weight_IJ.sum(axis=1)
            # As the hardware multiplies: a value that is not seen counts for nothing only where it
            # is a number.
            mixed_IH = (
                weight_IJ[:, : len(index)]
                @ v_JKH[:, kv_head]
                / np.where(sum_I == 0, 1, sum_I)[:, None]
            )
            place_I = first[b] + row_I * each + kv
            assert place_I.max() < room, "a result has no place"
            assert np.isnan(weight[place_I, n_I]).all(), "two results have one place"
            with np.errstate(divide="ignore"):
                result[place_I, n_I], weight[place_I, n_I] = mixed_IH, np.log(sum_I) + best_I
    for row in range(total):
        own = slice(before[row], before[row + 1])
        assert before[row + 1] > before[row], "a row has no result"
        weight_PN = np.exp(weight[own] - weight[own].max(axis=0))
        out[row] = (
            (weight_PN[..., None] * result[own]).sum(axis=0) / weight_PN.sum(axis=0)[:, None]
        ).astype(out.dtype)
