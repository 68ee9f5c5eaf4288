"""The static parameters of the attention kernel, and the tasks of its processors.

The context of a tile is a sequence of blocks of keys, grouped into spans. It may be cut between
spans, so that several processors share it (split-KV).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

ROWS = 64  # of a tile: as many as one warpgroup multiplies at once
SPAN = 256  # keys of the shortest span, whose softmax is computed by itself
SPANS = (
    64  # maximum number of spans for a row; for more keys, spans are two, four, ... times longer
)
SCRATCH = 64 << 20  # limit for the bytes of saved spans of cut contexts
# columns of a saved span after those of its sum: four hold the largest score, four the sum of the
# weights
STATS = 8
STAGED = 32  # columns that are saved at once
MEMORY = 227 << 10  # bytes of shared memory that a kernel can use
SMALL = 2048  # bytes of it for barriers, and for padding between arrays


class KernelShape(NamedTuple):
    """The sizes and options that a kernel is compiled for."""

    rows: int  # of the step
    positions: int  # maximum number of positions in a tile
    heads: int
    kv_heads: int
    width: int  # of queries and keys
    values: int  # width of the values
    latent: bool  # the values are the first dimensions of the keys (MLA)
    page: int  # positions of a page
    block: int  # keys of a block
    codes: str | None  # dtype of quantised pages
    processors: int
    warpgroups: int  # that multiply, beside the producer
    window: int | None
    scale: float
    soft_cap: float | None
    sinks: bool
    max_keys: int  # maximum number of keys to which a row attends

    @property
    def group(self) -> int:
        """Query heads of a tile: those of a KV head, up to ROWS."""
        return min(self.heads // self.kv_heads, ROWS)

    @property
    def head_tiles(self) -> int:
        """Tiles for all query heads of a position."""
        return self.heads // self.group

    @property
    def tiles(self) -> int:
        """Tiles of a task: one for each warpgroup.

        For MLA the warpgroups share a tile, and each computes a part of the values' columns.
        """
        return 1 if self.latent else self.warpgroups

    @property
    def ping_pong(self) -> bool:
        """Whether two warpgroups alternate: one multiplies while the other computes its softmax."""
        return self.tiles > 1

    @property
    def keys(self) -> int:
        """Keys of a block for which a warpgroup computes scores."""
        return self.block * self.tiles // self.warpgroups

    @property
    def columns(self) -> int:
        """Columns of the values that a warpgroup accumulates."""
        return self.values * self.tiles // self.warpgroups

    @property
    def piece(self) -> int:
        """Positions that are copied at once: a page, or a block if that is smaller."""
        return min(self.page, self.block)

    @property
    def swizzles_queries(self) -> bool:
        """Whether the copy of the queries makes the swizzled layout that products read.

        That layout takes eight rows at a time.
        """
        return self.group % 8 == 0

    @property
    def queries_in_registers(self) -> bool:
        """Whether products read queries from registers; for wider heads these do not suffice."""
        return self.width <= 64

    @property
    def spans_in_registers(self) -> bool:
        """Whether the merged result of earlier spans is in registers, and not in global memory."""
        return self.columns <= 128

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread of the producer, and of a thread that multiplies."""
        if self.warpgroups == 1:
            return 56, 256
        return (40, 232) if self.columns > 64 else (72, 216)

    @property
    def span(self) -> int:
        """Blocks of the shortest spans: twice as many if spans are merged through global memory."""
        return (SPAN if self.spans_in_registers else 2 * SPAN) // self.block

    @property
    def stretch(self) -> int:
        """Positions for which SPANS spans of the shortest length suffice.

        Spans may become longer at multiples of this number of positions.
        """
        return self.span * self.block * SPANS

    @property
    def cut(self) -> bool:
        """Whether contexts may be cut, so that several processors share one."""
        return self.max_keys > 2 * self.span * self.block

    @property
    def merges_in_kernel(self) -> bool:
        """Whether the last processor that saves spans of a cut context merges all its spans.

        If tasks have many rows this would take long, so a second kernel merges on all processors.
        """
        return self.cut and not self.latent and self.positions * self.tiles == 1

    @property
    def spans(self) -> int:
        """Maximum number of spans of a tile, including partial spans at both ends of a window."""
        max_positions = self.max_keys + self.positions * self.tiles
        return min(-(-max_positions // (self.span * self.block)), SPANS) + 1

    @property
    def task_rows(self) -> int:
        """Rows of a task that are saved for a span; for MLA all rows of the tile."""
        return ROWS if self.latent else self.positions * self.tiles * self.group

    @property
    def saved_width(self) -> int:
        """Columns of a saved row: its sum and STATS."""
        return self.values + STATS

    @property
    def places(self) -> int:
        """Rows of spans that can be saved: one task for each processor, up to SCRATCH bytes."""
        if not self.cut:
            return 1
        max_cut_tasks = min(self.head_tiles * self.rows, self.processors - 1)
        return max(
            min(max_cut_tasks * self.spans * self.task_rows, SCRATCH // (4 * self.saved_width)), 1
        )

    @property
    def stages_saved_sums(self) -> bool:
        """Whether saved sums pass through shared memory, so that only valid rows are written."""
        return self.cut and not self.latent

    @property
    def stages(self) -> int:
        """Blocks in shared memory at once: as many as fit beside queries and a decoded block."""
        arrays_per_block = 1 if self.latent else 2
        block_size = self.block * self.width * arrays_per_block
        used_bytes = (
            2
            * ROWS
            * self.width
            * self.tiles
            * (1 if self.queries_in_registers or self.swizzles_queries else 2)
        )
        if self.latent:
            used_bytes += 2 * ROWS * self.block + 1024
        if self.stages_saved_sums:
            used_bytes += 4 * ROWS * (STAGED + STATS) * self.warpgroups
        if self.codes is None:
            return min((MEMORY - SMALL - used_bytes) // (2 * block_size), 8)
        scale_bytes = 4 * self.block * arrays_per_block
        return min((MEMORY - SMALL - used_bytes - 2 * block_size) // (block_size + scale_bytes), 8)


class Inputs(NamedTuple):
    """References to the kernel's inputs; None for those that its shape does not use."""

    q: Any
    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    sinks: Any
    tables: Any
    arrivals: Any  # [processors] counters of saved spans, one for each cut context; zero at first


class Plan(NamedTuple):
    """The work partition: tiles in order, each with its head tiles, are split among processors."""

    tiles_CF: Any  # row, count, seq, position, first, last, span of each tile: see `Task`
    shares_RF: Any  # where each processor's share begins, and where the last one ends: see `Share`
    owned_1: Any  # number of rows that are not padding

    def share(self, number) -> "Share":
        """The beginning of a processor's share."""
        return Share(*[self.shares_RF[number, f] for f in range(len(Share._fields))])

    def tile(self, number):
        """The fields of a tile."""
        return [self.tiles_CF[number, f] for f in range(7)]


class Share(NamedTuple):
    """A boundary between the shares of two processors.

    A unit is one head tile of a tile. If the boundary cuts a unit, it lies between two spans.
    """

    unit: Any  # tile * head_tiles + head_tile
    spans: Any  # spans of this unit before the boundary; 0: the unit is not cut here
    place: Any  # row where the first span of this unit is saved, if it is cut
    first: Any  # number of the share that begins at the first cut of this unit, if it is cut


class Task(NamedTuple):
    """A unit of work: tiles of one sequence, and the blocks of keys to which they attend."""

    number: Any  # index among the tasks of this processor
    row: Any  # first row
    count: Any  # number of positions
    seq: Any
    position: Any  # of the first row
    first: Any  # first block
    last: Any  # last block
    span: Any  # number of blocks of a span
    head_tile: Any  # which of the head tiles of each position
    place: Any  # row where the first of its spans is saved; -1 if the context is not cut

    def kv_head(self, shape: KernelShape):
        """The KV head of the task's query heads."""
        return lax.div(self.head_tile * shape.group, jnp.int32(shape.heads // shape.kv_heads))


class CutContext(NamedTuple):
    """A context whose spans are split among several processors."""

    place: Any  # row where its first span is saved
    spans: Any  # number of its spans
    first_cut: Any  # `Share.first`, which identifies the context


def each_task(shape: KernelShape, plan: Plan, function):
    """Loop over this processor's tasks.

    Calls `function(task, step) -> step` for each; `step` counts the blocks of all tasks.

    Returns:
        The last `step`.
    """
    processor = lax.axis_index("processor")
    begin = plan.share(processor)
    end = plan.share(processor + 1)

    num_units = end.unit + jnp.where(end.spans > 0, jnp.int32(1), jnp.int32(0)) - begin.unit
    is_empty = (begin.unit == end.unit) & (begin.spans == end.spans)
    num_tasks = jnp.where(is_empty, jnp.int32(0), num_units)
    return lax.fori_loop(
        0, num_tasks, lambda n, step: function(read_task(shape, plan, n), step), jnp.int32(0)
    )


def read_task(shape: KernelShape, plan: Plan, number) -> Task:
    """Read a task of this processor from the plan.

    Call it again rather than keep the task where registers are scarce.
    """
    head_tiles = jnp.int32(shape.head_tiles)
    processor = lax.axis_index("processor")
    begin = plan.share(processor)
    end = plan.share(processor + 1)
    unit = begin.unit + number
    row, count, seq, position, first, last, span = plan.tile(lax.div(unit, head_tiles))
    cut_before = (unit == begin.unit) & (begin.spans > 0)
    cut_after = (unit == end.unit) & (end.spans > 0)
    first_span = lax.div(first, span)
    start = jnp.where(cut_before, (first_span + begin.spans) * span, first)
    stop = jnp.where(cut_after, (first_span + end.spans) * span - 1, last)
    saved_place = begin.place + begin.spans * saved_rows(shape, count)
    place = jnp.where(cut_before, saved_place, jnp.where(cut_after, end.place, jnp.int32(-1)))
    return Task(
        number, row, count, seq, position, start, stop, span, lax.rem(unit, head_tiles), place
    )


def read_context(shape: KernelShape, plan: Plan, task: Task) -> CutContext:
    """Read the cut context to which a task of this processor belongs.

    Call it again rather than keep the context where registers are scarce.
    """
    processor = lax.axis_index("processor")
    begin = plan.share(processor)
    end = plan.share(processor + 1)
    cut_before = (task.number == 0) & (begin.spans > 0)
    *_, first, last, span = plan.tile(
        lax.div(begin.unit + task.number, jnp.int32(shape.head_tiles))
    )
    place, first_cut = (
        jnp.where(cut_before, at_begin, at_end)
        for at_begin, at_end in ((begin.place, end.place), (begin.first, end.first))
    )
    return CutContext(place, count_spans(first, last, span), first_cut)


def count_spans(first, last, span):
    """Number of spans that contain the blocks from `first` to `last`."""
    return lax.div(last, span) - lax.div(first, span) + 1


def saved_rows(shape: KernelShape, count):
    """Rows that are saved for each span of a task with `count` positions."""
    return jnp.int32(ROWS) if shape.latent else count * shape.group
