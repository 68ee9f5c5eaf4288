"""MXFP4: floats of four bits (E2M1), two a byte; 32 along the axis that is summed over share a
power of two.

Stacks of experts are found so in checkpoints of gpt-oss.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...sharding import struct
from ...sharding.spec import ArraySpec
from ..linear.cpu import PackedWeight, has_product, row_options
from ..linear.cpu_layout import by_block, pack_stack, tile_nibbles
from ..linear.weight import GpuMatrix, Weight
from . import four_bits
from .compressed import FormatError, StoredTensor
from .grouped import Grouped
from .grouped import spec as grouped

BLOCK = 32

CHOICES = "mxfp4"
HEAD = None
SPLITS = False  # the codes lie in blocks along the axis that would be cut
STORED = {}
METHOD = "mxfp4"
MULTIPLE = BLOCK


@struct.dataclass
class Mxfp4Matrix(Grouped):
    """A matrix by itself."""

    def scaled(self, most: np.ndarray) -> np.ndarray:
        """So that the largest becomes 4 to 7, which is clipped to 6; above 7 it is nearer to 8, the
        next power's 4.
        """
        share, exponent = np.frexp(most)
        exponent = np.maximum(exponent - 3 + (share > 7 / 8), -126)
        return np.where(most > 0, np.ldexp(np.float32(1), exponent), 1).astype(np.float32)


@struct.dataclass
class Mxfp4(Weight):
    """A stack [E, D, ...] of matrices, whose codes lie as in `four_bits.py`."""

    nibbles: Any  # uint8 [E, four_bits.count(D), ...]
    scales: Any  # uint8 [E, D / 32, ...]: 127 + the exponent of the power of two

    has_gpu_kernel = True

    def gpu_matrix(self) -> GpuMatrix:
        return GpuMatrix(self.nibbles, "float4", self.scales, BLOCK)

    def __getitem__(self, index):
        """One matrix [D, ...] in bfloat16, which holds each value exactly."""
        return decode(self.nibbles[index], self.scales[index])

    def for_kernels(self, rows: str) -> Weight:
        if not has_product("mxfp4", rows):
            return self
        options = row_options("mxfp4", BLOCK, rows)
        return (
            pack_stack(len(self.scales), lambda e: tiled(self.nibbles[e], self.scales[e], options))
            or self
        )


@struct.dataclass
class TiledMxfp4(PackedWeight):
    """A matrix for the kernels; see formats.h."""

    tiles: Any  # uint32 [O / 16, K / 8, 16]
    scale: Any  # uint8 [O / 16, K / 32, 16]
    kernel = "mxfp4"


def tiled(data: np.ndarray, scales: np.ndarray, options: dict[str, bool]) -> TiledMxfp4:
    K = BLOCK * len(scales)
    out = data.shape[1:]
    tiles = tile_nibbles(data.reshape(len(data), -1), K, K)
    scale = by_block(scales.reshape(len(scales), -1))
    return TiledMxfp4(tiles, scale, into=(K,), out=out, inputs=(0,), **options)


def kernels(*options: str) -> tuple[str, ...]:
    return ("mxfp4",)


def decode(data, scales):
    """The values of [four_bits.count(D), ...] bytes and [D / 32, ...] scales."""
    code = four_bits.split(data, BLOCK * len(scales)).astype(jnp.int32)
    exponent = (code >> 1) & 3
    mantissa = code & 1
    # Twice the magnitude is a whole number; exponent 0 has no hidden bit.
    doubled = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    halves = jnp.where(code & 8 == 0, doubled, -doubled).reshape(-1, BLOCK, *data.shape[1:])
    # The power of two from its bits: exact everywhere. Scale 0 (2^-127) comes out as zero, far
    # below any weight.
    power = jax.lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)
    values = halves.astype(jnp.float32) * 0.5 * power[:, None]
    return values.reshape(-1, *data.shape[1:]).astype(jnp.bfloat16)


def spec(dense: ArraySpec, *options: str) -> Any:
    """The specs of the two arrays of a stack whose dense form is [E, D, ...]; they lie where it
    would lie.

    A matrix by itself is codes in groups.
    """
    if not dense.stacked:
        return grouped(dense, "float4", BLOCK, Mxfp4Matrix)
    E, D, *rest = dense.shape
    if D % BLOCK:
        raise FormatError(f"an axis of {D} does not divide into blocks of {BLOCK}")
    return Mxfp4(
        nibbles=replace(dense, shape=(E, four_bits.count(D), *rest), dtype=jnp.uint8, init="bytes"),
        scales=replace(dense, shape=(E, D // BLOCK, *rest), dtype=jnp.uint8, init="exponents"),
    )


def tensors(E: int, into: int, out: tuple[int, ...]) -> Mxfp4:
    """Blocks and scales lie [E, rows, into / 32, ...] in the file; `rows` are the axes of `out`,
    the last one first.

    A byte of a block there has neighbouring inputs, the even one in its low half.
    """
    rows = int(np.prod(out))
    groups = into // BLOCK

    def turn_codes(x: np.ndarray) -> np.ndarray:
        found = np.empty((E, four_bits.count(into), rows), np.uint8)
        for e, data in enumerate(x.reshape(E, rows, -1)):
            found[e] = four_bits.join(np.stack([data & 15, data >> 4], -1).reshape(rows, into).T)
        return found.reshape(E, -1, *reversed(out)).transpose(0, 1, *range(len(out) + 1, 1, -1))

    def turn_scales(x: np.ndarray) -> np.ndarray:
        if (x == 255).any():
            raise FormatError("holds 255, which stands for no number")
        x = x.reshape(E, *reversed(out), -1)
        return x.transpose(0, *range(x.ndim - 1, 0, -1))

    return Mxfp4(
        nibbles=StoredTensor("_blocks", (E, rows, groups, BLOCK // 2), turn_codes),
        scales=StoredTensor("_scales", (E, rows, groups), turn_scales),
    )
