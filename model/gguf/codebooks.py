"""Blocks of the types whose values stand in codebooks, a group of them at a time: to float32 [n, 256]."""

import numpy as np

from .fields import codes_of, half
from .grids import codebook, even_signs, signs


def scaled(scale: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values [n, ...], 256 a block, each times its scale [n, scales]; neighbours share one."""
    out = values.reshape(*scale.shape, 256 // scale.shape[1])
    out *= scale[..., None]
    return out.reshape(len(values), 256)


def iq2_xxs(blocks: np.ndarray) -> np.ndarray:
    """For each 32 elements four bytes, a row each; then four times seven bits of signs and four of scale."""
    words = blocks[:, 2:].view(np.uint32).reshape(-1, 8, 2)
    rows = blocks[:, 2:].reshape(-1, 8, 8)[..., :4]
    minuses, scale = last_words(words[..., 1])
    return scaled(half(blocks, 0) * scale * np.float32(0.25), codebook("IQ2_XXS")[rows] * even_signs()[minuses])


def last_words(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The four signs [n, 8, 4] and the scale [n, 8] of 32 elements, by what their four bytes say."""
    minuses = words[..., None] >> np.array((0, 7, 14, 21), np.uint32) & np.uint32(127)
    return minuses, (words >> np.uint32(28)).astype(np.float32) + np.float32(0.5)


def iq2_xs(blocks: np.ndarray) -> np.ndarray:
    """For each 8 elements nine bits of row and seven of signs; then four bits of scale for each 16."""
    words = blocks[:, 2:66].view(np.uint16)
    scale = codes_of(blocks, 66, 74, 1, 4) + np.float32(0.5)
    values = codebook("IQ2_XS")[words & np.uint16(511)] * even_signs()[words >> np.uint16(9)]
    return scaled(half(blocks, 0) * scale * np.float32(0.25), values)


def iq2_s(blocks: np.ndarray) -> np.ndarray:
    """Rows have ten bits, of which the high two stand in bytes of their own; signs are whole bytes."""
    rows = blocks[:, 2:34] | codes_of(blocks, 66, 74, 1, 2).astype(np.uint16) << np.uint16(8)
    scale = codes_of(blocks, 74, 82, 1, 4) + np.float32(0.5)
    values = codebook("IQ2_S")[rows] * signs()[blocks[:, 34:66]]
    return scaled(half(blocks, 0) * scale * np.float32(0.25), values)


def iq3_xxs(blocks: np.ndarray) -> np.ndarray:
    """For each 4 elements a row; then signs and scales as in IQ2_XXS."""
    minuses, scale = last_words(blocks[:, 66:].view(np.uint32))
    values = codebook("IQ3_XXS")[blocks[:, 2:66]].reshape(-1, 8, 4, 8) * even_signs()[minuses]
    return scaled(half(blocks, 0) * scale * np.float32(0.5), values)


def iq3_s(blocks: np.ndarray) -> np.ndarray:
    """Rows have nine bits, of which the highest stand in bytes of their own; signs are whole bytes."""
    rows = blocks[:, 2:66] | codes_of(blocks, 66, 74, 1, 1).astype(np.uint16) << np.uint16(8)
    scale = codes_of(blocks, 106, 110, 1, 4) * np.float32(2) + np.float32(1)
    values = codebook("IQ3_S")[rows].reshape(-1, 32, 8) * signs()[blocks[:, 74:106]]
    return scaled(half(blocks, 0) * scale, values)


def iq1_s(blocks: np.ndarray) -> np.ndarray:
    """For each 32 elements two bytes: the high three bits of four rows, three of scale, and which way to shift."""
    words = blocks[:, 34:].view(np.uint16)
    high = words[..., None] >> np.array((0, 3, 6, 9), np.uint16) & np.uint16(7)
    rows = blocks[:, 2:34].reshape(-1, 8, 4) | high << np.uint16(8)
    scale = (words >> np.uint16(12) & np.uint16(7)) * np.float32(2) + np.float32(1)
    return scaled(half(blocks, 0) * scale, codebook("IQ1")[rows] + shift(words >> np.uint16(15))[..., None, None])


def shift(down: np.ndarray) -> np.ndarray:
    """What is added to a group's values: an eighth, or minus an eighth."""
    return np.where(down, np.float32(-0.125), np.float32(0.125))


def iq1_m(blocks: np.ndarray) -> np.ndarray:
    """For each 8 elements four bits: the high three of its row, and which way to shift.

    Then four times two bytes: four scales of three bits each, and above them four bits of the block's float16.
    """
    more = codes_of(blocks, 32, 48, 1, 4)
    rows = blocks[:, :32] | (more & 7).astype(np.uint16) << np.uint16(8)
    words = blocks[:, 48:].view(np.uint16)
    parts = words >> np.uint16(12) << np.array((0, 4, 8, 12), np.uint16)
    whole = np.bitwise_or.reduce(parts, axis=1, keepdims=True).view(np.float16).astype(np.float32)
    scale = (words[..., None] >> np.array((0, 3, 6, 9), np.uint16) & np.uint16(7)) * np.float32(2) + np.float32(1)
    return scaled(whole * scale.reshape(-1, 16), codebook("IQ1")[rows] + shift(more >> 3)[..., None])
