"""The producer: one warpgroup that copies queries, and keys and values block by block, into shared
memory.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .shared import SharedMemory
from .task import Inputs, KernelShape, Plan, Task, each_task


def fetch_all(shape: KernelShape, inputs: Inputs, shared: SharedMemory, plan: Plan) -> None:
    """Copy what this processor's tasks need, in their order; return when all of it has been
    used.
    """
    step = each_task(shape, plan, functools.partial(fetch, shape, inputs, shared))

    @pl.when(step > 0)
    def _():
        plgpu.barrier_wait(shared.q_free)

    def emptied(slot, _):
        plgpu.barrier_wait(shared.k_free.at[slot])
        if shared.v_ref is not None:
            plgpu.barrier_wait(shared.v_free.at[slot])

    lax.fori_loop(0, jnp.minimum(step, shape.stages), emptied, None)


def fetch(shape: KernelShape, inputs: Inputs, shared: SharedMemory, task: Task, step):
    """Copy the queries of a task, and its keys and values as there is room for them.

    The first blocks are copied before the queries, whose place is free only when the task before
    has ended.
    """
    group = shape.group
    piece = shape.piece
    kv_head = task.kv_head(shape)
    ahead = jnp.minimum(task.first + shape.stages - 1, task.last)

    def queries():
        @pl.when(task.number > 0)
        def _():
            plgpu.barrier_wait(shared.q_free)

        def position(n, _):
            tile = lax.div(n, jnp.int32(shape.positions))
            p = lax.rem(n, jnp.int32(shape.positions))
            row = jnp.minimum(task.row + n, shape.rows - 1)
            source = inputs.q.at[row, pl.ds(task.part * group, group)]
            plgpu.copy_gmem_to_smem(
                source, shared.q_ref.at[tile, pl.ds(p * group, group)], shared.q_here
            )

        lax.fori_loop(0, shape.tiles * shape.positions, position, None)

    starts = range(0, shape.block, piece)

    def pages(b):
        """The page of each piece of a block; past the table's end the last page."""
        ats = [lax.div(b * shape.block + start, jnp.int32(shape.page)) for start in starts]
        return [inputs.tables[task.seq, jnp.minimum(at, inputs.tables.shape[1] - 1)] for at in ats]

    def block(b, carry):
        step, *found = carry
        following = pages(b + 1)  # read ahead: no copy waits for the table
        slot = lax.rem(step, jnp.int32(shape.stages))

        def bring(source, scale, target, scale_target, here, free):
            @pl.when(step >= shape.stages)
            def _():
                plgpu.barrier_wait(free.at[slot])

            for start, page in zip(starts, found, strict=True):
                inside = pl.ds(lax.rem(b * shape.block + start, jnp.int32(shape.page)), piece)
                to = slot, pl.ds(start, piece)
                plgpu.copy_gmem_to_smem(
                    source.at[page, inside, kv_head], target.at[to], here.at[slot]
                )
                if scale is not None:
                    plgpu.copy_gmem_to_smem(
                        scale.at[page, kv_head, inside], scale_target.at[to], here.at[slot]
                    )

        bring(inputs.k, inputs.k_scale, shared.k_ref, shared.k_scale, shared.k_here, shared.k_free)
        if shared.v_ref is not None:
            bring(
                inputs.v, inputs.v_scale, shared.v_ref, shared.v_scale, shared.v_here, shared.v_free
            )
        pl.when(b == ahead)(queries)
        return step + 1, *following

    return lax.fori_loop(task.first, task.last + 1, block, (step, *pages(task.first)))[0]
