"""MXFP4: floats of four bits (E2M1), two a byte; 32 along the axis that is summed over share a power of two."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from ...sharding.spec import ArraySpec

BLOCK = 32


@struct.dataclass
class Mxfp4:
    """A stack [E, D, ...] of matrices.

    row of D     0 1 2 3 ... 30 31 | 32 33 ...
    blocks       0   1   ...  15   | 16  ...      the even row in a byte's low half, the odd one in its high half
    scales               0         |      1 ...   127 + the exponent of the power of two
    """

    blocks: Any  # uint8 [E, D / 2, ...]
    scales: Any  # uint8 [E, D / 32, ...]

    def __getitem__(self, e):
        """One matrix [D, ...] in bfloat16, which holds each value exactly."""
        return decode(self.blocks[e], self.scales[e])


def decode(blocks, scales):
    """The values of [D / 2, ...] bytes and [D / 32, ...] scales."""
    # Both halves by one broadcast shift: joined from two arrays they would cost ten times as much on a CPU.
    shift = jnp.array([0, 4]).reshape(1, 2, *[1] * (blocks.ndim - 1))
    code = blocks[:, None].astype(jnp.int32) >> shift
    exponent, mantissa = (code >> 1) & 3, code & 1
    # Twice the magnitude is a whole number; exponent 0 has no hidden bit.
    doubled = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    halves = jnp.where(code & 8 == 0, doubled, -doubled).reshape(-1, BLOCK, *blocks.shape[1:])
    # The power of two from its bits: exact everywhere. Scale 0 (2^-127) comes out as zero, far below any weight.
    power = jax.lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)
    values = halves.astype(jnp.float32) * 0.5 * power[:, None]
    return values.reshape(-1, *blocks.shape[1:]).astype(jnp.bfloat16)


def spec(dense: ArraySpec) -> Mxfp4:
    """The specs of the two arrays of a stack whose dense form is [E, D, ...]; they lie where it would lie."""
    E, D, *rest = dense.shape
    if D % BLOCK:
        raise ValueError(f"an axis of {D} does not divide into blocks of {BLOCK}")
    return Mxfp4(
        blocks=replace(dense, shape=(E, D // 2, *rest), dtype=jnp.uint8, init="bytes"),
        scales=replace(dense, shape=(E, D // BLOCK, *rest), dtype=jnp.uint8, init="exponents"),
    )
