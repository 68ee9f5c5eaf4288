"""Resizes images, cuts them into patches of bytes, and tabulates the float of each byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .rule import ImageRule

if TYPE_CHECKING:
    from PIL import Image


def resize(image: Image.Image, rule: ImageRule) -> Image.Image:
    """Resize an RGB image as the rule says, with Pillow's filter."""
    size = rule.sizing.size(*image.size)
    return image.resize(size, resample=rule.resample)


def patches(image: Image.Image, rule: ImageRule) -> np.ndarray:
    """Resize an RGB image and cut it into patches, in the order in which groups become tokens.

    Args:
        image: an RGB image of any size.
        rule: how the model sees images.

    Returns:
        uint8 [num_patches, patch, patch, 3]: groups of `merge` x `merge` patches in row-major
        order, and the patches of a group in row-major order.
    """
    pixels_HWC = np.asarray(resize(image, rule))
    patch = rule.patch
    merge = rule.merge
    group_rows = pixels_HWC.shape[0] // (patch * merge)
    group_columns = pixels_HWC.shape[1] // (patch * merge)
    blocks = pixels_HWC.reshape(group_rows, merge, patch, group_columns, merge, patch, 3)
    grouped = blocks.transpose(0, 3, 1, 4, 2, 5, 6)
    return np.ascontiguousarray(grouped).reshape(-1, patch, patch, 3)


def value_table(rule: ImageRule) -> np.ndarray:
    """The model's input for each byte and channel.

    The arithmetic is that of transformers' Pillow processors, for equal bits: rescaling in float64,
    rounding to float32, then normalisation in float32.

    Returns:
        float32 [256, 3].
    """
    rescaled = (np.arange(256, dtype=np.float64) * rule.rescale).astype(np.float32)
    mean = np.array(rule.mean, dtype=np.float32)
    std = np.array(rule.std, dtype=np.float32)
    return (rescaled[:, None] - mean) / std
