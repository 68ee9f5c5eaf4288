"""What a kernel is compiled for, and the tasks that it takes in turn."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

ROWS = 64  # of a tile: what one warpgroup multiplies at once
MEMORY = 227 << 10  # bytes of shared memory that a processor has for us


class Shape(NamedTuple):
    """What is compiled for."""

    rows: int
    positions: int  # of a tile, at most
    heads: int
    kv_heads: int
    width: int
    page: int  # positions of a page
    block: int  # keys of a step
    tasks: int
    processors: int
    window: int | None
    scale: float
    soft_cap: float | None
    sinks: bool
    cut: bool  # spans are tasks of their own, and their results are merged afterwards

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def piece(self) -> int:
        """Positions that are fetched at once: a page, or what a block takes of one."""
        return min(self.page, self.block)

    @property
    def stages(self) -> int:
        """Blocks on their way: as many as there is room for beside a tile."""
        tile = 6 * ROWS * self.width + 5120  # and what barriers and gaps take
        return min((MEMORY - tile) // (4 * self.block * self.width), 8)


class Inputs(NamedTuple):
    q: Any
    k: Any
    v: Any
    sinks: Any
    tables: Any


NUM_FIELDS = 7  # of a task in memory: from `row` to `place`


class Task(NamedTuple):
    """A tile, and the blocks of keys that it sees."""

    number: Any  # how many this processor had before
    row: Any
    count: Any  # positions
    seq: Any
    position: Any  # of the first row
    first: Any
    last: Any
    place: Any  # where the results of a cut context go
    head: Any


def each_task(shape: Shape, tasks, work, mine, do):
    """Calls `do(task, step)`, which returns the number of blocks that there were until then; the last of these."""
    processors = jnp.int32(shape.processors)

    def body(n, step):
        at = mine + n * processors
        i, head = lax.div(at, jnp.int32(shape.kv_heads)), lax.rem(at, jnp.int32(shape.kv_heads))
        fields = [tasks[i, field] for field in range(NUM_FIELDS)]
        return do(Task(n, *fields, head), step)

    trips = lax.div(work - mine + processors - 1, processors)
    return lax.fori_loop(0, jnp.maximum(trips, 0), body, jnp.int32(0))
