"""Attention of rows over pages, tile by tile: a producer copies pages, the other warpgroups
multiply.

A tile is up to 64 rows of one sequence and one KV head: some positions, each with all query heads
that share the head. Keys come in blocks. The softmax of each span of keys is computed by itself and
then merged into that of the spans before. So a context can be cut at spans and given to several
processors, and a row's bits are the same whichever processor computes it and whatever else is in
the batch.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...gpu.tile import Tiles
from .fetch import fetch_all
from .multiply import multiply
from .shared import SharedMemory, shared_types
from .task import ROWS, Inputs, KernelShape, Plan, each_task


class Outputs(NamedTuple):
    """References in the card's memory."""

    saved: Any  # [places, saved_width]: the softmax of each span of a context that is cut
    out: Any  # [T, N, values]
    # of each multiplying warpgroup, between spans, where its registers do not hold them
    sums: Any = None
    totals: Any = None
    bests: Any = None


def run_tasks(shape: KernelShape, inputs: Inputs, plan: Plan, *, interpret: Any = None):
    """(saved spans, results).

    Rows of contexts that are cut are undefined, and padding rows are zero.
    """
    tiles = Tiles(interpret is not None)
    dtype = inputs.q.dtype
    out = [
        jax.ShapeDtypeStruct((shape.places, shape.saved_width), jnp.float32),
        jax.ShapeDtypeStruct((shape.rows, shape.heads, shape.values), dtype),
    ]
    if not shape.held:
        own = shape.processors * shape.warpgroups, ROWS
        out += [
            jax.ShapeDtypeStruct((*own, *size), jnp.float32) for size in ((shape.columns,), (), ())
        ]
    given = [name for name, x in inputs._asdict().items() if x is not None]

    def body(*refs):  # `plgpu.kernel` would do this, but takes no references
        do = functools.partial(run, shape, tiles, given, *refs)
        pl.run_scoped(do, collective_axes="part", **shared_types(shape, dtype))

    kernel = pl.kernel(
        body,
        out,
        mesh=plgpu.Mesh(
            grid=(shape.processors,),
            grid_names=("processor",),
            num_threads=shape.warpgroups + 1,
            thread_name="part",
        ),
        # Rows are reduced within a warp, which takes no shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=False if interpret is None else interpret,
        name="attend",
    )
    return kernel(*(x for x in inputs if x is not None), *plan)[:2]


def run(shape: KernelShape, tiles: Tiles, names, *refs, **scratch):
    """What one processor does with its share of the tasks."""
    inputs = Inputs(**{**dict.fromkeys(Inputs._fields), **dict(zip(names, refs, strict=False))})
    first = len(names)
    last = len(names) + len(Plan._fields)
    plan = Plan(*refs[first:last])
    outs = Outputs(*refs[last:])
    shared = SharedMemory(**scratch)
    part = lax.axis_index("part")

    @pl.when(part == shape.warpgroups)
    def _():
        plgpu.set_max_registers(shape.registers[0], action="decrease")
        fetch_all(shape, inputs, shared, plan)

    for own in range(shape.warpgroups):

        @pl.when(part == own)
        def _(own=own):
            plgpu.set_max_registers(shape.registers[1], action="increase")
            if shape.turns and own == 1:
                plgpu.barrier_arrive(shared.turn.at[0])  # the first turn is the other's
            each_task(
                shape,
                plan,
                functools.partial(multiply, shape, tiles, inputs, plan, shared, outs, own),
            )
            if shape.turns and own == 0:
                plgpu.barrier_wait(shared.turn.at[0])  # the last one, which nobody takes
            if own == 0:
                clear(shape, tiles, plan, outs.out)


def clear(shape: KernelShape, tiles: Tiles, plan: Plan, out) -> None:
    """Zero this processor's share of the padding rows."""
    zeros_M = tiles.full((ROWS,), 0.0).astype(out.dtype)
    owned = plan.owned_1[0] + lax.axis_index("processor")
    left = shape.rows - owned + shape.processors - 1
    trips = jnp.maximum(lax.div(left, jnp.int32(shape.processors)), 0) * shape.heads

    def zero(n, _):
        row = owned + lax.div(n, jnp.int32(shape.heads)) * shape.processors
        head = lax.rem(n, jnp.int32(shape.heads))
        for column in range(0, shape.values, ROWS):
            out[row, head, pl.ds(column, ROWS)] = zeros_M

    lax.fori_loop(0, trips, zero, None)
