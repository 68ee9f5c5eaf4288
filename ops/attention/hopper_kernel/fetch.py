"""The producer warpgroup: copies queries, and blocks of keys and values, into shared memory."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .shared import SharedMemory
from .task import Inputs, KernelShape, Plan, Task, each_task


def fetch_all(shape: KernelShape, inputs: Inputs, shared: SharedMemory, plan: Plan) -> None:
    """Copy the data of this processor's tasks, in order.

    Returns when the multiplying warpgroups have read all of it.
    """
    step = each_task(shape, plan, functools.partial(fetch, shape, inputs, shared))

    @pl.when(step > 0)
    def _():
        plgpu.barrier_wait(shared.q_empty)

    def wait_for_slot(slot, _):
        plgpu.barrier_wait(shared.k_empty.at[slot])
        if shared.v_ref is not None:
            plgpu.barrier_wait(shared.v_empty.at[slot])

    lax.fori_loop(0, jnp.minimum(step, shape.stages), wait_for_slot, None)


def fetch(shape: KernelShape, inputs: Inputs, shared: SharedMemory, task: Task, step):
    """Copy the queries of a task, and its keys and values as buffers become empty.

    The first blocks are copied before the queries, whose buffer becomes empty only at the end of
    the task before.
    """
    group = shape.group
    piece = shape.piece
    kv_head = task.kv_head(shape)
    prefetched = jnp.minimum(task.first + shape.stages - 1, task.last)

    def copy_queries():
        @pl.when(task.number > 0)
        def _():
            plgpu.barrier_wait(shared.q_empty)

        def position(n, _):
            tile = lax.div(n, jnp.int32(shape.positions))
            index_in_tile = lax.rem(n, jnp.int32(shape.positions))
            row = jnp.minimum(task.row + n, shape.rows - 1)
            source = inputs.q.at[row, pl.ds(task.head_tile * group, group)]
            plgpu.copy_gmem_to_smem(
                source, shared.q_ref.at[tile, pl.ds(index_in_tile * group, group)], shared.q_full
            )

        lax.fori_loop(0, shape.tiles * shape.positions, position, None)

    piece_starts = range(0, shape.block, piece)

    def read_page_ids(b):
        """The page number of each piece of a block; past the table's end that of the last page."""
        indices = [
            lax.div(b * shape.block + start, jnp.int32(shape.page)) for start in piece_starts
        ]
        return [
            inputs.tables[task.seq, jnp.minimum(at, inputs.tables.shape[1] - 1)] for at in indices
        ]

    def fetch_block(b, carry):
        step, *page_ids = carry
        next_page_ids = read_page_ids(b + 1)  # prefetched, so that no copy waits for the table
        slot = lax.rem(step, jnp.int32(shape.stages))

        def copy_block(source, scale, target, scale_target, full, empty):
            @pl.when(step >= shape.stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            for start, page in zip(piece_starts, page_ids, strict=True):
                offsets = pl.ds(lax.rem(b * shape.block + start, jnp.int32(shape.page)), piece)
                place = slot, pl.ds(start, piece)
                plgpu.copy_gmem_to_smem(
                    source.at[page, offsets, kv_head], target.at[place], full.at[slot]
                )
                if scale is not None:
                    plgpu.copy_gmem_to_smem(
                        scale.at[page, kv_head, offsets], scale_target.at[place], full.at[slot]
                    )

        copy_block(
            inputs.k, inputs.k_scale, shared.k_ref, shared.k_scale, shared.k_full, shared.k_empty
        )
        if shared.v_ref is not None:
            copy_block(
                inputs.v,
                inputs.v_scale,
                shared.v_ref,
                shared.v_scale,
                shared.v_full,
                shared.v_empty,
            )
        pl.when(b == prefetched)(copy_queries)
        return step + 1, *next_page_ids

    return lax.fori_loop(
        task.first, task.last + 1, fetch_block, (step, *read_page_ids(task.first))
    )[0]
