"""Unpacks the blocks whose elements are codes times a scale: codes, scales and minima."""

from dataclasses import dataclass

import numpy as np

# Times 2; -0 becomes 0.
E2M1 = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.float32)
IQ4 = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32
)


@dataclass(frozen=True)
class Fields:
    """The fields of n blocks, with one scale for each group of neighbouring elements.

    An element is `level * scale - least`. Its level is `table[code]` where there is a table, else
    `code - zero`; nothing is subtracted where `least` is None. In float32 this is exactly what
    `BlockType.decode` returns. With two-level scales (`super_scale`, and perhaps `super_least`),
    `scale` and `least` are integers to be multiplied by them.
    """

    codes: np.ndarray  # uint8 [n, elements]
    scale: np.ndarray  # float32, or int8, [n, elements / group]
    group: int
    zero: int = 0
    least: np.ndarray | None = None  # like `scale`
    table: np.ndarray | None = None  # float32 [16]
    super_scale: np.ndarray | None = None  # float16 [n, 1]
    super_least: np.ndarray | None = None  # like `super_scale`

    def values(self) -> np.ndarray:
        """Decode the elements: float32 [n, elements]."""
        levels = self.codes.astype(np.float32) if self.table is None else self.table[self.codes]
        if self.zero:
            levels -= np.float32(self.zero)
        grouped = levels.reshape(*self.scale.shape, self.group)
        with np.errstate(over="ignore", invalid="ignore"):  # scales may be infinite or NaN
            scale, least = self.scales()
            grouped *= scale[..., None]
            if least is not None:
                grouped -= least[..., None]
        return levels

    def scales(self) -> tuple[np.ndarray, np.ndarray | None]:
        """`scale` and `least` in float32, multiplied by their super-scales."""
        least = self.least if self.least is None else multiply_scales(self.least, self.super_least)
        return multiply_scales(self.scale, self.super_scale), least


def multiply_scales(scales: np.ndarray, super_scales: np.ndarray | None) -> np.ndarray:
    if super_scales is None:
        return scales
    return scales * super_scales.astype(np.float32).repeat(
        scales.shape[1] // super_scales.shape[1], 1
    )


def float16_at(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of each block: [n, 1]."""
    return blocks[:, at : at + 2].view(np.float16)


def float32_at(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of each block, as float32 [n, 1]."""
    return float16_at(blocks, at).astype(np.float32)


def unpack_planes(packed: np.ndarray, bits: int) -> np.ndarray:
    """Unpack codes of 1, 2 or 4 bits: bytes [..., k] to [..., 8 / bits, k], the lowest bits of all
    bytes first.
    """
    out = np.empty((*packed.shape[:-1], 8 // bits, packed.shape[-1]), np.uint8)
    for plane in range(8 // bits):
        np.right_shift(packed, plane * bits, out=out[..., plane, :])
    out &= (1 << bits) - 1
    return out


def unpack_codes(blocks: np.ndarray, start: int, end: int, run: int, bits: int) -> np.ndarray:
    """Unpack bytes `start` to `end` to codes [n, elements]: bit plane by bit plane within each run
    of `run` bytes.
    """
    runs = blocks[:, start:end].reshape(len(blocks), (end - start) // run, run)
    return unpack_planes(runs, bits).reshape(len(blocks), (end - start) * 8 // bits)


def q1_0(blocks: np.ndarray) -> Fields:
    """A bit selects +scale or -scale."""
    scale = float32_at(blocks, 0)
    return Fields(
        np.unpackbits(blocks[:, 2:], axis=1, bitorder="little"), 2 * scale, 128, least=scale
    )


def q4_0(blocks: np.ndarray) -> Fields:
    return Fields(unpack_codes(blocks, 2, 18, 16, 4), float32_at(blocks, 0), 32, zero=8)


def q4_1(blocks: np.ndarray) -> Fields:
    return Fields(
        unpack_codes(blocks, 4, 20, 16, 4), float32_at(blocks, 0), 32, least=-float32_at(blocks, 2)
    )


def fifth_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    """The fifth bits of 32 codes, from four bytes at `at`, shifted into place."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def q5_0(blocks: np.ndarray) -> Fields:
    return Fields(
        unpack_codes(blocks, 6, 22, 16, 4) | fifth_bits(blocks, 2),
        float32_at(blocks, 0),
        32,
        zero=16,
    )


def q5_1(blocks: np.ndarray) -> Fields:
    codes = unpack_codes(blocks, 8, 24, 16, 4) | fifth_bits(blocks, 4)
    return Fields(codes, float32_at(blocks, 0), 32, least=-float32_at(blocks, 2))


def q8_0(blocks: np.ndarray) -> Fields:
    """Read blocks of 32 int8 values with one scale; codes are unsigned, with the zero point 128."""
    return Fields(blocks[:, 2:] ^ np.uint8(128), float32_at(blocks, 0), 32, zero=128)


def q2_k(blocks: np.ndarray) -> Fields:
    scale = blocks[:, :16] & 15
    least = blocks[:, :16] >> 4
    return two_level_fields(unpack_codes(blocks, 16, 80, 32, 2), scale, least, 16, blocks, 80)


def two_level_fields(
    codes: np.ndarray, scale: np.ndarray, least: np.ndarray, group: int, blocks: np.ndarray, at: int
) -> Fields:
    """Fields with two float16 at byte `at` of each block: the super-scale and the super-minimum."""
    return Fields(
        codes,
        scale.view(np.int8),
        group,
        least=least.view(np.int8),
        super_scale=float16_at(blocks, at),
        super_least=float16_at(blocks, at + 2),
    )


def q3_k(blocks: np.ndarray) -> Fields:
    """The highest of the three bits is stored first, in bytes of its own; scales have six bits with
    offset 32.
    """
    codes = unpack_codes(blocks, 0, 32, 32, 1) << 2 | unpack_codes(blocks, 32, 96, 32, 2)
    scale = unpack_codes(blocks, 96, 104, 8, 4) | unpack_codes(blocks, 104, 108, 4, 2) << 4
    return Fields(
        codes, scale.view(np.int8) - np.int8(32), 16, zero=4, super_scale=float16_at(blocks, 108)
    )


def unpack_six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpack eight scales and eight minima [n, 8] of six bits each from twelve bytes.

    The first four of each are the low six bits of bytes 0-3 and 4-7. For the last four, the low
    four bits are the nibbles of bytes 8-11, and the high two bits are the remaining bits of the
    first eight bytes.
    """
    first = packed[:, :8]
    low = unpack_codes(packed, 8, 12, 4, 4)
    last = low | first >> 6 << 4
    first = first & 63
    return np.hstack([first[:, :4], last[:, :4]]), np.hstack([first[:, 4:], last[:, 4:]])


def q4_k(blocks: np.ndarray) -> Fields:
    scale, least = unpack_six_bits(blocks[:, 4:16])
    return two_level_fields(unpack_codes(blocks, 16, 144, 32, 4), scale, least, 32, blocks, 0)


def q5_k(blocks: np.ndarray) -> Fields:
    scale, least = unpack_six_bits(blocks[:, 4:16])
    codes = unpack_codes(blocks, 48, 176, 32, 4) | unpack_codes(blocks, 16, 48, 32, 1) << 4
    return two_level_fields(codes, scale, least, 32, blocks, 0)


def q6_k(blocks: np.ndarray) -> Fields:
    codes = unpack_codes(blocks, 0, 128, 64, 4) | unpack_codes(blocks, 128, 192, 32, 2) << 4
    return Fields(
        codes, blocks[:, 192:208].view(np.int8), 16, zero=32, super_scale=float16_at(blocks, 208)
    )


def iq4_nl(blocks: np.ndarray) -> Fields:
    return Fields(unpack_codes(blocks, 2, 18, 16, 4), float32_at(blocks, 0), 32, table=IQ4)


def iq4_xs(blocks: np.ndarray) -> Fields:
    """Scales have six bits with offset 32: the high two in two bytes, then the low four in four
    bytes.
    """
    scale = unpack_codes(blocks, 4, 8, 1, 4) | unpack_codes(blocks, 2, 4, 1, 2) << 4
    codes = unpack_codes(blocks, 8, 136, 16, 4)
    signed_scale = scale.view(np.int8) - np.int8(32)
    return Fields(codes, signed_scale, 32, table=IQ4, super_scale=float16_at(blocks, 0))


def mxfp4(blocks: np.ndarray) -> Fields:
    """The scale is a power of two, stored as its exponent; halved, since the table is doubled."""
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return Fields(unpack_codes(blocks, 1, 17, 16, 4), scale, 32, table=E2M1)


def nvfp4(blocks: np.ndarray) -> Fields:
    """The scales are unsigned floats (4-bit exponent, 3-bit mantissa); halved, since the table is
    doubled.
    """
    exponent = (blocks[:, :4] >> 3 & 15).astype(np.int32)
    mantissa = (blocks[:, :4] & 7).astype(np.float32)
    scale = np.ldexp(
        mantissa + np.where(exponent > 0, np.float32(8), np.float32(0)),
        np.maximum(exponent, 1) - 11,
    )
    scale[blocks[:, :4] == 127] = 0  # the encoding of NaN
    return Fields(unpack_codes(blocks, 4, 36, 8, 4), scale, 16, table=E2M1)


def tq1_0(blocks: np.ndarray) -> Fields:
    """Five ternary codes a byte, as base-3 digits of a fraction of 256: the first digit is byte * 3
    >> 8.
    """
    runs = []
    for start, end, run, digits in ((0, 32, 32, 5), (32, 48, 16, 5), (48, 52, 4, 4)):
        powers = np.array((1, 3, 9, 27, 81), np.uint8)[:digits, None]
        # Modulo 256, which drops the digits before.
        fractions = blocks[:, start:end].reshape(-1, 1, run) * powers
        runs.append(
            (fractions.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(-1, run * digits)
        )
    return Fields(np.hstack(runs), float32_at(blocks, 52), 256, zero=1)


def tq2_0(blocks: np.ndarray) -> Fields:
    return Fields(unpack_codes(blocks, 0, 64, 32, 2), float32_at(blocks, 64), 256, zero=1)
