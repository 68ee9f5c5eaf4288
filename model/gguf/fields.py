"""What blocks hold whose values are codes times a scale: codes, scales, and what is subtracted."""

from dataclasses import dataclass

import numpy as np

E2M1 = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.float32)  # doubled; there is no -0
IQ4 = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32)


@dataclass(frozen=True)
class Fields:
    """The parts of n blocks of a type with one rule for each group of neighbouring elements.

    An element is `level * scale - least`. Its level is `table[code]` where there is a table, else `code - zero`;
    nothing is subtracted where `least` is None. In float32 this is exactly what `BlockType.decode` gives. Where there
    is a `super_scale`, and perhaps a `super_least`, the others are whole numbers, to be multiplied with it.
    """

    codes: np.ndarray  # uint8 [n, elements]
    scale: np.ndarray  # float32, or int8, [n, elements / group]
    group: int
    zero: int = 0
    least: np.ndarray | None = None  # the same
    table: np.ndarray | None = None  # float32 [16]
    super_scale: np.ndarray | None = None  # float16 [n, 1]
    super_least: np.ndarray | None = None  # the same

    def values(self) -> np.ndarray:
        """The elements, float32 [n, elements]."""
        levels = self.codes.astype(np.float32) if self.table is None else self.table[self.codes]
        if self.zero:
            levels -= np.float32(self.zero)
        grouped = levels.reshape(*self.scale.shape, self.group)
        with np.errstate(over="ignore", invalid="ignore"):  # of scales that are no numbers
            scale, least = self.scales()
            grouped *= scale[..., None]
            if least is not None:
                grouped -= least[..., None]
        return levels

    def scales(self) -> tuple[np.ndarray, np.ndarray | None]:
        """`scale` and `least` in float32, multiplied."""
        least = self.least if self.least is None else product(self.least, self.super_least)
        return product(self.scale, self.super_scale), least


def product(each: np.ndarray, above: np.ndarray | None) -> np.ndarray:
    if above is None:
        return each
    return each * above.astype(np.float32).repeat(each.shape[1] // above.shape[1], 1)


def upper(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at a byte of each block, [n, 1]."""
    return blocks[:, at : at + 2].view(np.float16)


def half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at a byte of each block, as float32 [n, 1]."""
    return upper(blocks, at).astype(np.float32)


def planes(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes of 1, 2 or 4 bits [..., 8 / bits, k] of bytes [..., k]: the lowest bits of all, then the next ones."""
    out = np.empty((*packed.shape[:-1], 8 // bits, packed.shape[-1]), np.uint8)
    for plane in range(8 // bits):
        np.right_shift(packed, plane * bits, out=out[..., plane, :])
    out &= (1 << bits) - 1
    return out


def codes_of(blocks: np.ndarray, start: int, end: int, run: int, bits: int) -> np.ndarray:
    """The codes [n, elements] of bytes `start` to `end`: those of `run` bytes, plane by plane, then of the next run."""
    runs = blocks[:, start:end].reshape(len(blocks), (end - start) // run, run)
    return planes(runs, bits).reshape(len(blocks), (end - start) * 8 // bits)


def q1_0(blocks: np.ndarray) -> Fields:
    """A bit says whether the scale is added or taken off."""
    scale = half(blocks, 0)
    return Fields(np.unpackbits(blocks[:, 2:], axis=1, bitorder="little"), 2 * scale, 128, least=scale)


def q4_0(blocks: np.ndarray) -> Fields:
    return Fields(codes_of(blocks, 2, 18, 16, 4), half(blocks, 0), 32, zero=8)


def q4_1(blocks: np.ndarray) -> Fields:
    return Fields(codes_of(blocks, 4, 20, 16, 4), half(blocks, 0), 32, least=-half(blocks, 2))


def fifth_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    """The fifth bits of 32 codes, a bit each in four bytes, where they stand in the codes."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def q5_0(blocks: np.ndarray) -> Fields:
    return Fields(codes_of(blocks, 6, 22, 16, 4) | fifth_bits(blocks, 2), half(blocks, 0), 32, zero=16)


def q5_1(blocks: np.ndarray) -> Fields:
    codes = codes_of(blocks, 8, 24, 16, 4) | fifth_bits(blocks, 4)
    return Fields(codes, half(blocks, 0), 32, least=-half(blocks, 2))


def q8_0(blocks: np.ndarray) -> Fields:
    """The stored bytes have a sign: -128 is the code 0."""
    return Fields(blocks[:, 2:] ^ np.uint8(128), half(blocks, 0), 32, zero=128)


def q2_k(blocks: np.ndarray) -> Fields:
    scale, least = blocks[:, :16] & 15, blocks[:, :16] >> 4
    return both_leveled(codes_of(blocks, 16, 80, 32, 2), scale, least, 16, blocks, 80)


def both_leveled(
    codes: np.ndarray, scale: np.ndarray, least: np.ndarray, group: int, blocks: np.ndarray, at: int
) -> Fields:
    """Two float16 at a byte of each block, for the scales and for what is subtracted."""
    uppers = {"super_scale": upper(blocks, at), "super_least": upper(blocks, at + 2)}
    return Fields(codes, scale.view(np.int8), group, least=least.view(np.int8), **uppers)


def q3_k(blocks: np.ndarray) -> Fields:
    """Of three bits the highest stands first, in bytes of its own; scales have six bits, of which 32 is none."""
    codes = codes_of(blocks, 0, 32, 32, 1) << 2 | codes_of(blocks, 32, 96, 32, 2)
    scale = codes_of(blocks, 96, 104, 8, 4) | codes_of(blocks, 104, 108, 4, 2) << 4
    return Fields(codes, scale.view(np.int8) - np.int8(32), 16, zero=4, super_scale=upper(blocks, 108))


def six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight minima [n, 8] of six bits each in twelve bytes.

    The first four of both are the low six bits of bytes 0-3 and 4-7. Of the last four, the low four bits are the halves
    of bytes 8-11, and the high two those that the first eight bytes have left.
    """
    first, low = packed[:, :8], codes_of(packed, 8, 12, 4, 4)
    last = low | first >> 6 << 4
    first = first & 63
    return np.hstack([first[:, :4], last[:, :4]]), np.hstack([first[:, 4:], last[:, 4:]])


def q4_k(blocks: np.ndarray) -> Fields:
    scale, least = six_bits(blocks[:, 4:16])
    return both_leveled(codes_of(blocks, 16, 144, 32, 4), scale, least, 32, blocks, 0)


def q5_k(blocks: np.ndarray) -> Fields:
    scale, least = six_bits(blocks[:, 4:16])
    codes = codes_of(blocks, 48, 176, 32, 4) | codes_of(blocks, 16, 48, 32, 1) << 4
    return both_leveled(codes, scale, least, 32, blocks, 0)


def q6_k(blocks: np.ndarray) -> Fields:
    codes = codes_of(blocks, 0, 128, 64, 4) | codes_of(blocks, 128, 192, 32, 2) << 4
    return Fields(codes, blocks[:, 192:208].view(np.int8), 16, zero=32, super_scale=upper(blocks, 208))


def iq4_nl(blocks: np.ndarray) -> Fields:
    return Fields(codes_of(blocks, 2, 18, 16, 4), half(blocks, 0), 32, table=IQ4)


def iq4_xs(blocks: np.ndarray) -> Fields:
    """Scales have six bits, of which 32 is none: the high two in two bytes, then the low four in four."""
    scale = codes_of(blocks, 4, 8, 1, 4) | codes_of(blocks, 2, 4, 1, 2) << 4
    codes, whole = codes_of(blocks, 8, 136, 16, 4), scale.view(np.int8) - np.int8(32)
    return Fields(codes, whole, 32, table=IQ4, super_scale=upper(blocks, 0))


def mxfp4(blocks: np.ndarray) -> Fields:
    """The scale is a power of two, by its exponent; halved, since the table is doubled."""
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return Fields(codes_of(blocks, 1, 17, 16, 4), scale, 32, table=E2M1)


def nvfp4(blocks: np.ndarray) -> Fields:
    """The scales are floats without a sign, of four bits of exponent and three of mantissa; halved as in `mxfp4`."""
    exponent, mantissa = (blocks[:, :4] >> 3 & 15).astype(np.int32), (blocks[:, :4] & 7).astype(np.float32)
    scale = np.ldexp(mantissa + np.where(exponent > 0, np.float32(8), np.float32(0)), np.maximum(exponent, 1) - 11)
    scale[blocks[:, :4] == 127] = 0  # where such a float is no number
    return Fields(codes_of(blocks, 4, 36, 8, 4), scale, 16, table=E2M1)


def tq1_0(blocks: np.ndarray) -> Fields:
    """Five codes of three values a byte, the digits of a fraction: its first is how often 256 goes into it times 3."""
    runs = []
    for start, end, run, digits in ((0, 32, 32, 5), (32, 48, 16, 5), (48, 52, 4, 4)):
        powers = np.array((1, 3, 9, 27, 81), np.uint8)[:digits, None]
        fractions = blocks[:, start:end].reshape(-1, 1, run) * powers  # modulo 256: the digits before are gone
        runs.append((fractions.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(-1, run * digits))
    return Fields(np.hstack(runs), half(blocks, 52), 256, zero=1)


def tq2_0(blocks: np.ndarray) -> Fields:
    return Fields(codes_of(blocks, 0, 64, 32, 2), half(blocks, 64), 256, zero=1)
