"""Quantises values to blocks bit for bit as llama.cpp's reference code does; `fields.py` decodes
them.
"""

import numpy as np

from .fields import E2M1


def reciprocal(scale: np.ndarray) -> np.ndarray:
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)


def float16_bytes(*numbers: np.ndarray) -> np.ndarray:
    """Numbers [n, 1] as float16, concatenated to bytes [n, 2 * count]."""
    with np.errstate(over="ignore"):
        return np.hstack(numbers).astype(np.float16).view(np.uint8)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Pack four-bit codes [n, 32] into bytes: the first 16 in the low nibbles."""
    return codes[:, :16] | codes[:, 16:] << 4


def truncate_codes(x: np.ndarray, inverse: np.ndarray, add: float, max_code: int) -> np.ndarray:
    """trunc(x * inverse + add) as a fused multiply-add in float32 computes it, clipped to
    0..max_code.
    """
    quotient = x.astype(np.float64) * inverse.astype(np.float64) + add
    return np.clip(np.trunc(quotient.astype(np.float32)), 0, max_code).astype(np.uint8)


def quantize_symmetric(x: np.ndarray, middle: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale and codes such that the element of largest magnitude has the code 0."""
    scale = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1) / np.float32(-middle)
    return scale, truncate_codes(x, reciprocal(scale), middle + 0.5, 2 * middle - 1)


def quantize_asymmetric(x: np.ndarray, max_code: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scale, minimum and codes such that the smallest and the largest element have the first and
    the last code.
    """
    minimum = x.min(1, keepdims=True)
    maximum = x.max(1, keepdims=True)
    scale = (maximum - minimum) / np.float32(max_code)
    return scale, minimum, truncate_codes(x - minimum, reciprocal(scale), 0.5, max_code)


def pack_fifth_bits(codes: np.ndarray) -> np.ndarray:
    """Pack the fifth bits of 32 codes into four bytes."""
    return np.packbits(codes >> 4, axis=1, bitorder="little")


def q4_0(x: np.ndarray) -> np.ndarray:
    return q4_0_blocks(*quantize_symmetric(x, 8))


def q4_0_blocks(scale: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Join scales and codes to blocks of Q4_0."""
    return np.hstack([float16_bytes(scale), pack_nibbles(codes)])


def q4_1(x: np.ndarray) -> np.ndarray:
    scale, minimum, codes = quantize_asymmetric(x, 15)
    return np.hstack([float16_bytes(scale, minimum), pack_nibbles(codes)])


def q5_0(x: np.ndarray) -> np.ndarray:
    scale, codes = quantize_symmetric(x, 16)
    return np.hstack([float16_bytes(scale), pack_fifth_bits(codes), pack_nibbles(codes & 15)])


def q5_1(x: np.ndarray) -> np.ndarray:
    scale, minimum, codes = quantize_asymmetric(x, 31)
    return np.hstack(
        [float16_bytes(scale, minimum), pack_fifth_bits(codes), pack_nibbles(codes & 15)]
    )


def q8_0(x: np.ndarray) -> np.ndarray:
    """Ties round away from zero."""
    scale = np.abs(x).max(1, keepdims=True) / np.float32(127)
    quotient = x * reciprocal(scale)
    magnitude = np.abs(quotient)
    floor = np.floor(magnitude)
    codes = np.copysign(floor + (magnitude - floor >= 0.5), quotient)
    return q8_0_blocks(scale, codes.astype(np.int8).view(np.uint8))


def q8_0_blocks(scale: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Join scales and codes (signed bytes) to blocks of Q8_0."""
    return np.hstack([float16_bytes(scale), codes])


def mxfp4(x: np.ndarray) -> np.ndarray:
    """The largest element lies in the last octave of the codes; of two equally near codes the first
    is taken.
    """
    largest = np.abs(x).max(1, keepdims=True)
    exponent = np.where(
        largest > 0,
        np.floor(np.log2(largest, where=largest > 0, out=np.zeros_like(largest))) + 125,
        0,
    )
    exponent = np.clip(exponent, 0, 254).astype(np.uint8)
    # E2M1 holds doubled values.
    half_scale = np.ldexp(np.float32(1), exponent.astype(np.int32) - 128)
    codes = np.zeros(x.shape, np.uint8)
    best_error = np.abs(E2M1[0] * half_scale - x)
    for code in range(1, 16):
        error = np.abs(E2M1[code] * half_scale - x)
        codes = np.where(error < best_error, np.uint8(code), codes)
        best_error = np.minimum(error, best_error)
    return np.hstack([exponent, pack_nibbles(codes)])
