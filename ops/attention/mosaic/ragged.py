"""Attention of rows over pages, tile by tile: a producer copies pages, the other warpgroups multiply.

A tile is up to 64 rows of one sequence and one KV head: some positions, each with all query heads that share the head.
Keys come in blocks. The softmax of every `SPAN` keys is computed by itself and then merged into that of the spans
before. So a long context can be cut at spans and given to several processors, and a row's bits are the same whichever
processor computes it and whatever else is in the batch.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .fetch import fetch_all
from .multiply import multiply
from .shared import SharedMemory, shared_types
from .task import ROWS, Inputs, KernelShape, each_task
from .tile import Tiles


def run_tasks(shape: KernelShape, inputs: Inputs, tasks_IF, count, *, interpret: Any = None):
    """(sums, weights, maxima, results [T, N, values]); the first three are scratch unless spans are cut."""
    tiles, dtype = Tiles(interpret is not None), inputs.q.dtype
    places = shape.tasks * shape.parts if shape.cut else shape.processors * shape.warpgroups
    out = [jax.ShapeDtypeStruct((places, ROWS, shape.values if shape.cut else shape.columns), jnp.float32)]
    out += [jax.ShapeDtypeStruct((places, ROWS), jnp.float32)] * 2
    out.append(jax.ShapeDtypeStruct((shape.rows, shape.heads, shape.values), dtype))
    kernel = plgpu.kernel(
        functools.partial(run, shape, tiles, [name for name, x in inputs._asdict().items() if x is not None]),
        out_type=out,
        scratch_types=shared_types(shape, dtype),
        grid=(shape.processors,),
        grid_names=("processor",),
        num_threads=shape.warpgroups + 1,
        thread_name="part",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(*(x for x in inputs if x is not None), tasks_IF, count)


def run(shape: KernelShape, tiles: Tiles, names, *refs, **scratch):
    """What one processor does with its share of the tasks."""
    inputs = Inputs(**{**dict.fromkeys(Inputs._fields), **dict(zip(names, refs, strict=False))})
    tasks, count, *outs = refs[len(names) :]
    shared, part = SharedMemory(**scratch), lax.axis_index("part")

    @pl.when(part == shape.warpgroups)
    def _():
        plgpu.set_max_registers(40 if shape.warpgroups > 1 else 56, action="decrease")
        fetch_all(shape, inputs, shared, tasks, count[0])

    for own in range(shape.warpgroups):

        @pl.when(part == own)
        def _(own=own):
            plgpu.set_max_registers(232 if shape.warpgroups > 1 else 256, action="increase")
            each_task(shape, tasks, count[0], functools.partial(multiply, shape, tiles, inputs, shared, outs, own))
