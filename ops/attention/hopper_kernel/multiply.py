"""What a multiplying warpgroup does with a task: the softmax of its tile, by blocks and spans."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...gpu.tile import LOG2_E, Tiles, along_columns, along_rows
from .merge import merge_task
from .shared import SharedMemory
from .softmax import by_part, divisor, either, merge, parts, whole
from .task import (
    NUMBERS,
    ROWS,
    STAGED,
    CutContext,
    Inputs,
    KernelShape,
    Plan,
    Task,
    context_of,
    saved_rows,
    spans_of,
    task_of,
)  # fmt: skip

COLUMNS = 64  # that are zeroed at once


def multiply(
    shape: KernelShape,
    tiles: Tiles,
    inputs: Inputs,
    plan: Plan,
    shared: SharedMemory,
    outs,
    own: int,
    task: Task,
    step,
):
    """One warpgroup's part of a task. Returns `step`, the number of blocks so far."""
    plgpu.barrier_wait(shared.q_here)
    mine = WarpgroupTask(shape, tiles, inputs, shared, outs, own, task)
    q = mine.queries()
    cut = task.place >= 0
    first_span = lax.div(task.first, task.span)
    last_span = lax.div(task.last, task.span)
    nothing = (
        tiles.full((ROWS,), -jnp.inf),
        tiles.full((ROWS,), 0.0),
        tiles.full((ROWS, shape.columns), 0.0),
    )

    def span(s, step):
        """(the softmax of a span by itself, step)."""
        first = jnp.maximum(task.first, s * task.span)
        last = jnp.minimum(task.last + 1, (s + 1) * task.span)
        mine.take_turn()
        *found, step = lax.fori_loop(
            first, last, lambda b, carry: mine.block(q, b, *carry), (*nothing, step)
        )
        mine.pass_turn()
        if shape.latent:
            best_M, total_M, sum_MH = found
            found = best_M, total_M + mine.other(total_M), sum_MH
            mine.wait_for_all()  # the other has read the sum of weights
        return by_part(*found), step

    def add_span(s, carry):
        best_M, *before, step = carry
        found, step = span(s, step)
        if shape.cut:  # spans that are saved have nothing before them
            best_M = jnp.where(cut, -jnp.inf, best_M)
        found = whole(shape, *merge(by_part(best_M, *before), found))
        if shape.cut:
            pl.when(cut)(lambda: mine.save(s - first_span, *by_part(*found)))
        return *found, step

    def add_span_in_memory(s, step):
        found, step = span(s, step)

        def merged():
            before = either(s == first_span, lambda: by_part(*nothing), mine.kept)
            lax.cond(s == last_span, lambda: mine.finish(*merge(before, found)),
                     lambda: mine.keep(*merge(before, found)))  # fmt: skip

        if shape.cut:
            lax.cond(cut, lambda: mine.save(s - first_span, *found), merged)
        else:
            merged()
        return step

    if shape.held:
        *found, step = lax.fori_loop(first_span, last_span + 1, add_span, (*nothing, step))
        task = task_of(shape, plan, task.number)
        pl.when(task.place < 0)(lambda: replace(mine, task=task).finish(*by_part(*found)))
    else:
        step = lax.fori_loop(first_span, last_span + 1, add_span_in_memory, step)
    if shape.merges:
        task = task_of(shape, plan, task.number)
        pl.when(task.place >= 0)(
            lambda: replace(mine, task=task).saved(context_of(shape, plan, task))
        )
    plgpu.commit_smem()  # the queries are read before the next ones are copied
    plgpu.barrier_arrive(shared.q_free)
    return step


@dataclass(frozen=True)
class WarpgroupTask:
    """One warpgroup's part of a task."""

    shape: KernelShape
    tiles: Tiles
    inputs: Inputs
    shared: SharedMemory
    outs: Any
    own: int
    task: Task

    @property
    def tile(self) -> int:
        return 0 if self.shape.latent else self.own

    @property
    def columns(self):
        """The columns of the values, and of the results."""
        return pl.ds(self.own * self.shape.columns if self.shape.latent else 0, self.shape.columns)

    @property
    def first_key(self) -> int:
        """The first of a block's keys whose scores this warpgroup computes."""
        return self.own * self.shape.keys if self.shape.latent else 0

    @property
    def position(self):
        """The position of the first row."""
        return self.task.position + self.tile * self.shape.positions

    @property
    def count(self):
        """The number of positions."""
        return jnp.clip(self.task.count - self.tile * self.shape.positions, 0, self.shape.positions)

    def queries(self):
        """The queries in the layout of products."""
        shape = self.shape
        shared = self.shared
        if shape.in_registers:
            return self.tiles.load(shared.q_ref.at[self.tile], swizzled=shape.straight)
        if shape.straight:
            return shared.q_ref
        for c in range(0, shape.width, COLUMNS):
            at = self.tile + new_zero(self.task.row), slice(None), pl.ds(c, COLUMNS)
            shared.q_tile[at] = self.tiles.load(shared.q_ref.at[at])
        plgpu.commit_smem()
        return shared.q_tile

    def block(self, q, b, best_M, total_M, sum_MH, step):
        """Add one block to the softmax of a span.

        Weights are shrunk by powers of two, which is exact. So whether a compiler makes one
        instruction of a product and a sum, which it does differently here and there, changes no
        bit.
        """
        slot = lax.rem(step, jnp.int32(self.shape.stages))
        score_MJ = self.masked(b, self.scores(q, b, slot))
        new_M = jnp.maximum(best_M, jnp.round(jnp.max(score_MJ, axis=1)))
        if self.shape.latent:
            new_M = jnp.maximum(new_M, self.other(new_M))
        finite_M = jnp.where(new_M == -jnp.inf, 0.0, new_M)
        shrink_M = jnp.exp2(best_M - finite_M)
        weight_MJ = jnp.exp2(score_MJ - along_rows(finite_M, score_MJ.shape))
        total_M = total_M * shrink_M + jnp.sum(weight_MJ, axis=1)
        sum_MH = sum_MH * along_rows(shrink_M, sum_MH.shape)
        return new_M, total_M, self.add_values(sum_MH, weight_MJ, b, slot), step + 1

    def scores(self, q, b, slot):
        """The scores of the tile's rows with a block's keys, as exponents of two."""
        shape = self.shape
        tiles = self.tiles
        shared = self.shared
        plgpu.barrier_wait(shared.k_here.at[slot])
        if not shape.in_registers:
            q = q.at[self.tile + new_zero(b)]
        if shape.codes is not None:
            scale_J = tiles.load_columns(shared.k_scale.at[slot])
            k_JH_ref = shared.k_tile.at[new_zero(b)]
            tiles.decode(shape.codes, shared.k_ref.at[slot], k_JH_ref)
            plgpu.barrier_arrive(shared.k_free.at[slot])
            score_MJ = tiles.scores(q, k_JH_ref)
            score_MJ = score_MJ * along_columns(scale_J, score_MJ.shape)
        else:
            if shape.latent:
                self.scrub(b, shared.k_ref.at[slot])
            score_MJ = tiles.scores(
                q, shared.k_ref.at[slot, pl.ds(self.first_key, shape.keys)], self.pass_turn
            )
            if not shape.latent:
                plgpu.barrier_arrive(shared.k_free.at[slot])
        if shape.soft_cap is None:
            return score_MJ * (shape.scale * LOG2_E)
        return jnp.tanh(score_MJ * (shape.scale / shape.soft_cap)) * (shape.soft_cap * LOG2_E)

    def masked(self, b, score_MJ):
        """The scores with -inf for keys that a row does not see; most blocks need no mask."""
        J = self.shape.block
        window = self.shape.window

        def mask(score_MJ):
            row_MJ, column_MJ = (self.tiles.index(score_MJ.shape, axis) for axis in (0, 1))
            position_MJ = self.position + lax.div(row_MJ, jnp.int32(self.shape.group))
            # of eight columns a thread has the same two each time: the rest is a constant
            within_MJ = column_MJ & 7
            newest_MJ = position_MJ - (b * J + self.first_key) - within_MJ
            seen_MJ = column_MJ - within_MJ <= newest_MJ
            if window is not None:
                seen_MJ &= column_MJ - within_MJ > newest_MJ - window
            return jnp.where(seen_MJ, score_MJ, -jnp.inf)

        partly = (b + 1) * J > self.position + 1
        if window is not None:
            partly |= b * J <= self.position + self.count - 1 - window
        return lax.cond(partly, mask, lambda score_MJ: score_MJ, score_MJ)

    def add_values(self, sum_MH, weight_MJ, b, slot):
        """The sum plus the block's values by their weights."""
        shape = self.shape
        tiles = self.tiles
        shared = self.shared
        dtype = self.inputs.q.dtype
        if shape.latent:
            tiles.store(
                shared.weights.at[:, pl.ds(self.first_key, shape.keys)],
                weight_MJ.astype(dtype),
                True,
            )
            plgpu.commit_smem()
            self.wait_for_all()
            weight_MJ = tiles.load(shared.weights, swizzled=True)
            sum_MH = tiles.add_product(sum_MH, weight_MJ, shared.k_ref.at[slot, :, self.columns])
            plgpu.barrier_arrive(shared.k_free.at[slot])
            return sum_MH
        plgpu.barrier_wait(shared.v_here.at[slot])
        if shape.codes is None:
            self.scrub(b, shared.v_ref.at[slot])
            self.take_turn()
            sum_MH = tiles.add_product(sum_MH, weight_MJ.astype(dtype), shared.v_ref.at[slot])
            plgpu.barrier_arrive(shared.v_free.at[slot])
            return sum_MH
        scale_J = tiles.load_columns(shared.v_scale.at[slot])
        v_JH_ref = shared.v_tile.at[new_zero(b)]
        tiles.decode(shape.codes, shared.v_ref.at[slot], v_JH_ref)
        plgpu.barrier_arrive(shared.v_free.at[slot])
        scaled_MJ = weight_MJ * along_columns(scale_J, weight_MJ.shape)
        # a scale that no sequence owns may be NaN
        scaled_MJ = jnp.where(weight_MJ == 0, 0.0, scaled_MJ)
        return tiles.add_product(sum_MH, scaled_MJ.astype(dtype), v_JH_ref)

    def scrub(self, b, v_ref) -> None:
        """Zero the values outside the sequence: pages hold what their last owners left, and 0 * NaN
        is NaN.

        The warpgroups share the columns, and wait for each other.
        """
        J = self.shape.block
        shape = self.shape
        task = self.task
        newest = task.position + task.count - 1
        oldest = jnp.int32(0) if shape.window is None else task.position - shape.window + 1

        @pl.when(((b + 1) * J > newest + 1) | (b * J < oldest))
        def _():
            for c in range(self.own * COLUMNS, shape.values, shape.warpgroups * COLUMNS):
                v_JC_ref = v_ref.at[:, pl.ds(c, COLUMNS)]
                v_JC = self.tiles.load(v_JC_ref, swizzled=True)
                key_JC = b * J + self.tiles.index(v_JC.shape, 0)
                own = (key_JC <= newest) & (key_JC >= oldest)
                v_JC_ref[...] = jnp.where(own, v_JC, 0).astype(v_JC.dtype)
            plgpu.commit_smem()
            self.wait_for_all()

    def take_turn(self) -> None:
        """Wait until the other warpgroup does not multiply: then it computes its softmax.

        A turn is the product with a block's values and with the next block's keys; at a span's ends
        one of them.
        """
        if self.shape.turns:
            plgpu.barrier_wait(self.shared.turn.at[self.own])

    def pass_turn(self) -> None:
        if self.shape.turns:
            plgpu.barrier_arrive(self.shared.turn.at[1 - self.own])

    def other(self, x_M):
        """The number of each row that the other warpgroup has, which shares the tile."""
        self.tiles.store(self.shared.numbers_of_rows.at[self.own], x_M, False)
        plgpu.commit_smem()
        self.wait_for_all()
        return self.tiles.load_rows(self.shared.numbers_of_rows.at[1 - self.own])

    def wait_for_all(self) -> None:
        if self.shape.warpgroups > 1:
            plgpu.barrier_arrive(self.shared.together)
            plgpu.barrier_wait(self.shared.together)

    @property
    def sink_M(self):
        """The sink of each row, one more score without a value; None where there are none."""
        shape = self.shape
        tiles = self.tiles
        if not shape.sinks:
            return None
        head_M8 = lax.rem(tiles.index((ROWS, 8), 0), jnp.int32(shape.group))
        sink_M8 = tiles.full((ROWS, 8), -jnp.inf)
        for g in range(shape.group):
            sink_M8 = jnp.where(
                head_M8 == g, self.inputs.sinks[self.task.part * shape.group + g], sink_M8
            )
        return jnp.max(sink_M8, axis=1)

    def keep(self, best_M, total_M, sum_of) -> None:
        """Write down the softmax of the spans so far, for `kept`."""
        for start, size in parts(self.shape):
            self.outs.sums[self.place, :, pl.ds(start, size)] = sum_of(start, size)
        self.outs.totals[self.place], self.outs.bests[self.place] = total_M, best_M

    def kept(self):
        """The softmax that `keep` has written down."""
        best_M, total_M = (
            self.tiles.load_rows(x.at[self.place]) for x in (self.outs.bests, self.outs.totals)
        )
        return (
            best_M,
            total_M,
            lambda start, size: self.tiles.load(
                self.outs.sums.at[self.place, :, pl.ds(start, size)]
            ),
        )

    @property
    def place(self):
        """Where this warpgroup writes down what its registers do not hold."""
        return lax.axis_index("processor") * self.shape.warpgroups + self.own

    def save(self, spans, best_M, total_M, sum_of) -> None:
        """Save the softmax of a span for `merge_spans`, in the card's memory: `spans` of the task
        come before it.
        """
        shape = self.shape
        shared = self.shared
        saved = self.outs.saved
        place = self.task.place + spans * saved_rows(shape, self.task.count)
        column_MC = self.tiles.index((ROWS, NUMBERS), 1)
        numbers_MC = jnp.where(column_MC < NUMBERS // 2, along_rows(best_M, (ROWS, NUMBERS)),
                               along_rows(total_M, (ROWS, NUMBERS)))  # fmt: skip
        if shape.latent:  # it has no shared memory left, and all rows of the tile
            for start, size in parts(shape):
                saved[pl.ds(place, ROWS), pl.ds(self.columns.start + start, size)] = sum_of(
                    start, size
                )
            if self.own == 0:
                saved[pl.ds(place, ROWS), pl.ds(shape.values, NUMBERS)] = numbers_MC
            return

        def copy(from_ref, column: int, size: int):
            def position(p, _):
                at = (self.tile * shape.positions + p) * shape.group
                source = from_ref.at[pl.ds(p * shape.group, shape.group)]
                plgpu.copy_smem_to_gmem(
                    source, saved.at[pl.ds(place + at, shape.group), pl.ds(column, size)]
                )

            plgpu.commit_smem()
            lax.fori_loop(0, self.count, position, None)

        for start in range(0, shape.values, STAGED):
            self.tiles.store(shared.sums.at[self.own], sum_of(start, STAGED), False)
            copy(shared.sums.at[self.own], start, STAGED)
            if start == 0:
                self.tiles.store(shared.numbers.at[self.own], numbers_MC, False)
                copy(shared.numbers.at[self.own], shape.values, NUMBERS)
            plgpu.wait_smem_to_gmem(0)  # for the next span, the results of this one are there

    def saved(self, context: CutContext) -> None:
        """The task's spans of a context have been saved; who has saved the last of them merges them
        all.
        """
        inputs = self.inputs
        outs = self.outs
        spans = spans_of(self.task.first, self.task.last, self.task.span)
        all_are = self.tiles.arrive(inputs.arrivals.at[context.first_cut], spans, context.spans)
        pl.when(all_are)(
            lambda: merge_task(
                self.shape, self.tiles, outs.saved, inputs.sinks, self.task, context, outs.out
            )
        )

    def finish(self, best_M, total_M, sum_of) -> None:
        """Write the results of the tile, through the shared memory of its queries."""
        if self.shape.latent:
            self.wait_for_all()  # all have read the queries
        self.write(
            self.shared.q_ref.at[self.tile],
            self.shape.straight,
            self.columns.start,
            best_M,
            total_M,
            sum_of,
        )

    def write(self, place_ref, swizzled: bool, first: int, best_M, total_M, sum_of) -> None:
        """Write the results of the tile, through shared memory `place_ref` from column `first`
        on.
        """
        shape = self.shape
        out = self.outs.out
        total_M = divisor(best_M, total_M, self.sink_M)
        for start, size in parts(shape):
            out_MC = sum_of(start, size) / along_rows(total_M, (ROWS, size))
            place_MC_ref = place_ref.at[:, pl.ds(first + start, size)]
            self.tiles.store(place_MC_ref, out_MC.astype(place_ref.dtype), swizzled)
        plgpu.commit_smem()
        # in a part of the columns eight rows lie together
        piece = 8 if shape.latent else shape.group

        def copy(p, _):
            row = self.task.row + self.tile * shape.positions + p
            head = self.task.part * shape.group
            for at in range(0, shape.group, piece):
                source = place_ref.at[
                    pl.ds(p * shape.group + at, piece), pl.ds(first, shape.columns)
                ]
                plgpu.copy_smem_to_gmem(source, out.at[row, pl.ds(head + at, piece), self.columns])

        lax.fori_loop(0, self.count, copy, None)
        plgpu.wait_smem_to_gmem(0)


def new_zero(number):
    """Zero, which the compiler cannot know: a block's or a row's number is never negative.

    With an operand at a constant place the compiler computes its descriptors once for all blocks,
    and keeps them in two registers for each sixteenth of a block's width: seventy for MLA, where
    none is free.
    """
    return jnp.minimum(number, 0)
