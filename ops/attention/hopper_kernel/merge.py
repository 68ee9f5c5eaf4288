"""The second reduction of contexts that are cut: merges the spans of each row, in order.

Either the processor that is the last to save spans of a context does it, or a kernel of its own
does.
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
from .task import ROWS, CutContext, KernelShape, Plan, Task, saved_rows, spans_of

WARPGROUPS = 4  # of a processor, each with rows of its own
AHEAD = 8  # spans of a row that are read at once
READ = 32  # spans of all rows that are read at once


def merge_spans(shape: KernelShape, saved, out_TNH, sinks_N, plan: Plan, *, interpret: Any = None):
    """`out_TNH` with the rows whose contexts were cut, which get the bits of a single task."""
    out_ref = jax.new_ref(out_TNH, memory_space=plgpu.GMEM)
    sinks_N = jnp.zeros(shape.heads, jnp.float32) if sinks_N is None else sinks_N
    mesh = plgpu.Mesh(
        grid=(shape.processors,),
        grid_names=("processor",),
        num_threads=WARPGROUPS,
        thread_name="part",
    )
    pl.kernel(
        functools.partial(run, shape, Tiles(interpret is not None)),
        (),
        mesh=mesh,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=False if interpret is None else interpret,
        name="merge_spans",
    )(saved, sinks_N, plan.tiles_CF, plan.shares_RF, out_ref)
    return jax.freeze(out_ref)


def run(shape: KernelShape, tiles: Tiles, saved, sinks, tiles_CF, shares_RF, out) -> None:
    """What one warpgroup does: every so many rows of the contexts that are cut."""
    plan = Plan(tiles_CF, shares_RF, None)
    own = lax.axis_index("processor") * WARPGROUPS + lax.axis_index("part")
    workers = jnp.int32(shape.processors * WARPGROUPS)
    rows = jnp.int32(shape.task_rows)

    def each(n, _):
        at = own + n * workers
        number = lax.div(at, rows)
        share = plan.share(number)
        tile = lax.div(share.unit, jnp.int32(shape.parts))
        part = lax.rem(share.unit, jnp.int32(shape.parts))
        inside = lax.rem(at, rows)

        @pl.when((share.spans > 0) & (share.first == number))
        def _():
            row, count, _, _, first, last, span = plan.tile(tile)

            @pl.when(inside < count * shape.group)
            def _():
                token = row + lax.div(inside, jnp.int32(shape.group))
                head = part * shape.group + lax.rem(inside, jnp.int32(shape.group))
                stride = saved_rows(shape, count)
                spans = spans_of(first, last, span)
                merge_rows(
                    shape,
                    tiles,
                    saved,
                    sinks,
                    [share.place + inside],
                    stride,
                    spans,
                    out,
                    token,
                    [head],
                )

    items = jnp.int32(shape.processors) * rows
    lax.fori_loop(0, lax.div(items - own + workers - 1, workers), each, None)


def merge_task(
    shape: KernelShape, tiles: Tiles, saved, sinks, task: Task, context: CutContext, out
) -> None:
    """Merge the spans of all heads of a task of one position."""
    some = min(shape.group, AHEAD)

    def each(n, _):
        # the last ones again, where some do not divide all
        inside = jnp.minimum(n * some, shape.group - some)
        places = [context.place + inside + h for h in range(some)]
        heads = [task.part * shape.group + inside + h for h in range(some)]
        stride = saved_rows(shape, task.count)
        merge_rows(shape, tiles, saved, sinks, places, stride, context.spans, out, task.row, heads)

    lax.fori_loop(0, -(-shape.group // some), each, None)


def merge_rows(
    shape: KernelShape, tiles: Tiles, saved, sinks, places, stride, spans, out, token, heads
) -> None:
    """Merge the spans of some heads of a row, some columns at a time."""
    size = ROWS if shape.values % 128 else shape.values
    full = functools.partial(tiles.full_line, size)
    ahead = min(AHEAD, READ // len(places))

    for column in range(0, shape.values, size):
        columns = pl.ds(column, size)

        def some(n, rows, columns=columns):
            """The next few spans, which are all read before the first is merged."""

            def read(place, s):
                at = place + jnp.minimum(n * ahead + s, spans - 1) * stride
                return (
                    saved[at, shape.values],
                    saved[at, shape.values + 4],
                    tiles.load_line(saved.at[at, columns]),
                )

            found = [[read(place, s) for place in places] for s in range(ahead)]
            for s, after in enumerate(found):
                there = n * ahead + s < spans
                rows = [merged(before, new, there) for before, new in zip(rows, after, strict=True)]
            return rows

        def merged(before, after, there):
            best, total, sum_H = after
            *found, sum_of = merge(as_parts(*before), as_parts(full(best), full(total), sum_H))
            return tuple(
                jnp.where(there, new, old)
                for new, old in zip((*found, sum_of(0, size)), before, strict=True)
            )

        nothing = full(-jnp.inf), full(0.0), full(0.0)
        rows = lax.fori_loop(
            0, lax.div(spans + ahead - 1, jnp.int32(ahead)), some, [nothing] * len(places)
        )
        for head, (best, total, sum_H) in zip(heads, rows, strict=True):
            total = divisor(best, total, full(sinks[head]) if shape.sinks else None)
            out[token, head, columns] = (sum_H / total).astype(out.dtype)


def as_parts(best_H, total_H, sum_H):
    return best_H, total_H, lambda start, size: sum_H
