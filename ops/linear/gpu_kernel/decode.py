"""Decodes quantised weights to bfloat16, from one shared memory buffer to another.

The results have the same bits as those of XLA's dequantisation.
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
    """Decode a step's 8-bit codes, exactly."""
    for k in range(0, codes_KF_ref.shape[0], FEATURES):
        inputs = pl.ds(k, FEATURES)
        tiles.decode(codes, codes_KF_ref.at[inputs], w_KF_ref.at[inputs])


def decode_packed(
    codes: str, tiles: Tiles, codes_KF_ref, scale_GF_ref, zero_GF_ref, w_KF_ref, overlap_factor=None
) -> None:
    """Decode a step's four-bit codes: low nibbles are its first half of inputs, high its second.

    Args:
        overlap_factor: Multiplies the first half of the inputs, if given: 0 drops the inputs that
            the last step has in common with the step before.
    """
    half = codes_KF_ref.shape[0]
    groups = scale_GF_ref.shape[0]
    codes_KF = tiles.widen(LAYOUT, tiles.load_as(codes_KF_ref, LAYOUT, True))
    decode = float4 if codes == "float4" else int4
    for side, factor in enumerate((overlap_factor, None)):
        group_slice = pl.ds(
            side * groups // 2, max(groups // 2, 1)
        )  # a single group has both halves
        zero_GF_half = None if zero_GF_ref is None else zero_GF_ref.at[group_slice]
        number_KF = decode(
            tiles, codes_KF, side, scale_GF_ref.at[group_slice], zero_GF_half, factor
        )
        w_KF_ref[pl.ds(side * half, half)] = number_KF.astype(w_KF_ref.dtype)
    plgpu.commit_smem()


def int4(tiles: Tiles, codes_KF, side: int, scale_GF_ref, zero_GF_ref, factor):
    """(code - zero point) * scale, exact in float32.

    Codes from high nibbles (`side` 1) are not shifted: they are 16 times as large, and their scales
    are divided by 16.
    """
    unit = 16 if side else 1

    def scale(stored):
        return stored.astype(jnp.float32) * (1 / unit if factor is None else factor / unit)

    def number(code):
        return lax.bitcast_convert_type(code | 0x6400, jnp.float16)  # 1024 + code

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
    """E2M1 codes times powers of two, exact.

    The bits of a code are moved to those of a bfloat16 with the same exponent and mantissa. The
    exponent biases differ by 126, so the result is multiplied by 2**126.
    """
    del zero_GF_ref

    def scale(stored):  # a stored 0 gives the scale 0, as in `quant/mxfp4.py`
        power = lax.bitcast_convert_type(stored.astype(jnp.int16) << 7, jnp.bfloat16)
        return power if factor is None else power * factor.astype(jnp.bfloat16)

    sign_shift, magnitude_shift = (8, 2) if side else (12, 6)
    bits = (
        tiles.shift_pairs(LAYOUT, codes_KF, sign_shift) & -0x8000
        | tiles.shift_pairs(LAYOUT, codes_KF, magnitude_shift) & 0x1C0
    )
    return tiles.times_power(bits, 126) * spread(tiles, power_GF_ref, codes_KF.shape, scale)


def spread(tiles: Tiles, values_GF_ref, shape, convert):
    """Broadcast group values to a tile of codes, each row with the values of its group.

    Args:
        convert: Converts stored values to numbers.
    """
    rows, _ = shape
    groups = values_GF_ref.shape[0]

    def group_values(group: int):
        values_KF = along_columns(
            convert(tiles.load_as(values_GF_ref.at[group], LAYOUT.reduce(0))), shape
        )
        return values_KF if tiles.interpreted else plgpu.layout_cast(values_KF, LAYOUT)

    row_KF = tiles.index(shape, 0, LAYOUT)
    spread_KF = group_values(0)
    for group in range(1, groups):
        spread_KF = jnp.where(row_KF < group * (rows // groups), spread_KF, group_values(group))
    return spread_KF
