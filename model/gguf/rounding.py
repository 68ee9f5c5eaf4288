"""Numbers rounded to blocks as llama.cpp's reference code does it, bit for bit; `fields.py` reads them."""

import numpy as np

from .fields import E2M1


def inverted(scale: np.ndarray) -> np.ndarray:
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)


def halves(*numbers: np.ndarray) -> np.ndarray:
    """Float16 of [n, 1] each, as bytes one after the other."""
    with np.errstate(over="ignore"):
        return np.hstack(numbers).astype(np.float16).view(np.uint8)


def pairs(codes: np.ndarray) -> np.ndarray:
    """Codes of four bits [n, 32], the first half in the low bits."""
    return codes[:, :16] | codes[:, 16:] << 4


def truncated(x: np.ndarray, inverse: np.ndarray, add: float, most: int) -> np.ndarray:
    """The whole part of x * inverse + add, rounded to float32 once, as a fused multiplication and addition gives it."""
    exact = x.astype(np.float64) * inverse.astype(np.float64) + add
    return np.clip(np.trunc(exact.astype(np.float32)), 0, most).astype(np.uint8)


def signed(x: np.ndarray, middle: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale and codes where the largest of each block, with its sign, is the code 0."""
    scale = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1) / np.float32(-middle)
    return scale, truncated(x, inverted(scale), middle + 0.5, 2 * middle - 1)


def ranged(x: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scale, least and codes where a block's extremes are the first and the last code."""
    least, largest = x.min(1, keepdims=True), x.max(1, keepdims=True)
    scale = (largest - least) / np.float32(most)
    return scale, least, truncated(x - least, inverted(scale), 0.5, most)


def fifth(codes: np.ndarray) -> np.ndarray:
    """The fifth bits of 32 codes, in four bytes."""
    return np.packbits(codes >> 4, axis=1, bitorder="little")


def q4_0(x: np.ndarray) -> np.ndarray:
    return fours(*signed(x, 8))


def fours(scale: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """The blocks of Q4_0."""
    return np.hstack([halves(scale), pairs(codes)])


def q4_1(x: np.ndarray) -> np.ndarray:
    scale, least, codes = ranged(x, 15)
    return np.hstack([halves(scale, least), pairs(codes)])


def q5_0(x: np.ndarray) -> np.ndarray:
    scale, codes = signed(x, 16)
    return np.hstack([halves(scale), fifth(codes), pairs(codes & 15)])


def q5_1(x: np.ndarray) -> np.ndarray:
    scale, least, codes = ranged(x, 31)
    return np.hstack([halves(scale, least), fifth(codes), pairs(codes & 15)])


def q8_0(x: np.ndarray) -> np.ndarray:
    """Halves go away from zero."""
    scale = np.abs(x).max(1, keepdims=True) / np.float32(127)
    exact = x * inverted(scale)
    size = np.abs(exact)
    whole = np.floor(size)
    codes = np.copysign(whole + (size - whole >= 0.5), exact)
    return eights(scale, codes.astype(np.int8).view(np.uint8))


def eights(scale: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """The blocks of Q8_0; codes are signed bytes."""
    return np.hstack([halves(scale), codes])


def mxfp4(x: np.ndarray) -> np.ndarray:
    """The largest of a block lies in the last octave of the codes; of two numbers as near, the first code."""
    largest = np.abs(x).max(1, keepdims=True)
    exponent = np.where(largest > 0, np.floor(np.log2(largest, where=largest > 0, out=np.zeros_like(largest))) + 125, 0)
    exponent = np.clip(exponent, 0, 254).astype(np.uint8)
    half = np.ldexp(np.float32(1), exponent.astype(np.int32) - 128)  # the numbers are doubled
    codes = np.zeros(x.shape, np.uint8)
    best = np.abs(E2M1[0] * half - x)
    for code in range(1, 16):
        off = np.abs(E2M1[code] * half - x)
        codes = np.where(off < best, np.uint8(code), codes)
        best = np.minimum(off, best)
    return np.hstack([exponent, pairs(codes)])
