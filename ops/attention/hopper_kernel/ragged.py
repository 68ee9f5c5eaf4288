"""The attention kernel: a producer warpgroup copies pages, the other warpgroups multiply.

A tile is up to 64 rows of one sequence and one KV head: some positions, each with all query heads
of the KV head. Keys come in blocks. The softmax of each span of blocks is computed by itself and
then merged with that of the earlier spans. So a context can be cut between spans and split among
several processors (split-KV), and the results do not depend on the partition or the batch.
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
    """References in global memory."""

    saved: Any  # [places, saved_width]: partial softmaxes of the spans of cut contexts
    out: Any  # [T, N, values]
    # the softmax of the spans so far of each multiplying warpgroup, if registers do not suffice
    sums: Any = None
    totals: Any = None
    bests: Any = None


def run_tasks(shape: KernelShape, inputs: Inputs, plan: Plan, *, interpret: Any = None):
    """Run the kernel: (saved spans, results).

    Results of padding rows are zero. If `merge_spans` follows, results of rows with cut contexts
    are undefined.
    """
    tiles = Tiles(interpret is not None)
    dtype = inputs.q.dtype
    out = [
        jax.ShapeDtypeStruct((shape.places, shape.saved_width), jnp.float32),
        jax.ShapeDtypeStruct((shape.rows, shape.heads, shape.values), dtype),
    ]
    if not shape.spans_in_registers:
        scratch_shape = shape.processors * shape.warpgroups, ROWS
        out += [
            jax.ShapeDtypeStruct((*scratch_shape, *size), jnp.float32)
            for size in ((shape.columns,), (), ())
        ]
    names = [name for name, x in inputs._asdict().items() if x is not None]

    def body(*refs):  # `plgpu.kernel` would allocate the scratch, but does not take references
        do = functools.partial(run, shape, tiles, names, *refs)
        pl.run_scoped(do, collective_axes="warpgroup", **shared_types(shape, dtype))

    kernel: Any = pl.kernel(
        body,
        out,
        mesh=plgpu.Mesh(
            grid=(shape.processors,),
            grid_names=("processor",),
            num_threads=shape.warpgroups + 1,
            thread_name="warpgroup",
        ),
        # Rows are reduced within a warp, which takes no shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=False if interpret is None else interpret,
        name="attend",
    )
    return kernel(*(x for x in inputs if x is not None), *plan)[:2]


def run(shape: KernelShape, tiles: Tiles, names, *refs, **scratch):
    """The kernel's body: the work of one warpgroup of one processor."""
    inputs = Inputs(**{**dict.fromkeys(Inputs._fields), **dict(zip(names, refs, strict=False))})
    num_inputs = len(names)
    first_output = len(names) + len(Plan._fields)
    plan = Plan(*refs[num_inputs:first_output])
    outs = Outputs(*refs[first_output:])
    shared = SharedMemory(**scratch)
    thread = lax.axis_index("warpgroup")

    @pl.when(thread == shape.warpgroups)
    def _():
        plgpu.set_max_registers(shape.registers[0], action="decrease")
        fetch_all(shape, inputs, shared, plan)

    for warpgroup in range(shape.warpgroups):

        @pl.when(thread == warpgroup)
        def _(warpgroup=warpgroup):
            plgpu.set_max_registers(shape.registers[1], action="increase")
            if shape.ping_pong and warpgroup == 1:
                plgpu.barrier_arrive(shared.turn.at[0])  # the first turn is the other warpgroup's
            each_task(
                shape,
                plan,
                functools.partial(multiply, shape, tiles, inputs, plan, shared, outs, warpgroup),
            )
            if shape.ping_pong and warpgroup == 0:
                plgpu.barrier_wait(shared.turn.at[0])  # consume the last turn, which is not used
            if warpgroup == 0:
                clear(shape, tiles, plan, outs.out)


def clear(shape: KernelShape, tiles: Tiles, plan: Plan, out) -> None:
    """Zero this processor's share of the padding rows of the results."""
    zeros_M = tiles.full((ROWS,), 0.0).astype(out.dtype)
    first_row = plan.owned_1[0] + lax.axis_index("processor")
    rows_left = shape.rows - first_row + shape.processors - 1
    num_stores = jnp.maximum(lax.div(rows_left, jnp.int32(shape.processors)), 0) * shape.heads

    def zero(n, _):
        row = first_row + lax.div(n, jnp.int32(shape.heads)) * shape.processors
        head = lax.rem(n, jnp.int32(shape.heads))
        for column in range(0, shape.values, ROWS):
            out[row, head, pl.ds(column, ROWS)] = zeros_M

    lax.fori_loop(0, num_stores, zero, None)
