"""Integer grids of weight formats: value = (code - zero) * scale."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...ops import quant
from ...ops.quant.grouped import Grouped
from ...ops.quant.int4 import Int4
from ...ops.quant.int8 import Int8
from ..config import ModelError

SHRINKS = tuple(1 - step / 20 for step in range(9))  # scale factors that `Grid.best_fit` tries
CHUNK = 1 << 14  # groups that are fitted together


class CodedMatrix(NamedTuple):
    """A quantised matrix [O, I]; each group of inputs has a scale and a zero: [O, groups]."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray


@dataclass(frozen=True)
class Grid:
    """Integer codes. Without a group all inputs of an output share a scale."""

    bits: int
    group: int | None
    has_zeros: bool = False  # each group has a zero point; otherwise it is the middle code
    scale_dtype: Any = np.float16

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def limits(self) -> tuple[int, int]:
        """(smallest, largest) code. 8-bit codes are symmetric, as int8 products need."""
        return int(self.bits == 8 and not self.has_zeros), (1 << self.bits) - 1

    def fit(self, W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(scales, zeros) that map the extremes of each group in W [O, I] to the end codes."""
        size = self.group or W.shape[1]
        grouped = np.pad(W.astype(np.float32), ((0, 0), (0, -W.shape[1] % size))).reshape(
            len(W), -1, size
        )
        if self.has_zeros:
            low = np.minimum(grouped.min(2), 0)
            high = np.maximum(grouped.max(2), 0)
            scales = ((high - low) / self.limits[1]).astype(self.scale_dtype)
            return scales, np.clip(np.rint(-low * reciprocals(scales)), *self.limits)
        if self.bits == 8:
            top = np.abs(grouped).max(2) / (self.middle - 1)
        else:  # the value with the largest magnitude gets the code without a counterpart
            top = (
                np.take_along_axis(grouped, np.abs(grouped).argmax(2)[..., None], 2)[..., 0]
                / -self.middle
            )
        return top.astype(self.scale_dtype), np.full(top.shape, self.middle, np.float32)

    def best_fit(self, W: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`fit` with scales shrunk by the factor in SHRINKS with the least weighted squared error.

        Shrinking clips a group's largest values and gives its other values finer steps.

        Args:
            W: [O, I].
            weight: [I], the cost of an error in each input.
        """
        if self.bits == 8:  # fine enough without a search
            return self.fit(W)
        O, I = W.shape  # noqa: E741 - dimensions: outputs, inputs
        size = self.group or W.shape[1]
        padding = -I % size
        grouped_NS = np.pad(W.astype(np.float32), ((0, 0), (0, padding))).reshape(-1, size)
        weight_GS = np.pad(weight.astype(np.float32), (0, padding)).reshape(-1, size)
        weight_GS = weight_GS / np.maximum(
            weight_GS.max(1, keepdims=True), np.finfo(np.float32).tiny
        )
        group_N = np.arange(len(grouped_NS)) % len(weight_GS)
        chunk = min(CHUNK, 1 << (len(grouped_NS) - 1).bit_length())  # limits compiled shapes
        fitted = []
        for start in range(0, len(grouped_NS), chunk):
            chunk_range = np.s_[start : start + chunk]
            missing = ((0, chunk - len(group_N[chunk_range])), (0, 0))
            values_SN = np.pad(grouped_NS[chunk_range], missing).T
            weight_SN = np.pad(weight_GS[group_N[chunk_range]], missing).T
            fitted.append(least_error(values_SN, weight_SN, self))
        scales, zeros = (
            np.concatenate(arrays)[: len(grouped_NS)].reshape(O, -1)
            for arrays in zip(*fitted, strict=True)
        )
        return scales.astype(self.scale_dtype), zeros

    def codes(self, values: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
        """The nearest codes, given each value's scale and zero."""
        return np.clip(np.rint(values * reciprocals(scales)) + zeros, *self.limits)

    def spread(self, shared: np.ndarray, count: int) -> np.ndarray:
        """Repeat values by group for each of `count` inputs."""
        return shared.repeat(self.group or count, axis=1)[:, :count].astype(np.float32)

    def nearest(self, W: np.ndarray) -> np.ndarray:
        """W rounded to nearest, in float32."""
        scales, zeros = (self.spread(shared, W.shape[1]) for shared in self.fit(W))
        return (self.codes(W.astype(np.float32), scales, zeros) - zeros) * scales

    def decode(self, coded: CodedMatrix) -> np.ndarray:
        """Dequantise to float32."""
        scales, zeros = (
            self.spread(shared, coded.codes.shape[1]) for shared in (coded.scales, coded.zeros)
        )
        return (coded.codes.astype(np.float32) - zeros) * scales


@partial(jax.jit, static_argnames="grid")
def least_error(values_SN, weight_SN, grid: Grid):
    """The best (scale, zero) [N] for each group [S], see `Grid.best_fit`."""
    low_N = jnp.minimum(values_SN.min(0), 0)
    high_N = jnp.maximum(values_SN.max(0), 0)
    top_N = jnp.where(high_N > -low_N, high_N, low_N)
    full_scale_N = (high_N - low_N) / grid.limits[1] if grid.has_zeros else top_N / -grid.middle

    def candidate(shrink):
        scale_N = (full_scale_N * shrink).astype(grid.scale_dtype).astype(jnp.float32)
        inverse_N = jnp.where(scale_N == 0, 0, 1 / jnp.where(scale_N == 0, 1, scale_N))
        zero_N = jnp.full_like(low_N, grid.middle)
        if grid.has_zeros:
            zero_N = jnp.clip(jnp.rint(-low_N * shrink * inverse_N), *grid.limits)
        code_SN = jnp.clip(jnp.rint(values_SN * inverse_N) + zero_N, *grid.limits)
        error_N = (jnp.square((code_SN - zero_N) * scale_N - values_SN) * weight_SN).sum(0)
        return error_N, scale_N, zero_N

    def better(best, shrink):
        result = candidate(shrink)
        return jax.tree.map(partial(jnp.where, result[0] < best[0]), result, best), None

    # Without zero points the largest value may get either end code.
    signs = (1,) if grid.has_zeros else (1, -1)
    shrinks = jnp.array([sign * shrink for shrink in SHRINKS for sign in signs], jnp.float32)
    (_, scale_N, zero_N), _ = jax.lax.scan(better, candidate(shrinks[0]), shrinks[1:])
    return scale_N, zero_N


def nearest_columns(values_SN, grid: Grid):
    """`Grid.nearest` in JAX, for groups [S] with a scale each."""
    low_N = jnp.minimum(values_SN.min(0), 0)
    zero_N = grid.middle
    if grid.has_zeros:
        scale_N = (jnp.maximum(values_SN.max(0), 0) - low_N) / grid.limits[1]
    elif grid.bits == 8:
        scale_N = jnp.abs(values_SN).max(0) / (grid.middle - 1)
    else:
        largest_1N = jnp.abs(values_SN).argmax(0)[None]
        scale_N = jnp.take_along_axis(values_SN, largest_1N, 0)[0] / -grid.middle
    scale_N = scale_N.astype(grid.scale_dtype).astype(jnp.float32)
    inverse_N = jnp.where(scale_N == 0, 0, 1 / jnp.where(scale_N == 0, 1, scale_N))
    if grid.has_zeros:
        zero_N = jnp.clip(jnp.rint(-low_N * inverse_N), *grid.limits)
    return (jnp.clip(jnp.rint(values_SN * inverse_N) + zero_N, *grid.limits) - zero_N) * scale_N


def reciprocals(scales: np.ndarray) -> np.ndarray:
    divisor = scales.astype(np.float32)
    return np.divide(1, divisor, out=np.zeros_like(divisor), where=divisor != 0)


def grid_for_format(name: str) -> Grid:
    """The integer grid of a format."""
    node = quant.example(name)
    if isinstance(node, Int4):
        return Grid(node.bits, node.group, node.zero is not None)
    if isinstance(node, Int8):
        return Grid(8, None, scale_dtype=np.float32)
    if isinstance(node, Grouped) and node.code == "int8" and node.least is None:
        return Grid(8, node.group)
    integer_formats = [
        format_name
        for format_name, scheme in quant.stored_schemes().items()
        if scheme.weights["type"] == "int"
    ]
    raise ModelError(
        f"quantization is {name!r}, whose codes are no integers; this method rounds to "
        f"{', '.join(integer_formats)}"
    )
