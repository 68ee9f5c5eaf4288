"""Attention of rows over pages, tile by tile: the producer fetches pages, the other warpgroup multiplies.

A tile is up to 64 rows of one sequence and one KV head: so many positions, each with all query heads that share the
head. Keys come in blocks, and every `SPAN` keys make a span whose softmax is finished by itself and merged into what
came before. So a long context can be cut at spans among several processors, and a row's result has the same bits
whoever computes it, and whatever else is in its batch.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .task import ROWS, Inputs, Shape, Task, each_task
from .tile import LOG2_E, Tiles, along_rows

SPAN = 4096  # keys
MULTIPLY, FETCH = 0, 1  # warpgroups


def run_tasks(shape: Shape, q_TNH, k_PSKH, v_PSKH, sinks_N, tables_BM, tasks_IF, count, *, interpret: Any = None):
    """[T, N, H], or where spans are cut (sums, weights, maxima) of each task."""
    tiles = Tiles(interpret is not None)
    dtype, H = q_TNH.dtype, shape.width
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    stage = plgpu.SMEM((shape.stages, shape.block, H), dtype, transforms=swizzled)
    scratch = {
        "q_ref": plgpu.SMEM((ROWS, H), dtype),
        "k_ref": stage,
        "v_ref": stage,
        "best_ref": plgpu.SMEM((ROWS,), jnp.float32),
        "total_ref": plgpu.SMEM((ROWS,), jnp.float32),
        "sum_ref": plgpu.SMEM((ROWS, H), jnp.float32),
        "q_here": plgpu.Barrier(num_arrivals=shape.positions),
        "q_free": plgpu.Barrier(),
        "k_here": plgpu.Barrier(num_arrivals=shape.block // shape.piece, num_barriers=shape.stages),
        "v_here": plgpu.Barrier(num_arrivals=shape.block // shape.piece, num_barriers=shape.stages),
        "k_free": plgpu.Barrier(num_barriers=shape.stages),
        "v_free": plgpu.Barrier(num_barriers=shape.stages),
    }
    if shape.cut:
        found = shape.tasks * shape.kv_heads
        shapes = (found, shape.group, H), (found, ROWS), (found, ROWS)
        out = [jax.ShapeDtypeStruct(each, jnp.float32) for each in shapes]
    else:
        out = [jax.ShapeDtypeStruct(q_TNH.shape, dtype)]
    kernel = plgpu.kernel(
        functools.partial(run, shape, tiles),
        out_type=out,
        scratch_types=scratch,
        grid=(shape.processors,),
        grid_names=("processor",),
        num_threads=2,
        thread_name="part",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    sinks = jnp.zeros(shape.heads, jnp.float32) if sinks_N is None else sinks_N.astype(jnp.float32)
    return kernel(q_TNH, k_PSKH, v_PSKH, sinks, tables_BM, tasks_IF, count)


def run(shape: Shape, tiles: Tiles, q, k, v, sinks, tables, tasks, count, *outs, **scratch):
    """One processor: every so many tasks are its own."""
    inputs, part = Inputs(q, k, v, sinks, tables), lax.axis_index("part")
    work, mine = count[0] * shape.kv_heads, lax.axis_index("processor")

    @pl.when(part == FETCH)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        step = each_task(shape, tasks, work, mine, functools.partial(fetch, shape, inputs, **scratch))
        drain(shape, step, **scratch)

    @pl.when(part == MULTIPLY)
    def _():
        plgpu.set_max_registers(232, action="increase")
        each_task(shape, tasks, work, mine, functools.partial(multiply, shape, tiles, inputs, outs, **scratch))


def fetch(shape: Shape, inputs: Inputs, task: Task, step, *, q_ref, k_ref, v_ref, q_here, q_free, k_here, v_here,
          k_free, v_free, **_):  # fmt: skip
    """Bring the queries of a task, and its keys and values block by block, as there is room for them."""
    group, piece = shape.group, shape.piece

    @pl.when(task.number > 0)
    def _():
        plgpu.barrier_wait(q_free)

    for p in range(shape.positions):
        row = jnp.minimum(task.row + p, shape.rows - 1)
        source = inputs.q.at[row, pl.ds(task.head * group, group)]
        plgpu.copy_gmem_to_smem(source, q_ref.at[pl.ds(p * group, group)], q_here)

    def block(b, step):
        slot = lax.rem(step, jnp.int32(shape.stages))

        def bring(source, target, here, free):
            @pl.when(step >= shape.stages)
            def _():
                plgpu.barrier_wait(free.at[slot])

            for j in range(shape.block // piece):
                position = b * shape.block + j * piece
                at = jnp.minimum(lax.div(position, jnp.int32(shape.page)), inputs.tables.shape[1] - 1)
                inside = pl.ds(lax.rem(position, jnp.int32(shape.page)), piece)
                held = source.at[inputs.tables[task.seq, at], inside, task.head]
                plgpu.copy_gmem_to_smem(held, target.at[slot, pl.ds(j * piece, piece)], here.at[slot])

        bring(inputs.k, k_ref, k_here, k_free)
        bring(inputs.v, v_ref, v_here, v_free)
        return step + 1

    return lax.fori_loop(task.first, task.last + 1, block, step)


def drain(shape: Shape, step, *, q_free, k_free, v_free, **_) -> None:
    """Nothing that was brought is left unused."""

    @pl.when(step > 0)
    def _():
        plgpu.barrier_wait(q_free)

    for slot in range(shape.stages):

        @pl.when(step > slot)
        def _(slot=slot):
            plgpu.barrier_wait(k_free.at[slot])
            plgpu.barrier_wait(v_free.at[slot])


def multiply(shape: Shape, tiles: Tiles, inputs: Inputs, outs, task: Task, step, *, q_ref, k_ref, v_ref, best_ref,
             total_ref, sum_ref, q_here, q_free, k_here, v_here, k_free, v_free):  # fmt: skip
    """The softmax of a task's rows, span by span."""
    J, H = shape.block, shape.width
    plgpu.barrier_wait(q_here)
    q_MH = tiles.load(q_ref)
    position_MJ = task.position + lax.div(tiles.index((ROWS, J), 0), jnp.int32(shape.group))
    factor = shape.scale * LOG2_E

    def block(b, carry):
        best_M, total_M, sum_MH, step = carry
        slot = lax.rem(step, jnp.int32(shape.stages))
        plgpu.barrier_wait(k_here.at[slot])
        score_MJ = tiles.scores(q_MH, k_ref.at[slot])
        plgpu.barrier_arrive(k_free.at[slot])
        if shape.soft_cap is None:
            score_MJ = score_MJ * factor
        else:
            score_MJ = jnp.tanh(score_MJ * (shape.scale / shape.soft_cap)) * (shape.soft_cap * LOG2_E)
        key_MJ = b * J + tiles.index((ROWS, J), 1)
        seen_MJ = key_MJ <= position_MJ
        if shape.window is not None:
            seen_MJ &= key_MJ > position_MJ - shape.window
        score_MJ = jnp.where(seen_MJ, score_MJ, -jnp.inf)
        new_M = jnp.maximum(best_M, jnp.max(score_MJ, axis=1))
        finite_M = jnp.where(new_M == -jnp.inf, 0.0, new_M)
        shrink_M = jnp.exp2(best_M - finite_M)
        weight_MJ = jnp.exp2(score_MJ - along_rows(finite_M, score_MJ.shape))
        total_M = total_M * shrink_M + jnp.sum(weight_MJ, axis=1)
        sum_MH = sum_MH * along_rows(shrink_M, sum_MH.shape)
        plgpu.barrier_wait(v_here.at[slot])
        scrub(shape, tiles, task, b, v_ref.at[slot])
        sum_MH = tiles.add_product(sum_MH, weight_MJ.astype(q_MH.dtype), v_ref.at[slot])
        plgpu.barrier_arrive(v_free.at[slot])
        return new_M, total_M, sum_MH, step + 1

    def span(s, step):
        first, last = jnp.maximum(task.first, s * (SPAN // J)), jnp.minimum(task.last + 1, (s + 1) * (SPAN // J))
        start = tiles.full((ROWS,), -jnp.inf), tiles.full((ROWS,), 0.0), tiles.full((ROWS, H), 0.0), step
        *found, step = lax.fori_loop(first, last, block, start)
        if not shape.cut:
            before = tiles.load_rows(best_ref), tiles.load_rows(total_ref), tiles.load(sum_ref)
            found = merge(before, found)
        best_ref[...], total_ref[...], sum_ref[...] = found
        return step

    if not shape.cut:
        sink_M = sinks_of(shape, tiles, inputs, task)
        best_ref[...] = sink_M
        total_ref[...] = jnp.where(sink_M == -jnp.inf, 0.0, 1.0)
        sum_ref[...] = tiles.full((ROWS, H), 0.0)
    step = lax.fori_loop(lax.div(task.first, SPAN // J), lax.div(task.last, SPAN // J) + 1, span, step)
    if shape.cut:
        plgpu.commit_smem()
        at = task.place * shape.kv_heads + task.head
        plgpu.copy_smem_to_gmem(sum_ref.at[pl.ds(0, shape.group)], outs[0].at[at])
        plgpu.copy_smem_to_gmem(total_ref, outs[1].at[at])
        plgpu.copy_smem_to_gmem(best_ref, outs[2].at[at])
    else:
        total_M = tiles.load_rows(total_ref)
        total_M = jnp.where(total_M == 0, 1.0, total_M)
        out_MH = tiles.load(sum_ref) / along_rows(total_M, (ROWS, H))
        q_ref[...] = out_MH.astype(q_ref.dtype)
        plgpu.commit_smem()

        def give(p, _):
            source = q_ref.at[pl.ds(p * shape.group, shape.group)]
            heads = pl.ds(task.head * shape.group, shape.group)
            plgpu.copy_smem_to_gmem(source, outs[0].at[task.row + p, heads])

        lax.fori_loop(0, task.count, give, None)
    plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(q_free)
    return step


def merge(before, after):
    """Two spans as one: (greatest score, sum of weights, weighted sum of values) of each row."""
    best_M = jnp.maximum(before[0], after[0])
    finite_M = jnp.where(best_M == -jnp.inf, 0.0, best_M)
    shrinks = [jnp.exp2(part[0] - finite_M) for part in (before, after)]
    total_M = before[1] * shrinks[0] + after[1] * shrinks[1]
    old_MH, new_MH = (
        part[2] * along_rows(shrink_M, part[2].shape) for part, shrink_M in zip((before, after), shrinks, strict=True)
    )
    return best_M, total_M, old_MH + new_MH


def sinks_of(shape: Shape, tiles: Tiles, inputs: Inputs, task: Task):
    """The score of each row's sink, which has no value; -inf where there are none."""
    if not shape.sinks:
        return tiles.full((ROWS,), -jnp.inf)
    head_M8 = lax.rem(tiles.index((ROWS, 8), 0), jnp.int32(shape.group))
    sink_M8 = tiles.full((ROWS, 8), -jnp.inf)
    for g in range(shape.group):
        sink_M8 = jnp.where(head_M8 == g, inputs.sinks[task.head * shape.group + g] * LOG2_E, sink_M8)
    return jnp.max(sink_M8, axis=1)


def scrub(shape: Shape, tiles: Tiles, task: Task, b, v_JH_ref) -> None:
    """Zero the values that are none of the sequence's: pages hold what their last owners left, and 0 * NaN is NaN."""
    J, newest = shape.block, task.position + task.count - 1
    oldest = jnp.int32(0) if shape.window is None else task.position - shape.window + 1
    foreign = ((b + 1) * J > newest + 1) | (b * J < oldest)

    @pl.when(foreign)
    def _():
        v_JH = tiles.load(v_JH_ref, swizzled=True)
        key_JH = b * J + tiles.index(v_JH.shape, 0)
        own = (key_JH <= newest) & (key_JH >= oldest)
        v_JH_ref[...] = jnp.where(own, v_JH, 0).astype(v_JH.dtype)
        plgpu.commit_smem()
