"""Attention over pages: plans the tasks, runs them, and merges the spans of contexts that were cut."""

from typing import Any

import jax
import jax.numpy as jnp

from ..xla import tiles
from . import task as sizes
from .merge import merge_spans
from .ragged import run_tasks
from .task import ROWS, Inputs, KernelShape

BLOCK = 64  # keys of a block


def attend(
    q_TNH, pages, rows, sinks_N, *, window: int | None, scale: float, soft_cap: float | None, values: int | None,
    processors: int, interpret: Any = None,
):  # fmt: skip
    """[T, N, values]; padding rows are zero."""
    T, N, H = q_TNH.shape
    _, S, K, _ = pages.k_PSKH.shape
    B, M = rows.tables_BM.shape
    latent, codes = pages.v_PSKH is None, None if pages.k_scale_PKS is None else str(pages.k_PSKH.dtype)
    width = values if latent else H
    decodes = T == B  # mostly one row a sequence, and one row a tile
    spans = -(-M * S // sizes.SPAN) if decodes else 1
    shape = KernelShape(
        rows=T, positions=1 if decodes else ROWS // min(N // K, ROWS), heads=N, kv_heads=K, width=H, values=width,
        latent=latent, page=S, block=BLOCK, codes=codes, tasks=0, processors=processors,
        warpgroups=2 if latent or not (decodes or codes or H > 128) else 1, window=window, scale=scale,
        soft_cap=soft_cap, sinks=sinks_N is not None, cut=spans > 1,
    )  # fmt: skip
    tasks_IF, count, tiles_CF = plan(rows, T, shape.positions * shape.tiles, BLOCK, window, spans)
    shape = shape._replace(tasks=len(tasks_IF))
    inputs = Inputs(
        q_TNH, as_bytes(pages.k_PSKH), as_bytes(pages.v_PSKH), pages.k_scale_PKS, pages.v_scale_PKS,
        None if sinks_N is None else sinks_N.astype(jnp.float32), rows.tables_BM,
    )  # fmt: skip
    *left, out_TNH = run_tasks(shape, inputs, tasks_IF, count, interpret=interpret)
    if shape.cut:
        merged_TNH = merge_spans(shape, left, inputs.sinks, tiles_CF, q_TNH.dtype, interpret=interpret)
        row_C, _, spans_C = tiles_CF.T
        several_T = jnp.zeros(T, bool).at[row_C].set(spans_C > 1, mode="drop")
        out_TNH = jnp.where(several_T[:, None, None], merged_TNH, out_TNH)
    owned_T = jnp.arange(T) < rows.starts_B1[-1]
    return jnp.where(owned_T[:, None, None], out_TNH, 0)


def as_bytes(pages):
    """Codes of eight bits as int8, which kernels can copy."""
    return jax.lax.bitcast_convert_type(pages, jnp.int8) if pages is not None and pages.dtype.itemsize == 1 else pages


def plan(rows, T: int, positions: int, block: int, window: int | None, spans: int):
    """(tasks, their number, and for each tile its row, its first task and its number of tasks)."""
    row_CQ, seq_C, valid_CQ = tiles(rows.starts_B1, T, positions)
    row_C, count_C = row_CQ[:, 0], jnp.sum(valid_CQ, axis=1, dtype=jnp.int32)
    position_C = rows.positions_T[jnp.minimum(row_C, T - 1)]
    last_C = (position_C + count_C - 1) // block
    oldest_C = jnp.zeros_like(position_C) if window is None else jnp.maximum(position_C - window + 1, 0)
    first_C = oldest_C // block
    a_span = sizes.SPAN // block
    spans_C = last_C // a_span - first_C // a_span + 1 if spans > 1 else jnp.ones_like(last_C)
    spans_C = jnp.where(count_C > 0, spans_C, 0)
    end_C = jnp.cumsum(spans_C)
    C = row_C.shape[0]
    task_I = jnp.arange(C * spans)
    tile_I = jnp.minimum(jnp.searchsorted(end_C, task_I, side="right", method="compare_all"), C - 1)
    begin_C = end_C - spans_C
    if spans > 1:
        span_I = first_C[tile_I] // a_span + task_I - begin_C[tile_I]
        first_I = jnp.maximum(first_C[tile_I], span_I * a_span)
        last_I = jnp.minimum(last_C[tile_I], span_I * a_span + a_span - 1)
    else:
        first_I, last_I = first_C[tile_I], last_C[tile_I]
    alone_I = spans_C[tile_I] == 1
    fields = row_C[tile_I], count_C[tile_I], seq_C[tile_I], position_C[tile_I], first_I, last_I, task_I, alone_I
    tasks_IF, tiles_CF = (jnp.stack(x, axis=1).astype(jnp.int32) for x in (fields, (row_C, begin_C, spans_C)))
    return tasks_IF, end_C[-1:].astype(jnp.int32), tiles_CF
