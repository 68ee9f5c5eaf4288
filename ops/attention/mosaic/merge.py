"""The second reduction of long contexts: merges the spans of a row, in order, where each was a task of its own."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .multiply import WarpgroupTask, by_part, merge
from .shared import SharedMemory
from .task import ROWS, Inputs, KernelShape, Task, each_part
from .tile import Tiles

FIELDS = 3  # of a tile: its row, the place of its first span, and its number of spans


def merge_spans(shape: KernelShape, found, sinks_N, tiles_CF, dtype, *, interpret: Any = None):
    """[T, N, values] with the bits of a single task; rows of tiles with one span or none are undefined."""
    kernel = plgpu.kernel(
        functools.partial(run, shape, Tiles(interpret is not None)),
        out_type=jax.ShapeDtypeStruct((shape.rows, shape.heads, shape.values), dtype),
        scratch_types={"q_ref": plgpu.SMEM((shape.warpgroups, ROWS, shape.columns), dtype)},
        grid=(shape.processors,),
        grid_names=("processor",),
        num_threads=shape.warpgroups,
        thread_name="part",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    sinks_N = jnp.zeros(shape.heads, jnp.float32) if sinks_N is None else sinks_N
    return kernel(*found, sinks_N, tiles_CF)


def run(shape: KernelShape, tiles: Tiles, sums, totals, bests, sinks, tiles_CF, out, *, q_ref) -> None:
    """What one processor does with its share of the tiles."""
    for own in range(shape.warpgroups):

        @pl.when(lax.axis_index("part") == own)
        def _(own=own):
            def each(n, tile, part, _):
                row, begin, count = (tiles_CF[tile, field] for field in range(FIELDS))
                nothing = jnp.int32(0)
                task = Task(nothing, row, jnp.int32(1), nothing, nothing, nothing, nothing, nothing, nothing, part)
                inputs = Inputs(*[None] * 5, sinks if shape.sinks else None, None)
                mine = WarpgroupTask(
                    shape, tiles, inputs, SharedMemory(q_ref, *[None] * 5), (sums, totals, bests, out), own, task
                )

                @pl.when(count > 1)
                def _():
                    def whole(best_M, total_M, sum_of):
                        return best_M, total_M, sum_of(0, shape.columns)

                    def span(s, before):
                        return whole(*merge(by_part(*before), mine.saved((begin + s) * shape.parts + part)))

                    found = lax.fori_loop(0, count, span, whole(*mine.start()))
                    mine.write(q_ref.at[own], False, 0, *by_part(*found))

            each_part(shape, jnp.int32(tiles_CF.shape[0]), each, None)
