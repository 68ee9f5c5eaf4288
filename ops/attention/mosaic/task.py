"""What a kernel is compiled for, and the tasks that its processors share."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

ROWS = 64  # of a tile: as many as one warpgroup multiplies at once
SPAN = 4096  # keys whose softmax is computed by itself
MEMORY = 227 << 10  # bytes of shared memory that a kernel can use
SMALL = 5120  # bytes of it for barriers, and for the gaps between arrays


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
    tasks: int
    processors: int
    warpgroups: int  # that multiply
    window: int | None
    scale: float
    soft_cap: float | None
    sinks: bool
    cut: bool  # each span is a task, and those of a tile are merged afterwards

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
        """Tiles of a task. Where values are a part of the keys, warpgroups share a tile and split the values."""
        return 1 if self.latent else self.warpgroups

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
        """Whether queries are copied straight to where products read them: that layout takes eight rows at a time."""
        return self.group % 8 == 0

    @property
    def in_registers(self) -> bool:
        """Whether queries are operands in registers: for wider heads there are not enough registers beside the sums."""
        return self.width <= 128

    @property
    def stages(self) -> int:
        """Blocks that are in shared memory at once: as many as fit beside the queries and the decoded block."""
        kinds = 1 if self.latent else 2
        block = self.block * self.width * kinds
        queries = 2 * ROWS * self.width * self.tiles * (1 if self.in_registers or self.straight else 2)
        if self.codes is None:
            return min((MEMORY - SMALL - queries) // (2 * block), 8)
        scales = 4 * self.block * kinds
        return min((MEMORY - SMALL - queries - 2 * block) // (block + scales), 8)


class Inputs(NamedTuple):
    q: Any
    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    sinks: Any
    tables: Any


NUM_FIELDS = 8  # of a task in the GPU's memory: from `row` to `alone`


class Task(NamedTuple):
    """Tiles of one sequence, and the blocks of keys that they see."""

    number: Any  # of tasks that this processor had before
    row: Any
    count: Any  # positions
    seq: Any
    position: Any  # of the first row
    first: Any
    last: Any
    place: Any  # where the softmax of a cut context is saved
    alone: Any  # 1: the tile has no other span
    part: Any  # which of each position's tiles

    def kv_head(self, shape: KernelShape):
        return lax.div(self.part * shape.group, jnp.int32(shape.heads // shape.kv_heads))


def each_task(shape: KernelShape, tasks, count, do):
    """Calls `do(task, step) -> step` for this processor's tasks, and returns the last `step`, which counts blocks."""

    def run(n, i, part, step):
        fields = [tasks[i, field] for field in range(NUM_FIELDS)]
        return do(Task(n, *fields, part), step)

    return each_part(shape, count, run, jnp.int32(0))


def each_part(shape: KernelShape, count, do, carry):
    """Calls `do(n, i, part, carry) -> carry` for this processor's share of `count` items, each of several parts."""
    processors, work = jnp.int32(shape.processors), count * shape.parts
    mine = lax.axis_index("processor")

    def body(n, carry):
        at = mine + n * processors
        return do(n, lax.div(at, jnp.int32(shape.parts)), lax.rem(at, jnp.int32(shape.parts)), carry)

    trips = lax.div(work - mine + processors - 1, processors)
    return lax.fori_loop(0, jnp.maximum(trips, 0), body, carry)
