"""Merges the saved spans of cut contexts, row by row, in the order of the spans.

This is done either by the last processor that saves spans of a context, or by a second kernel.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...gpu.tile import Tiles
from .softmax import divisor, merge
from .task import ROWS, CutContext, KernelShape, Plan, Task, count_spans, saved_rows

WARPGROUPS = 4  # of a processor, each with rows of its own
UNROLL = 8  # spans of a row that are read at once, and heads that are merged at once
MAX_LOADS = 32  # spans of all heads that are read at once


def merge_spans(shape: KernelShape, saved, out_TNH, sinks_N, plan: Plan, *, interpret: Any = None):
    """Fill in the rows of `out_TNH` whose contexts were cut, by a kernel on all processors.

    They get the same bits as rows whose contexts were not cut.
    """
    out_ref = jax.new_ref(out_TNH, memory_space=plgpu.GMEM)
    sinks_N = jnp.zeros(shape.heads, jnp.float32) if sinks_N is None else sinks_N
    mesh = plgpu.Mesh(
        grid=(shape.processors,),
        grid_names=("processor",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
    )
    kernel: Any = pl.kernel(
        functools.partial(run, shape, Tiles(interpret is not None)),
        (),
        mesh=mesh,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=False if interpret is None else interpret,
        name="merge_spans",
    )
    kernel(saved, sinks_N, plan.tiles_CF, plan.shares_RF, out_ref)
    return jax.freeze(out_ref)


def run(shape: KernelShape, tiles: Tiles, saved, sinks, tiles_CF, shares_RF, out) -> None:
    """The kernel's body: one warpgroup merges every `num_workers`-th row of the cut contexts."""
    plan = Plan(tiles_CF, shares_RF, None)
    worker = lax.axis_index("processor") * WARPGROUPS + lax.axis_index("warpgroup")
    num_workers = jnp.int32(shape.processors * WARPGROUPS)
    task_rows = jnp.int32(shape.task_rows)

    def merge_item(n, _):
        item = worker + n * num_workers
        share_number = lax.div(item, task_rows)
        share = plan.share(share_number)
        tile = lax.div(share.unit, jnp.int32(shape.head_tiles))
        head_tile = lax.rem(share.unit, jnp.int32(shape.head_tiles))
        row_in_task = lax.rem(item, task_rows)

        @pl.when((share.spans > 0) & (share.first == share_number))
        def _():
            row, count, _, _, first, last, span = plan.tile(tile)

            @pl.when(row_in_task < count * shape.group)
            def _():
                token = row + lax.div(row_in_task, jnp.int32(shape.group))
                head = head_tile * shape.group + lax.rem(row_in_task, jnp.int32(shape.group))
                stride = saved_rows(shape, count)
                spans = count_spans(first, last, span)
                merge_rows(
                    shape,
                    tiles,
                    saved,
                    sinks,
                    [share.place + row_in_task],
                    stride,
                    spans,
                    out,
                    token,
                    [head],
                )

    items = jnp.int32(shape.processors) * task_rows
    lax.fori_loop(0, lax.div(items - worker + num_workers - 1, num_workers), merge_item, None)


def merge_task(
    shape: KernelShape, tiles: Tiles, saved, sinks, task: Task, context: CutContext, out
) -> None:
    """Merge the spans of all heads of a task that has one position."""
    num_heads = min(shape.group, UNROLL)

    def merge_heads(n, _):
        # the last iteration repeats heads if their number does not divide
        first_head = jnp.minimum(n * num_heads, shape.group - num_heads)
        places = [context.place + first_head + h for h in range(num_heads)]
        heads = [task.head_tile * shape.group + first_head + h for h in range(num_heads)]
        stride = saved_rows(shape, task.count)
        merge_rows(shape, tiles, saved, sinks, places, stride, context.spans, out, task.row, heads)

    lax.fori_loop(0, -(-shape.group // num_heads), merge_heads, None)


def merge_rows(
    shape: KernelShape, tiles: Tiles, saved, sinks, first_rows, stride, num_spans, out, token, heads
) -> None:
    """Merge the spans of some heads of a row, some columns at a time.

    Args:
        saved: The saved spans, [rows, saved_width].
        first_rows: For each head the row of its first span in `saved`.
        stride: Rows of `saved` from one span to the next.
    """
    num_columns = ROWS if shape.values % 128 else shape.values
    full = functools.partial(tiles.full_line, num_columns)
    spans_at_once = min(UNROLL, MAX_LOADS // len(first_rows))

    for column in range(0, shape.values, num_columns):
        columns = pl.ds(column, num_columns)

        def merge_next_spans(n, softmaxes, columns=columns):
            """Merge the next spans, all of which are loaded before the first is merged."""

            def read(first_row, offset):
                row = first_row + jnp.minimum(n * spans_at_once + offset, num_spans - 1) * stride
                return (
                    saved[row, shape.values],
                    saved[row, shape.values + 4],
                    tiles.load_line(saved.at[row, columns]),
                )

            loaded = [
                [read(first_row, offset) for first_row in first_rows]
                for offset in range(spans_at_once)
            ]
            for offset, new_spans in enumerate(loaded):
                is_valid = n * spans_at_once + offset < num_spans
                softmaxes = [
                    merge_span(softmax, span, is_valid)
                    for softmax, span in zip(softmaxes, new_spans, strict=True)
                ]
            return softmaxes

        def merge_span(softmax, span, is_valid):
            best, total, sum_H = span
            *stats, sum_slice = merge(
                line_softmax(*softmax), line_softmax(full(best), full(total), sum_H)
            )
            return tuple(
                jnp.where(is_valid, new, old)
                for new, old in zip((*stats, sum_slice(0, num_columns)), softmax, strict=True)
            )

        empty = full(-jnp.inf), full(0.0), full(0.0)
        softmaxes = lax.fori_loop(
            0,
            lax.div(num_spans + spans_at_once - 1, jnp.int32(spans_at_once)),
            merge_next_spans,
            [empty] * len(first_rows),
        )
        for head, (best, total, sum_H) in zip(heads, softmaxes, strict=True):
            total = divisor(best, total, full(sinks[head]) if shape.sinks else None)
            out[token, head, columns] = (sum_H / total).astype(out.dtype)


def line_softmax(best_H, total_H, sum_H):
    return best_H, total_H, lambda start, size: sum_H
