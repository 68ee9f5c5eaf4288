"""A numpy reference of the int4 form of heads in KV pages."""

import numpy as np


def hadamard_matrix(width: int) -> np.ndarray:
    """The block-diagonal Hadamard matrix that rotates keys before rounding; its own inverse."""
    block = width & -width
    hadamard = np.ones((1, 1))
    while len(hadamard) < block:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    return np.kron(np.eye(width // block), hadamard / np.sqrt(block))


def hadamard_rotate(x: np.ndarray) -> np.ndarray:
    """x @ matrix in float32, bitwise as the kernels add: neighbours first."""
    block = x.shape[-1] & -x.shape[-1]

    def hadamard_transform(y):
        if y.shape[-1] == 1:
            return y
        even = y[..., 0::2]
        odd = y[..., 1::2]
        transformed = np.empty_like(y)
        transformed[..., 0::2], transformed[..., 1::2] = (
            hadamard_transform(even + odd),
            hadamard_transform(even - odd),
        )
        return transformed

    y = hadamard_transform(x.astype(np.float32).reshape(*x.shape[:-1], x.shape[-1] // block, block))
    return (y * np.float32(block**-0.5)).reshape(x.shape)


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(packed bytes, scales): the element of a head that is farthest from 0 becomes -8.

    The result for rows with NaN is undefined.
    """
    x = x.astype(np.float32)
    # of equal magnitudes with both signs the negative one
    extremes = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)
    extremes = np.where(
        (x == -np.abs(extremes)).any(-1, keepdims=True), -np.abs(extremes), extremes
    )
    inverse = np.divide(
        np.float32(-8), extremes, out=np.zeros_like(extremes), where=np.abs(extremes) > 2.0**-100
    )
    codes = np.clip(np.nan_to_num(np.round(x * inverse)), -8, 7).astype(np.int64) + 8
    scale = np.where(np.abs(extremes) > 2.0**-100, extremes / np.float32(-8), np.float32(0))[..., 0]
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8), scale


def dequantize(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Dequantise packed bytes and scales."""
    codes = (
        np.stack([packed % 16, packed // 16], -1).reshape(*packed.shape[:-1], -1).astype(np.float64)
        - 8
    )
    return codes * scale.astype(np.float64)[..., None]
