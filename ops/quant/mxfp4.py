"""MXFP4: 4-bit floats (E2M1), two per byte, with a power of two as the scale of every 32 inputs.

It is the format of the experts in checkpoints of gpt-oss.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
SPLITS = False  # blocks lie along the axis that would be split
STORED = {}
METHOD = "mxfp4"
MULTIPLE = BLOCK


class Mxfp4Matrix(Grouped):
    """A single matrix in MXFP4."""

    def group_scale(self, max_abs: np.ndarray) -> np.ndarray:
        """The powers of two that scale the largest magnitudes to between 4 and 7.

        Values above 6 are clipped. Values above 7 would be nearer to 8, which is 4 at the next
        power.
        """
        share, exponent = np.frexp(max_abs)
        exponent = np.maximum(exponent - 3 + (share > 7 / 8), -126)
        return np.where(max_abs > 0, np.ldexp(np.float32(1), exponent), 1).astype(np.float32)


class Mxfp4(Weight):
    """A stack [E, D, ...] of matrices, with codes packed as in `four_bits.py`."""

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
        options = row_options("mxfp4", rows)
        return (
            pack_stack(len(self.scales), lambda e: tiled(self.nibbles[e], self.scales[e], options))
            or self
        )


class TiledMxfp4(PackedWeight):
    """Tiles of a matrix for the native kernels, see formats.h in `ops/native`."""

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
    """Dequantise bytes [four_bits.count(D), ...] and scales [D / 32, ...] to bfloat16."""
    code = four_bits.split(data, BLOCK * len(scales)).astype(jnp.int32)
    exponent = (code >> 1) & 3
    mantissa = code & 1
    # Twice the magnitude is an integer; exponent 0 has no hidden bit.
    doubled = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    halves = jnp.where(code & 8 == 0, doubled, -doubled).reshape(-1, BLOCK, *data.shape[1:])
    # The power of two from its bits, which is exact. Scale 0 (2^-127) becomes zero, far below any
    # weight.
    power = jax.lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)
    values = halves.astype(jnp.float32) * 0.5 * power[:, None]
    return values.reshape(-1, *data.shape[1:]).astype(jnp.bfloat16)


def spec(dense: ArraySpec, *options: str) -> Any:
    """See `Format.spec`. A stack [E, D, ...] is sharded like the dense one; a single matrix has the
    grouped format.
    """
    if not dense.stacked:
        return grouped(dense, "float4", BLOCK, Mxfp4Matrix)
    E, D, *trailing = dense.shape
    if D % BLOCK:
        raise FormatError(f"an axis of {D} does not divide into blocks of {BLOCK}")
    return Mxfp4(
        nibbles=replace(
            dense, shape=(E, four_bits.count(D), *trailing), dtype=jnp.uint8, init="bytes"
        ),
        scales=replace(dense, shape=(E, D // BLOCK, *trailing), dtype=jnp.uint8, init="exponents"),
    )


def tensors(E: int, into: int, out: tuple[int, ...]) -> Mxfp4:
    """See `Format.tensors`. Checkpoints have blocks and scales [E, rows, into / 32, ...], where
    `rows` are the axes of `out` in reverse order.

    A byte of a block in the file holds two neighbouring inputs, the even one in the low bits.
    """
    rows = int(np.prod(out))
    groups = into // BLOCK

    def turn_codes(x: np.ndarray) -> np.ndarray:
        nibbles = np.empty((E, four_bits.count(into), rows), np.uint8)
        for e, data in enumerate(x.reshape(E, rows, -1)):
            nibbles[e] = four_bits.join(np.stack([data & 15, data >> 4], -1).reshape(rows, into).T)
        return nibbles.reshape(E, -1, *reversed(out)).transpose(0, 1, *range(len(out) + 1, 1, -1))

    def turn_scales(x: np.ndarray) -> np.ndarray:
        if (x == 255).any():
            raise FormatError("holds 255, which stands for no number")
        x = x.reshape(E, *reversed(out), -1)
        return x.transpose(0, *range(x.ndim - 1, 0, -1))

    return Mxfp4(
        nibbles=StoredTensor("_blocks", (E, rows, groups, BLOCK // 2), turn_codes),
        scales=StoredTensor("_scales", (E, rows, groups), turn_scales),
    )
