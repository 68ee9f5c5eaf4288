"""The static parameters of the product kernels, their operands, and their loop over tasks."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ...quant.four_bits import BLOCK

FEATURES = 64  # outputs that a warpgroup computes at once: the rows of the hardware's tiles
MEMORY = (227 - 6) << 10  # bytes of shared memory for stages; the rest is for barriers and padding
FOUR_BITS = "int4", "float4"  # types of packed codes
BLOCKS = 16, 32, 64, 128  # possible sizes of a block, in rows
DECODED = 2  # buffers of decoded weights: one is multiplied while the next is decoded
MAX_STAGES = 12  # limit for the stages of the pipeline


def block_sizes(kernel: str, codes: str | None) -> tuple[int, ...]:
    """Possible numbers of rows of a block.

    With four-bit codes a Triton block of 128 rows needs more tensor memory than Blackwell has.
    """
    return BLOCKS[:-1] if kernel == "triton" and codes in FOUR_BITS else BLOCKS


class ProductShape(NamedTuple):
    """The sizes and options that the kernel is compiled for."""

    blocks: int  # maximum number of blocks of rows
    rows: int  # rows of a block, which all belong to one expert
    experts: int
    inputs: int
    outputs: int  # of each projection
    projections: int  # 2 for gate and up, whose outputs are combined
    processors: int
    out_dtype: str
    activation: str | None = None  # between gate and up
    clamp: float | None = None
    alpha: float = 1.0
    bias: bool = False
    weighted: bool = False  # each output row is multiplied by a weight of its own
    transposed: bool = False  # weights are [outputs, inputs]: not [inputs, projections, outputs]
    # type of quantised weights: int8 or float8, with a scale for each output; or one of FOUR_BITS,
    # two codes a byte, with group scales
    codes: str | None = None
    group: int = 0  # inputs that share a scale
    zeros: bool = False  # whether groups have zero points
    rounded: bool = False  # rows are quantised too, with a scale for each row
    # number of bfloat16 arrays, stored one after the other, whose sum is the weight
    summands: int = 1
    kernel: str = "mosaic"  # or "triton"

    @property
    def packed(self) -> bool:
        return self.codes in FOUR_BITS

    @property
    def warpgroups(self) -> int:
        """Warpgroups that multiply: two if blocks have many rows, so that both share the rows."""
        return 2 if self.rows > 64 and self.outputs % (2 * FEATURES) == 0 and not self.packed else 1

    @property
    def features(self) -> int:
        """Outputs of a task, per projection."""
        return self.warpgroups * FEATURES

    @property
    def tiles(self) -> int:
        """Tasks per block of rows."""
        return self.outputs // self.features

    @property
    def step(self) -> int:
        """Inputs of a pipeline step, which are copied at once."""
        return BLOCK if self.packed or (self.inputs % BLOCK == 0 and self.rows <= 64) else 64

    @property
    def groups(self) -> int:
        """Groups of a step's inputs."""
        return self.step // self.group

    @property
    def zero_rows(self) -> int:
        """Groups whose zero points are copied with a step: at least two (copies need 128 bytes)."""
        return max(self.groups, 2) if self.zeros else 0

    @property
    def steps(self) -> int:
        """Steps of a task."""
        return -(-self.inputs // self.step) * self.summands

    @property
    def repeated_inputs(self) -> int:
        """Inputs by which the last step overlaps the step before, so that it ends with the weight.

        They are not counted again.
        """
        return self.steps * self.step - self.inputs * self.summands

    @property
    def stages(self) -> int:
        """Steps in shared memory at once: as many as fit beside the results."""
        results = self.features * self.rows * jnp.dtype(self.out_dtype).itemsize
        weights = self.step * self.projections * self.features
        decoded = DECODED * 2 * weights if self.codes else 0
        weight_bits = 4 if self.packed else 8 if self.codes else 16
        scales_per_step = (2 if self.codes == "int4" else 1) * self.groups if self.packed else 0
        scales = (scales_per_step + self.zero_rows) * self.projections * self.features
        stage = weight_bits * weights // 8 + scales + 2 * self.step * self.rows
        return min((MEMORY - results - decoded) // stage, MAX_STAGES)


class Operands(NamedTuple):
    """The kernel's input arrays; None for those that its shape does not use."""

    x: Any  # [blocks * rows, inputs]
    # bfloat16 or codes: [experts, summands * inputs, projections, outputs], or transposed [experts,
    # outputs, inputs]; of four-bit codes bytes in place of inputs, as in `quant/four_bits.py`
    weight: Any
    bias: Any  # float32 [experts, projections, outputs]
    scale: Any  # float32 [blocks * rows]: the weight of each row
    experts: Any  # int32 [blocks]: the expert of each block
    count: Any  # int32 [1]: number of blocks in use
    output_scale: Any = None  # float32 [experts, projections, outputs], of 8-bit codes
    row_scale: Any = None  # float32 [blocks * rows], of quantised rows
    # of four-bit codes, [experts, groups, projections, outputs]: float16 for int4, biased exponents
    # of two in uint8 for float4
    group_scale: Any = None
    group_zero: Any = None  # uint8 zero points of int4, of the same shape


class Task(NamedTuple):
    """A unit of work: some outputs of a block of rows."""

    number: Any  # index among the tasks of this processor
    row: Any  # first row
    expert: Any
    feature: Any  # first output


def each_task(shape: ProductShape, operands: Operands, function):
    """Loop over this processor's tasks.

    Calls `function(task, step) -> step` for each; `step` counts the pipeline steps of all tasks.

    Returns:
        The last `step`.
    """
    processors = jnp.int32(shape.processors)
    tiles = jnp.int32(shape.tiles)
    count = operands.count[0]
    processor = lax.axis_index("processor")

    def run_task(n, step):
        at = processor + n * processors
        # consecutive tasks use the same part of the weight while it is in the GPU's cache
        if shape.experts == 1:
            block = lax.rem(at, count)
            tile = lax.div(at, count)
        else:
            block = lax.div(at, tiles)
            tile = lax.rem(at, tiles)
        expert = jnp.int32(0) if shape.experts == 1 else operands.experts[block]
        return function(Task(n, block * shape.rows, expert, tile * shape.features), step)

    num_tasks = lax.div(count * tiles - processor + processors - 1, processors)
    return lax.fori_loop(0, jnp.maximum(num_tasks, 0), run_task, jnp.int32(0))
