"""Heads as int4 pages hold them, in numpy, for comparison."""

import numpy as np


def matrix(width: int) -> np.ndarray:
    """By which keys are multiplied before they are rounded; its own inverse."""
    block = width & -width
    one = np.ones((1, 1))
    while len(one) < block:
        one = np.block([[one, one], [one, -one]])
    return np.kron(np.eye(width // block), one / np.sqrt(block))


def turned(x: np.ndarray) -> np.ndarray:
    """x times that matrix in float32, neighbours added first: to the last bit."""
    block = x.shape[-1] & -x.shape[-1]

    def halves(y):
        if y.shape[-1] == 1:
            return y
        even = y[..., 0::2]
        odd = y[..., 1::2]
        found = np.empty_like(y)
        found[..., 0::2], found[..., 1::2] = halves(even + odd), halves(even - odd)
        return found

    y = halves(x.astype(np.float32).reshape(*x.shape[:-1], x.shape[-1] // block, block))
    return (y * np.float32(block**-0.5)).reshape(x.shape)


def coded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, scales): a head's number that is farthest from 0 becomes -8.

    Rows that are no numbers become anything.
    """
    x = x.astype(np.float32)
    # of equals with both signs the negative one
    far = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)
    far = np.where((x == -np.abs(far)).any(-1, keepdims=True), -np.abs(far), far)
    inverse = np.divide(np.float32(-8), far, out=np.zeros_like(far), where=np.abs(far) > 2.0**-100)
    codes = np.clip(np.nan_to_num(np.round(x * inverse)), -8, 7).astype(np.int64) + 8
    scale = np.where(np.abs(far) > 2.0**-100, far / np.float32(-8), np.float32(0))[..., 0]
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8), scale


def numbers(held: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """What such bytes and scales stand for."""
    codes = (
        np.stack([held % 16, held // 16], -1).reshape(*held.shape[:-1], -1).astype(np.float64) - 8
    )
    return codes * scale.astype(np.float64)[..., None]
