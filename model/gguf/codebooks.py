"""Decodes the blocks of the IQ1, IQ2 and IQ3 types, whose groups of values are codebook rows: to
float32 [n, 256].
"""

import numpy as np

from .fields import float32_at, unpack_codes
from .grids import codebook, even_signs, signs


def apply_scales(scale: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Multiply the values [n, ...] of blocks of 256 elements by scales [n, scales], which
    neighbours share.
    """
    out = values.reshape(*scale.shape, 256 // scale.shape[1])
    out *= scale[..., None]
    return out.reshape(len(values), 256)


def iq2_xxs(blocks: np.ndarray) -> np.ndarray:
    """For each 32 elements: four bytes with a row each, then four times seven sign bits and a scale
    of four bits.
    """
    words = blocks[:, 2:].view(np.uint32).reshape(-1, 8, 2)
    rows = blocks[:, 2:].reshape(-1, 8, 8)[..., :4]
    minuses, scale = unpack_signs_and_scale(words[..., 1])
    return apply_scales(
        float32_at(blocks, 0) * scale * np.float32(0.25),
        codebook("IQ2_XXS")[rows] * even_signs()[minuses],
    )


def unpack_signs_and_scale(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpack the four sign indices [n, 8, 4] and the scale [n, 8] of each 32 elements from a
    uint32.
    """
    minuses = words[..., None] >> np.array((0, 7, 14, 21), np.uint32) & np.uint32(127)
    return minuses, (words >> np.uint32(28)).astype(np.float32) + np.float32(0.5)


def iq2_xs(blocks: np.ndarray) -> np.ndarray:
    """For each 8 elements: nine bits of row and seven of signs; then a scale of four bits for each
    16.
    """
    words = blocks[:, 2:66].view(np.uint16)
    scale = unpack_codes(blocks, 66, 74, 1, 4) + np.float32(0.5)
    values = codebook("IQ2_XS")[words & np.uint16(511)] * even_signs()[words >> np.uint16(9)]
    return apply_scales(float32_at(blocks, 0) * scale * np.float32(0.25), values)


def iq2_s(blocks: np.ndarray) -> np.ndarray:
    """Rows have ten bits, the high two in bytes of their own; signs are whole bytes."""
    rows = blocks[:, 2:34] | unpack_codes(blocks, 66, 74, 1, 2).astype(np.uint16) << np.uint16(8)
    scale = unpack_codes(blocks, 74, 82, 1, 4) + np.float32(0.5)
    values = codebook("IQ2_S")[rows] * signs()[blocks[:, 34:66]]
    return apply_scales(float32_at(blocks, 0) * scale * np.float32(0.25), values)


def iq3_xxs(blocks: np.ndarray) -> np.ndarray:
    """For each 4 elements a row; then signs and scales as in IQ2_XXS."""
    minuses, scale = unpack_signs_and_scale(blocks[:, 66:].view(np.uint32))
    values = codebook("IQ3_XXS")[blocks[:, 2:66]].reshape(-1, 8, 4, 8) * even_signs()[minuses]
    return apply_scales(float32_at(blocks, 0) * scale * np.float32(0.5), values)


def iq3_s(blocks: np.ndarray) -> np.ndarray:
    """Rows have nine bits, the highest in bytes of their own; signs are whole bytes."""
    rows = blocks[:, 2:66] | unpack_codes(blocks, 66, 74, 1, 1).astype(np.uint16) << np.uint16(8)
    scale = unpack_codes(blocks, 106, 110, 1, 4) * np.float32(2) + np.float32(1)
    values = codebook("IQ3_S")[rows].reshape(-1, 32, 8) * signs()[blocks[:, 74:106]]
    return apply_scales(float32_at(blocks, 0) * scale, values)


def iq1_s(blocks: np.ndarray) -> np.ndarray:
    """For each 32 elements two bytes: the high three bits of four rows, a scale of three bits, and
    the sign of delta.
    """
    words = blocks[:, 34:].view(np.uint16)
    high = words[..., None] >> np.array((0, 3, 6, 9), np.uint16) & np.uint16(7)
    rows = blocks[:, 2:34].reshape(-1, 8, 4) | high << np.uint16(8)
    scale = (words >> np.uint16(12) & np.uint16(7)) * np.float32(2) + np.float32(1)
    return apply_scales(
        float32_at(blocks, 0) * scale,
        codebook("IQ1")[rows] + delta(words >> np.uint16(15))[..., None, None],
    )


def delta(is_negative: np.ndarray) -> np.ndarray:
    """The offset that is added to a group's values: 1/8, or -1/8 where the bit is set."""
    return np.where(is_negative, np.float32(-0.125), np.float32(0.125))


def iq1_m(blocks: np.ndarray) -> np.ndarray:
    """For each 8 elements four bits: the high three of the row, and the sign of delta.

    Then four uint16 with four scales of three bits each; their top four bits together are the
    block's float16 scale.
    """
    high_bits = unpack_codes(blocks, 32, 48, 1, 4)
    rows = blocks[:, :32] | (high_bits & 7).astype(np.uint16) << np.uint16(8)
    words = blocks[:, 48:].view(np.uint16)
    scale_nibbles = words >> np.uint16(12) << np.array((0, 4, 8, 12), np.uint16)
    block_scale = (
        np.bitwise_or.reduce(scale_nibbles, axis=1, keepdims=True)
        .view(np.float16)
        .astype(np.float32)
    )
    scale = (words[..., None] >> np.array((0, 3, 6, 9), np.uint16) & np.uint16(7)) * np.float32(
        2
    ) + np.float32(1)
    return apply_scales(
        block_scale * scale.reshape(-1, 16),
        codebook("IQ1")[rows] + delta(high_bits >> 3)[..., None],
    )
