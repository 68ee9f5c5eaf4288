"""The second reduction of contexts that are cut: merges the spans of each row, in order."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .multiply import divisor, merge
from .task import ROWS, KernelShape, Plan, Share, saved_rows
from .tile import Tiles

WARPGROUPS = 4  # of a processor, each with rows of its own
AHEAD = 8  # spans that are read at once


def merge_spans(shape: KernelShape, saved, out_TNH, sinks_N, plan: Plan, *, interpret: Any = None):
    """`out_TNH` with the rows whose contexts were cut, which get the bits of a single task."""
    out_ref = jax.new_ref(out_TNH, memory_space=plgpu.GMEM)
    sinks_N = jnp.zeros(shape.heads, jnp.float32) if sinks_N is None else sinks_N
    mesh = plgpu.Mesh(grid=(shape.processors,), grid_names=("processor",), num_threads=WARPGROUPS, thread_name="part")
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
    own = lax.axis_index("processor") * WARPGROUPS + lax.axis_index("part")
    workers, rows = jnp.int32(shape.processors * WARPGROUPS), jnp.int32(shape.task_rows)

    def each(n, _):
        at = own + n * workers
        share = Share(*[shares_RF[lax.div(at, rows), f] for f in range(len(Share._fields))])
        tile, part = lax.div(share.unit, jnp.int32(shape.parts)), lax.rem(share.unit, jnp.int32(shape.parts))
        inside = lax.rem(at, rows)

        @pl.when(share.merged > 0)
        def _():
            count = tiles_CF[tile, 1]

            @pl.when(inside < count * shape.group)
            def _():
                token = tiles_CF[tile, 0] + lax.div(inside, jnp.int32(shape.group))
                head = part * shape.group + lax.rem(inside, jnp.int32(shape.group))
                place, stride = share.place + inside, saved_rows(shape, count)
                merge_row(shape, tiles, saved, sinks[head], place, stride, share.merged, out.at[token, head])

    items = jnp.int32(shape.processors) * rows
    lax.fori_loop(0, lax.div(items - own + workers - 1, workers), each, None)


def merge_row(shape: KernelShape, tiles: Tiles, saved, sink, place, stride, spans, out_ref) -> None:
    """Merge the spans of one row and head, some columns at a time."""
    size = ROWS if shape.values % 128 else shape.values
    full = functools.partial(tiles.full_line, size)

    for column in range(0, shape.values, size):
        columns = pl.ds(column, size)

        def some(n, before, columns=columns):
            """The next few spans, which are all read before the first is merged."""
            ats = [place + jnp.minimum(n * AHEAD + s, spans - 1) * stride for s in range(AHEAD)]
            read = [
                (saved[at, shape.values], saved[at, shape.values + 4], tiles.load_line(saved.at[at, columns]))
                for at in ats
            ]
            for s, (best, total, sum_H) in enumerate(read):
                best, total, sum_of = merge(as_parts(*before), as_parts(full(best), full(total), sum_H))
                merged = best, total, sum_of(0, size)
                there = n * AHEAD + s < spans
                before = [jnp.where(there, new, old) for new, old in zip(merged, before, strict=True)]
            return tuple(before)

        nothing = full(-jnp.inf), full(0.0), full(0.0)
        best, total, sum_H = lax.fori_loop(0, lax.div(spans + AHEAD - 1, jnp.int32(AHEAD)), some, nothing)
        total = divisor(best, total, full(sink) if shape.sinks else None)
        out_ref[columns] = (sum_H / total).astype(out_ref.dtype)


def as_parts(best_H, total_H, sum_H):
    return best_H, total_H, lambda start, size: sum_H
