"""Attention over pages in two parts: who does what, and where contexts were cut, the merging of their spans."""

from typing import Any

import jax
import jax.numpy as jnp

from ..attention.xla import tiles
from . import ragged
from .ragged import merge, run_tasks
from .task import ROWS, Shape
from .tile import LOG2_E

BLOCK = 64  # keys of a step


def attend(
    q_TNH, pages, rows, sinks_N, *, window: int | None, scale: float, soft_cap: float | None, processors: int,
    interpret: Any = None,
):  # fmt: skip
    """[T, N, H]; rows of nobody are zero."""
    T, N, H = q_TNH.shape
    _, S, K, _ = pages.k_PSKH.shape
    B, M = rows.tables_BM.shape
    decodes = T == B  # mostly a row each, and a tile for each row
    spans = -(-M * S // ragged.SPAN) if decodes else 1
    positions, block = 1 if decodes else ROWS // (N // K), BLOCK
    tasks_IF, count, begin_C, spans_C = plan(rows, T, positions, block, window, spans)
    cut = spans > 1
    shape = Shape(T, positions, N, K, H, S, block, len(tasks_IF), processors, window, scale, soft_cap,
                  sinks_N is not None, cut)  # fmt: skip
    found = run_tasks(
        shape, q_TNH, pages.k_PSKH, pages.v_PSKH, sinks_N, rows.tables_BM, tasks_IF, count, interpret=interpret
    )
    out_TNH = merge_spans(found, begin_C, spans_C, sinks_N, N, K) if cut else found[0]
    owned_T = jnp.arange(T) < rows.starts_B1[-1]
    return jnp.where(owned_T[:, None, None], out_TNH, 0).astype(q_TNH.dtype)


def plan(rows, T: int, positions: int, block: int, window: int | None, spans: int):
    """(tasks, how many there are, each tile's first one, and how many it has)."""
    row_CQ, seq_C, valid_CQ = tiles(rows.starts_B1, T, positions)
    row_C, count_C = row_CQ[:, 0], jnp.sum(valid_CQ, axis=1, dtype=jnp.int32)
    position_C = rows.positions_T[jnp.minimum(row_C, T - 1)]
    last_C = (position_C + count_C - 1) // block
    oldest_C = jnp.zeros_like(position_C) if window is None else jnp.maximum(position_C - window + 1, 0)
    first_C = oldest_C // block
    a_span = ragged.SPAN // block
    spans_C = last_C // a_span - first_C // a_span + 1 if spans > 1 else jnp.ones_like(last_C)
    spans_C = jnp.where(count_C > 0, spans_C, 0)
    end_C = jnp.cumsum(spans_C)
    C = row_C.shape[0]
    task_I = jnp.arange(C * spans)
    tile_I = jnp.minimum(jnp.searchsorted(end_C, task_I, side="right"), C - 1)
    begin_C = end_C - spans_C
    if spans > 1:
        span_I = first_C[tile_I] // a_span + task_I - begin_C[tile_I]
        first_I = jnp.maximum(first_C[tile_I], span_I * a_span)
        last_I = jnp.minimum(last_C[tile_I], span_I * a_span + a_span - 1)
    else:
        first_I, last_I = first_C[tile_I], last_C[tile_I]
    fields = row_C[tile_I], count_C[tile_I], seq_C[tile_I], position_C[tile_I], first_I, last_I, task_I
    return jnp.stack(fields, axis=1).astype(jnp.int32), end_C[-1:].astype(jnp.int32), begin_C, spans_C


def merge_spans(found, begin_C, spans_C, sinks_N, N: int, K: int):
    """The spans of each row one after the other, as the kernel would have merged them."""
    sums, totals, bests = found
    group = N // K
    rows, H = begin_C.shape[0], sums.shape[-1]
    parts = [
        bests.reshape(-1, K, ROWS)[:, :, :group].reshape(-1, N),
        totals.reshape(-1, K, ROWS)[:, :, :group].reshape(-1, N),
        sums.reshape(-1, N, H),
    ]
    if sinks_N is None:
        best = jnp.full((rows, N), -jnp.inf)
    else:
        best = jnp.broadcast_to(sinks_N.astype(jnp.float32) * LOG2_E, (rows, N))
    total = jnp.where(best == -jnp.inf, 0.0, 1.0)
    each = jax.vmap(merge)

    def add(i, before):
        at = jnp.minimum(begin_C + i, parts[0].shape[0] - 1)
        after = each(before, tuple(part[at] for part in parts))
        there = i < spans_C
        return tuple(
            jnp.where(there.reshape(-1, *[1] * (new.ndim - 1)), new, old)
            for new, old in zip(after, before, strict=True)
        )

    _, total, summed = jax.lax.fori_loop(0, jnp.max(spans_C, initial=0), add, (best, total, jnp.zeros((rows, N, H))))
    return summed / jnp.where(total == 0, 1.0, total)[..., None]
