"""Codes of weights as bfloat16, from one place in shared memory to another, as XLA makes them of
the same codes.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...gpu.tile import Tiles, along_columns, words
from ...quant.int4 import MIDDLE
from .shape import FEATURES

LAYOUT = words(FEATURES)


def decode_bytes(codes: str, tiles: Tiles, codes_KF_ref, w_KF_ref) -> None:
    """A step's codes of eight bits, exactly."""
    for k in range(0, codes_KF_ref.shape[0], FEATURES):
        inputs = pl.ds(k, FEATURES)
        tiles.decode(codes, codes_KF_ref.at[inputs], w_KF_ref.at[inputs])


def decode_packed(
    codes: str, tiles: Tiles, codes_KF_ref, scale_GF_ref, zero_GF_ref, w_KF_ref, kept=None
) -> None:
    """A step's codes of four bits: its first half of inputs, times `kept` if that is given, and
    then its second.
    """
    half = codes_KF_ref.shape[0]
    groups = scale_GF_ref.shape[0]
    codes_KF = tiles.widen(LAYOUT, tiles.load_as(codes_KF_ref, LAYOUT, True))
    numbers = float4 if codes == "float4" else int4
    for side, factor in enumerate((kept, None)):
        own = pl.ds(side * groups // 2, max(groups // 2, 1))  # a single group has both halves
        zero_GF_own = None if zero_GF_ref is None else zero_GF_ref.at[own]
        number_KF = numbers(tiles, codes_KF, side, scale_GF_ref.at[own], zero_GF_own, factor)
        w_KF_ref[pl.ds(side * half, half)] = number_KF.astype(w_KF_ref.dtype)
    plgpu.commit_smem()


def int4(tiles: Tiles, codes_KF, side: int, scale_GF_ref, zero_GF_ref, factor):
    """Codes less their zeros, times their scales, exactly in float32.

    Upper codes are 16 times as much at first.
    """
    unit = 16 if side else 1

    def scale(stored):
        return stored.astype(jnp.float32) * (1 / unit if factor is None else factor / unit)

    def number(code):
        return lax.bitcast_convert_type(code | 0x6400, jnp.float16)  # 1024 more

    if zero_GF_ref is None:
        zero_KF = jnp.float16(1024 + MIDDLE * unit)
    else:
        zero_KF = spread(
            tiles,
            zero_GF_ref,
            codes_KF.shape,
            lambda stored: number(stored.astype(jnp.int16) * unit),
        )
    code_KF = number(codes_KF & (15 * unit)) - zero_KF
    return code_KF.astype(jnp.float32) * spread(tiles, scale_GF_ref, codes_KF.shape, scale)


def float4(tiles: Tiles, codes_KF, side: int, power_GF_ref, zero_GF_ref, factor):
    """E2M1 times powers of two, exactly: bfloat16 has six more bits of exponent, and counts from
    126 lower.
    """
    del zero_GF_ref

    def scale(stored):  # of 0 it is 0, as in `quant/mxfp4.py`
        power = lax.bitcast_convert_type(stored.astype(jnp.int16) << 7, jnp.bfloat16)
        return power if factor is None else power * factor.astype(jnp.bfloat16)

    sign, rest = (8, 2) if side else (12, 6)
    bits = (
        tiles.shift_pairs(LAYOUT, codes_KF, sign) & -0x8000
        | tiles.shift_pairs(LAYOUT, codes_KF, rest) & 0x1C0
    )
    return tiles.times_power(bits, 126) * spread(tiles, power_GF_ref, codes_KF.shape, scale)


def spread(tiles: Tiles, values_GF_ref, shape, number):
    """A tile for codes: each of its rows has the values of the group that it lies in, as `number`
    makes them.
    """
    rows, _ = shape
    groups = values_GF_ref.shape[0]

    def of_group(group: int):
        values_KF = along_columns(
            number(tiles.load_as(values_GF_ref.at[group], LAYOUT.reduce(0))), shape
        )
        return values_KF if tiles.interpreted else plgpu.layout_cast(values_KF, LAYOUT)

    row_KF = tiles.index(shape, 0, LAYOUT)
    found = of_group(0)
    for group in range(1, groups):
        found = jnp.where(row_KF < group * (rows // groups), found, of_group(group))
    return found
