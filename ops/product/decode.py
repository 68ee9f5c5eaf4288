"""Codes of weights as bfloat16, from one place in shared memory to another, as XLA makes them of the same codes."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..attention.mosaic.tile import Tiles, along_columns
from ..quant.int4 import MIDDLE
from .shape import FEATURES

LAYOUT = plgpu.Layout.WGMMA_UPCAST_2X  # a thread has four bytes side by side


def decode_bytes(codes: str, tiles: Tiles, codes_KF_ref, w_KF_ref) -> None:
    """A step's codes of eight bits, exactly."""
    for k in range(0, codes_KF_ref.shape[0], FEATURES):
        inputs = pl.ds(k, FEATURES)
        tiles.decode(codes, codes_KF_ref.at[inputs], w_KF_ref.at[inputs])


def decode_packed(codes: str, tiles: Tiles, codes_KF_ref, scale_GF_ref, zero_GF_ref, w_KF_ref, kept=None) -> None:
    """A step's codes of four bits: its first half of inputs, times `kept` if that is given, and then its second."""
    half, groups = codes_KF_ref.shape[0], scale_GF_ref.shape[0]
    codes_KF = tiles.load_as(codes_KF_ref, LAYOUT, True).astype(jnp.int32)
    for side, code_KF in enumerate((codes_KF & 15, codes_KF >> 4)):
        own = pl.ds(side * groups // 2, max(groups // 2, 1))  # a single group has both halves
        factor = None if side else kept
        scale_KF = spread(tiles, scale_GF_ref.at[own], half, power if codes == "float4" else wide, factor)
        zero_KF = MIDDLE if zero_GF_ref is None else spread(tiles, zero_GF_ref.at[own], half, wide)
        number_KF = from_float4(code_KF) if codes == "float4" else code_KF.astype(jnp.float32) - zero_KF
        w_KF_ref[pl.ds(side * half, half)] = (number_KF * scale_KF).astype(w_KF_ref.dtype)
    plgpu.commit_smem()


def spread(tiles: Tiles, values_GF_ref, rows: int, number, factor=None):
    """A tile for codes: each of its rows has the values of the group that it lies in, as `number` makes them."""
    groups, shape = values_GF_ref.shape[0], (rows, values_GF_ref.shape[1])

    def of_group(group: int):
        values_F = number(tiles.load_as(values_GF_ref.at[group], LAYOUT.reduce(0)))
        values_KF = along_columns(values_F if factor is None else values_F * factor, shape)
        return values_KF if tiles.interpreted else plgpu.layout_cast(values_KF, LAYOUT)

    row_KF, found = tiles.index(shape, 0, LAYOUT), of_group(0)
    for group in range(1, groups):
        found = jnp.where(row_KF < group * (rows // groups), found, of_group(group))
    return found


def wide(value):
    return value.astype(jnp.float32)


def power(exponent):
    """2 to the power of a byte less 127; of 0 it is 0, as in `quant/mxfp4.py`."""
    return lax.bitcast_convert_type(exponent.astype(jnp.int32) << 23, jnp.float32)


def from_float4(code):
    """The numbers of E2M1 bits: a float16 has three more bits of exponent, so the same bits are smaller by 2**14."""
    bits = ((code & 7) << 9 | (code & 8) << 12).astype(jnp.int16)
    return (lax.bitcast_convert_type(bits, jnp.float16) * jnp.float16(2**14)).astype(jnp.float32)
