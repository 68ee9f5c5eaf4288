"""What a kernel is compiled for, and the tasks that its processors share."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

ROWS = 64  # of a tile: as many as one warpgroup multiplies at once
SPAN = 256  # keys whose softmax is computed by itself: so many at least
SPANS = 64  # of a row; where it sees more keys, spans are twice as long, and so on
SCRATCH = 64 << 20  # bytes for the spans of contexts that are cut
# columns of a saved span after those of its sum: four with the largest score, four with the sum of
# weights
NUMBERS = 8
STAGED = 32  # columns that are saved at once
MEMORY = 227 << 10  # bytes of shared memory that a kernel can use
SMALL = 2048  # bytes of it for barriers, and for the gaps between arrays


class KernelShape(NamedTuple):
    """The sizes and options that a kernel is compiled for."""

    rows: int
    positions: int  # of a tile, at most
    heads: int
    kv_heads: int
    width: int
    values: int  # width of the values
    latent: bool  # the values are the first numbers of the keys
    page: int  # positions of a page
    block: int  # keys of a block
    codes: str | None  # the dtype of the pages where they hold eight bits
    processors: int
    warpgroups: int  # that multiply
    window: int | None
    scale: float
    soft_cap: float | None
    sinks: bool
    reach: int  # keys that a row can see

    @property
    def group(self) -> int:
        """Query heads of a tile: those of a KV head, as far as they fit."""
        return min(self.heads // self.kv_heads, ROWS)

    @property
    def parts(self) -> int:
        """Tiles that the heads of one position are split into."""
        return self.heads // self.group

    @property
    def tiles(self) -> int:
        """Tiles of a task.

        Where values are a part of the keys, warpgroups share a tile and split the values.
        """
        return 1 if self.latent else self.warpgroups

    @property
    def turns(self) -> bool:
        """Whether one warpgroup multiplies while another computes its softmax, and then the other
        way round.
        """
        return self.tiles > 1

    @property
    def keys(self) -> int:
        """Keys of a block whose scores a warpgroup computes."""
        return self.block * self.tiles // self.warpgroups

    @property
    def columns(self) -> int:
        """Columns of the values that a warpgroup sums."""
        return self.values * self.tiles // self.warpgroups

    @property
    def piece(self) -> int:
        """Positions that are copied at once: a page, or a block where that is smaller."""
        return min(self.page, self.block)

    @property
    def straight(self) -> bool:
        """Whether queries are copied straight to where products read them: that layout takes eight
        rows at a time.
        """
        return self.group % 8 == 0

    @property
    def in_registers(self) -> bool:
        """Whether queries are operands in registers: for wider heads there are not enough registers
        beside the sums.
        """
        return self.width <= 64

    @property
    def held(self) -> bool:
        """Whether the spans before are in registers beside the span that is computed, or in the
        card's memory.
        """
        return self.columns <= 128

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that copies, and of one that multiplies; two warpgroups that do share what
        there is.
        """
        if self.warpgroups == 1:
            return 56, 256
        return (40, 232) if self.columns > 64 else (72, 216)

    @property
    def span(self) -> int:
        """Blocks of the shortest spans: twice as many where merging them takes longer."""
        return (SPAN if self.held else 2 * SPAN) // self.block

    @property
    def stretch(self) -> int:
        """Positions of which each sees as few keys as the shortest spans are for; also each next
        such stretch.
        """
        return self.span * self.block * SPANS

    @property
    def cut(self) -> bool:
        """Whether the context of a tile can be cut."""
        return self.reach > 2 * self.span * self.block

    @property
    def merges(self) -> bool:
        """Whether the processor that is the last to save spans of a context merges them all.

        Where tasks have many rows it would take long over them, and another kernel has all
        processors merge.
        """
        return self.cut and not self.latent and self.positions * self.tiles == 1

    @property
    def spans(self) -> int:
        """Of a tile, at most: at its ends a window can see parts of spans."""
        seen = self.reach + self.positions * self.tiles
        return min(-(-seen // (self.span * self.block)), SPANS) + 1

    @property
    def task_rows(self) -> int:
        """Rows of a task; those of a tile that warpgroups share are saved as they lie."""
        return ROWS if self.latent else self.positions * self.tiles * self.group

    @property
    def saved_width(self) -> int:
        return self.values + NUMBERS

    @property
    def places(self) -> int:
        """Rows of spans that can be saved: those of one task for each processor, as far as memory
        is given.
        """
        if not self.cut:
            return 1
        cut = min(self.parts * self.rows, self.processors - 1)
        return max(min(cut * self.spans * self.task_rows, SCRATCH // (4 * self.saved_width)), 1)

    @property
    def staged(self) -> bool:
        """Whether saved sums pass through shared memory, so that only the rows that count are
        written.
        """
        return self.cut and not self.latent

    @property
    def stages(self) -> int:
        """Blocks that are in shared memory at once: as many as fit beside the queries and the
        decoded block.
        """
        kinds = 1 if self.latent else 2
        block = self.block * self.width * kinds
        taken = (
            2 * ROWS * self.width * self.tiles * (1 if self.in_registers or self.straight else 2)
        )
        if self.latent:
            taken += 2 * ROWS * self.block + 1024
        if self.staged:
            taken += 4 * ROWS * (STAGED + NUMBERS) * self.warpgroups
        if self.codes is None:
            return min((MEMORY - SMALL - taken) // (2 * block), 8)
        scales = 4 * self.block * kinds
        return min((MEMORY - SMALL - taken - 2 * block) // (block + scales), 8)


class Inputs(NamedTuple):
    q: Any
    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    sinks: Any
    tables: Any
    arrivals: Any  # [processors], zeros: of a context that is cut, the spans that have been saved


class Plan(NamedTuple):
    """Who computes what: tiles in order, each for every part of its heads, are shared out among the
    processors.
    """

    tiles_CF: Any  # row, count, seq, position, first, last, span of each tile: see `Task`
    shares_RF: Any  # where each processor's share begins, and where the last one ends: see `Share`
    owned_1: Any  # rows that are not padding

    def share(self, number) -> "Share":
        return Share(*[self.shares_RF[number, f] for f in range(len(Share._fields))])

    def tile(self, number):
        """The fields of a tile."""
        return [self.tiles_CF[number, f] for f in range(7)]


class Share(NamedTuple):
    """A place in all work."""

    unit: Any  # tile * parts + part
    spans: Any  # of it that come before
    place: Any  # where the first span of this unit is saved, if it is cut
    first: Any  # the number of the share that begins at the first cut of this unit, if it is cut


class Task(NamedTuple):
    """Tiles of one sequence, and the blocks of keys that they see."""

    number: Any  # of tasks that this processor had before
    row: Any
    count: Any  # positions
    seq: Any
    position: Any  # of the first row
    first: Any
    last: Any
    span: Any  # its blocks
    part: Any  # which of each position's tiles
    place: Any  # where the first of its spans is saved; -1: nothing is, since the task is whole

    def kv_head(self, shape: KernelShape):
        return lax.div(self.part * shape.group, jnp.int32(shape.heads // shape.kv_heads))


class CutContext(NamedTuple):
    """A context of which several processors have some spans each."""

    place: Any  # where its first span is saved
    spans: Any
    first_cut: Any  # `Share.first`


def each_task(shape: KernelShape, plan: Plan, do):
    """Calls `do(task, step) -> step` for this processor's tasks, and returns the last `step`, which
    counts blocks.
    """
    processor = lax.axis_index("processor")
    begin = plan.share(processor)
    end = plan.share(processor + 1)

    units = end.unit + jnp.where(end.spans > 0, jnp.int32(1), jnp.int32(0)) - begin.unit
    nothing = (begin.unit == end.unit) & (begin.spans == end.spans)
    tasks = jnp.where(nothing, jnp.int32(0), units)
    return lax.fori_loop(0, tasks, lambda n, step: do(task_of(shape, plan, n), step), jnp.int32(0))


def task_of(shape: KernelShape, plan: Plan, number) -> Task:
    """This processor's task of that number; may be read again, rather than kept where registers are
    needed.
    """
    parts = jnp.int32(shape.parts)
    processor = lax.axis_index("processor")
    begin = plan.share(processor)
    end = plan.share(processor + 1)
    unit = begin.unit + number
    row, count, seq, position, first, last, span = plan.tile(lax.div(unit, parts))
    cut_before = (unit == begin.unit) & (begin.spans > 0)
    cut_after = (unit == end.unit) & (end.spans > 0)
    first_span = lax.div(first, span)
    start = jnp.where(cut_before, (first_span + begin.spans) * span, first)
    stop = jnp.where(cut_after, (first_span + end.spans) * span - 1, last)
    saved = begin.place + begin.spans * saved_rows(shape, count)
    place = jnp.where(cut_before, saved, jnp.where(cut_after, end.place, jnp.int32(-1)))
    return Task(number, row, count, seq, position, start, stop, span, lax.rem(unit, parts), place)


def context_of(shape: KernelShape, plan: Plan, task: Task) -> CutContext:
    """That of a task that is not whole; read again, rather than kept where registers are needed for
    the task.
    """
    processor = lax.axis_index("processor")
    begin = plan.share(processor)
    end = plan.share(processor + 1)
    cut_before = (task.number == 0) & (begin.spans > 0)
    *_, first, last, span = plan.tile(lax.div(begin.unit + task.number, jnp.int32(shape.parts)))
    place, first_cut = (
        jnp.where(cut_before, a, b) for a, b in ((begin.place, end.place), (begin.first, end.first))
    )
    return CutContext(place, spans_of(first, last, span), first_cut)


def spans_of(first, last, span):
    """Spans of so many blocks in which these blocks lie."""
    return lax.div(last, span) - lax.div(first, span) + 1


def saved_rows(shape: KernelShape, count):
    """Rows that are saved of each span of a task of so many positions."""
    return jnp.int32(ROWS) if shape.latent else count * shape.group
