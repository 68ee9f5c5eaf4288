"""The whole numbers that a format has for weights: value = (code - zero) * scale."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...ops import quant
from ...ops.quant.grouped import Grouped
from ...ops.quant.int4 import Int4
from ...ops.quant.int8 import Int8
from ..config import ModelError


class Coded(NamedTuple):
    """A matrix [O, I] in codes; a group of inputs shares a scale and a zero: [O, groups]."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray


@dataclass(frozen=True)
class Grid:
    """Codes of so many bits. Without a group all inputs of an output share a scale."""

    bits: int
    group: int | None
    own_zeros: bool = False  # each group has its zero; else it is the middle code
    scale_dtype: Any = np.float16

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def limits(self) -> tuple[int, int]:
        """The least and the largest code. Bytes are as far below zero as above it: rows of bytes meet them."""
        return int(self.bits == 8 and not self.own_zeros), (1 << self.bits) - 1

    def fit(self, W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(scales, zeros) of the groups in W [O, I], such that the extremes of each lie at the ends of the codes."""
        size = self.group or W.shape[1]
        grouped = np.pad(W.astype(np.float32), ((0, 0), (0, -W.shape[1] % size))).reshape(len(W), -1, size)
        if self.own_zeros:
            low, high = np.minimum(grouped.min(2), 0), np.maximum(grouped.max(2), 0)
            scales = ((high - low) / self.limits[1]).astype(self.scale_dtype)
            return scales, np.clip(np.rint(-low * inverted(scales)), *self.limits)
        if self.bits == 8:
            top = np.abs(grouped).max(2) / (self.middle - 1)
        else:  # the sign of the largest decides which end it lies at: all codes are in use
            top = np.take_along_axis(grouped, np.abs(grouped).argmax(2)[..., None], 2)[..., 0] / -self.middle
        return top.astype(self.scale_dtype), np.full(top.shape, self.middle, np.float32)

    def codes(self, values: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
        """The nearest codes; scales and zeros are those of each value."""
        return np.clip(np.rint(values * inverted(scales)) + zeros, *self.limits)

    def spread(self, shared: np.ndarray, count: int) -> np.ndarray:
        """What groups share, for each of `count` inputs."""
        return shared.repeat(self.group or count, axis=1)[:, :count].astype(np.float32)

    def nearest(self, W: np.ndarray) -> np.ndarray:
        """W rounded to nearest, in float32."""
        scales, zeros = (self.spread(shared, W.shape[1]) for shared in self.fit(W))
        return (self.codes(W.astype(np.float32), scales, zeros) - zeros) * scales

    def decode(self, coded: Coded) -> np.ndarray:
        """What codes stand for, in float32."""
        scales, zeros = (self.spread(shared, coded.codes.shape[1]) for shared in (coded.scales, coded.zeros))
        return (coded.codes.astype(np.float32) - zeros) * scales


def inverted(scales: np.ndarray) -> np.ndarray:
    wide = scales.astype(np.float32)
    return np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)


def grid_of(name: str) -> Grid:
    """The codes of a format."""
    node = quant.example(name)
    if isinstance(node, Int4):
        return Grid(node.bits, node.group, node.zero is not None)
    if isinstance(node, Int8):
        return Grid(8, None, scale_dtype=np.float32)
    if isinstance(node, Grouped) and node.code == "int8" and node.least is None:
        return Grid(8, node.group)
    whole = [known for known, scheme in quant.stored_schemes().items() if scheme.weights["type"] == "int"]
    raise ModelError(
        f"quantization is {name!r}, whose codes are no whole numbers; this method rounds to {', '.join(whole)}"
    )
