"""What the kernel is compiled for, and the tasks that its processors share."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ...quant.four_bits import BLOCK

FEATURES = 64  # outputs that a warpgroup computes at once: the rows of the hardware's tiles
MEMORY = (227 - 6) << 10  # bytes of shared memory for blocks; the rest is for barriers and gaps
FOUR_BITS = "int4", "float4"
BLOCKS = 16, 32, 64, 128  # rows of a block
DECODED = 2  # steps whose codes are numbers at once: one is multiplied while the next is decoded
DEEPEST = 12  # blocks that are on their way at once, at most


def block_sizes(kernel: str, codes: str | None) -> tuple[int, ...]:
    """Rows that a block can have.

    Blackwell's memory for tensors holds no more codes of four bits as numbers.
    """
    return BLOCKS[:-1] if kernel == "triton" and codes in FOUR_BITS else BLOCKS


class ProductShape(NamedTuple):
    """The sizes and options that the kernel is compiled for."""

    blocks: int  # of rows, at most
    rows: int  # of a block: all of one expert
    experts: int
    inputs: int
    outputs: int  # of each part
    parts: int  # 2: gate and up, whose outputs are combined
    processors: int
    out_dtype: str
    activation: str | None = None  # of two parts
    clamp: float | None = None
    alpha: float = 1.0
    bias: bool = False
    weighed: bool = False  # each row is multiplied by a weight of its own
    turned: bool = False  # a weight is [outputs, inputs], and not [inputs, parts, outputs]
    # weights are codes: int8 or float8, with a scale an output; or of FOUR_BITS, two a byte
    codes: str | None = None
    group: int = 0  # inputs of an output that share a scale of the latter
    zeros: bool = False  # and a code that stands for zero
    rounded: bool = False  # rows are codes too, with a scale each
    # a weight is the sum of so many, of which each has all inputs, one after the other
    summands: int = 1
    kernel: str = "mosaic"  # or "triton"

    @property
    def packed(self) -> bool:
        return self.codes in FOUR_BITS

    @property
    def warpgroups(self) -> int:
        """That multiply: two where there are many rows, so that both share what is copied."""
        return 2 if self.rows > 64 and self.outputs % (2 * FEATURES) == 0 and not self.packed else 1

    @property
    def features(self) -> int:
        """Outputs of a task, of each part."""
        return self.warpgroups * FEATURES

    @property
    def tiles(self) -> int:
        return self.outputs // self.features

    @property
    def step(self) -> int:
        """Inputs that are copied at once."""
        return BLOCK if self.packed or (self.inputs % BLOCK == 0 and self.rows <= 64) else 64

    @property
    def groups(self) -> int:
        """That a step's inputs of an output lie in."""
        return self.step // self.group

    @property
    def zero_rows(self) -> int:
        """Groups whose zeros are copied with a step: 128 bytes are two of them, and no copy is
        shorter.
        """
        return max(self.groups, 2) if self.zeros else 0

    @property
    def steps(self) -> int:
        return -(-self.inputs // self.step) * self.summands

    @property
    def again(self) -> int:
        """Inputs that the last step holds once more, and does not count: it ends with the
        weight.
        """
        return self.steps * self.step - self.inputs * self.summands

    @property
    def stages(self) -> int:
        """Steps that are in shared memory at once: as many as fit beside the results."""
        results = self.features * self.rows * jnp.dtype(self.out_dtype).itemsize
        weights = self.step * self.parts * self.features
        decoded = DECODED * 2 * weights if self.codes else 0
        bits = 4 if self.packed else 8 if self.codes else 16
        scale = (2 if self.codes == "int4" else 1) * self.groups if self.packed else 0
        scales = (scale + self.zero_rows) * self.parts * self.features
        each = bits * weights // 8 + scales + 2 * self.step * self.rows
        return min((MEMORY - results - decoded) // each, DEEPEST)


class Operands(NamedTuple):
    x: Any  # [blocks * rows, inputs]
    # [experts, summands * inputs, parts, outputs], or turned [experts, outputs, inputs]; bfloat16,
    weight: Any
    # or codes; of codes of four bits bytes in place of inputs, as in `quant/four_bits.py`
    bias: Any  # float32 [experts, parts, outputs]
    scale: Any  # float32 [blocks * rows]: the weight of each row
    experts: Any  # int32 [blocks]: whose the rows of each block are
    count: Any  # int32 [1]: blocks that there are
    output_scale: Any = None  # float32 [experts, parts, outputs], of codes of eight bits
    row_scale: Any = None  # float32 [blocks * rows], of rows that are codes
    # [experts, groups, parts, outputs], of codes of four bits: float16, or of float4 a power of two
    # as uint8
    group_scale: Any = None
    group_zero: Any = None  # uint8, of int4 with zero points: alike


class Task(NamedTuple):
    """Some outputs of a block of rows."""

    number: Any  # of tasks that this processor had before
    row: Any  # the first
    expert: Any
    feature: Any  # the first


def each_task(shape: ProductShape, operands: Operands, do):
    """Calls `do(task, step) -> step` for this processor's tasks, and returns the last `step`, which
    counts copies.
    """
    processors = jnp.int32(shape.processors)
    tiles = jnp.int32(shape.tiles)
    count = operands.count[0]
    mine = lax.axis_index("processor")

    def body(n, step):
        at = mine + n * processors
        # row after row meets the same part of the weight while that is in the card's cache
        if shape.experts == 1:
            block = lax.rem(at, count)
            tile = lax.div(at, count)
        else:
            block = lax.div(at, tiles)
            tile = lax.rem(at, tiles)
        expert = jnp.int32(0) if shape.experts == 1 else operands.experts[block]
        return do(Task(n, block * shape.rows, expert, tile * shape.features), step)

    trips = lax.div(count * tiles - mine + processors - 1, processors)
    return lax.fori_loop(0, jnp.maximum(trips, 0), body, jnp.int32(0))
