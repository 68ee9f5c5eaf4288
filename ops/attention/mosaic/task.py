"""What a kernel is compiled for, and the tasks that it takes in turn."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

ROWS = 64  # of a tile: what one warpgroup multiplies at once
SPAN = 4096  # keys whose softmax is finished by itself
MEMORY = 227 << 10  # bytes of shared memory that a processor has for us
SMALL = 5120  # bytes of it for barriers, and for the gaps between arrays


class KernelShape(NamedTuple):
    """What is compiled for."""

    rows: int
    positions: int  # of a tile, at most
    heads: int
    kv_heads: int
    width: int
    values: int  # width of the values
    latent: bool  # the values are the first numbers of the keys
    page: int  # positions of a page
    block: int  # keys of a step
    codes: str | None  # what the pages hold where it is not what the queries are made of
    tasks: int
    processors: int
    warpgroups: int  # warpgroups that multiply
    window: int | None
    scale: float
    soft_cap: float | None
    sinks: bool
    cut: bool  # spans are tasks of their own; where a tile has several, they are merged afterwards

    @property
    def group(self) -> int:
        """Query heads of a tile: those of a KV head, as far as they fit."""
        return min(self.heads // self.kv_heads, ROWS)

    @property
    def parts(self) -> int:
        """Of a position: each has a tile of its own."""
        return self.heads // self.group

    @property
    def tiles(self) -> int:
        """Of a task. Where values are a part of the keys, warpgroups share a tile, each with a part of the values."""
        return 1 if self.latent else self.warpgroups

    @property
    def columns(self) -> int:
        """Values that a warpgroup sums."""
        return self.values * self.tiles // self.warpgroups

    @property
    def piece(self) -> int:
        """Positions that are fetched at once: a page, or what a block takes of one."""
        return min(self.page, self.block)

    @property
    def straight(self) -> bool:
        """Queries are fetched to where products read them: the layout there has eight rows at a time."""
        return self.group % 8 == 0

    @property
    def in_registers(self) -> bool:
        """Queries are operands in registers, as far as there are enough of these beside the sums."""
        return self.width <= 128

    @property
    def stages(self) -> int:
        """Blocks on their way: as many as there is room for beside the queries, and what codes are turned into."""
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


NUM_FIELDS = 8  # of a task in memory: from `row` to `alone`


class Task(NamedTuple):
    """Tiles of one sequence, and the blocks of keys that they see."""

    number: Any  # how many this processor had before
    row: Any
    count: Any  # positions
    seq: Any
    position: Any  # of the first row
    first: Any
    last: Any
    place: Any  # where the results of a cut context go
    alone: Any  # 1: its span is the only one
    part: Any  # of each position's heads

    def kv_head(self, shape: KernelShape):
        return lax.div(self.part * shape.group, jnp.int32(shape.heads // shape.kv_heads))


def each_task(shape: KernelShape, tasks, count, do):
    """Calls `do(task, step)`, which returns the number of blocks that there were until then; the last of these."""

    def run(n, i, part, step):
        fields = [tasks[i, field] for field in range(NUM_FIELDS)]
        return do(Task(n, *fields, part), step)

    return each_part(shape, count, run, jnp.int32(0))


def each_part(shape: KernelShape, count, do, carry):
    """Calls `do(n, i, part, carry)` for those of `count` things, each of several parts, that are this processor's."""
    processors, work = jnp.int32(shape.processors), count * shape.parts
    mine = lax.axis_index("processor")

    def body(n, carry):
        at = mine + n * processors
        return do(n, lax.div(at, jnp.int32(shape.parts)), lax.rem(at, jnp.int32(shape.parts)), carry)

    trips = lax.div(work - mine + processors - 1, processors)
    return lax.fori_loop(0, jnp.maximum(trips, 0), body, carry)
