"""Trials of the kernel for a kind of rows: random ones, and the result in float64."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..gpu.self_test import Case, InLayers
from ..linear.weight import RoundedRows, plain
from ..norm import LayerNorm, scale_and_bias
from ..quant.fp8 import as_floats
from ..quant.int8 import as_bytes
from . import Residual

LARGEST_ERROR = {"bfloat16": 6e-3, "float32": 1e-5}  # allowed against float64
EPS = 1e-5


@dataclass(frozen=True)
class ResidualCase:
    """Rows of all sizes, their sums and the norms of these."""

    kind: dict
    rows: int = 300  # more than twice the card's processors
    interpret: Any = None
    name: str = "sums and norms"

    @property
    def allowed(self) -> float:
        return LARGEST_ERROR[self.kind["dtype"]]

    def build(self, seed: int):
        rng = np.random.default_rng(seed)
        D = self.kind["width"]

        def rows():
            sizes = rng.choice([0.01, 1, 50], (self.rows, 1))
            return jnp.asarray(rng.standard_normal((self.rows, D)) * sizes, self.kind["dtype"])

        y_TD = rows() if self.kind["adds"] else None
        y_norm = random_norm(self.kind["added_norm"], D, rng)
        given = Residual(rows(), y_TD, y_norm), random_norm(self.kind["norm"], D, rng)
        sum_TD, normed_TD = in_float64(*given, EPS)
        size_T1 = np.sqrt(np.mean(sum_TD**2, 1, keepdims=True))
        wanted = [sum_TD / size_T1, normed_TD, *[normed_TD] * (self.kind["rounds"] is not None)]
        return (), (*given, jnp.asarray(size_T1, jnp.float32)), np.concatenate(wanted)

    def run(self, held, given):
        """Rows of the same size, so that no large one hides what is wrong in a small one.

        What codes stand for counts by how far it is from what XLA rounds the same norm to.
        """
        *given, size_T1 = given
        sum_TD, normed = sum_and_norm(*given, EPS, self.kind["rounds"], self.interpret)
        wide_TD = plain(normed).astype(jnp.float32)
        found = [sum_TD / size_T1, wide_TD]
        if isinstance(normed, RoundedRows):
            codes_TD, scale_T = round_rows(normed.rows, normed.kind)
            right_TD = codes_TD.astype(jnp.float32) * scale_T[:, None]
            found.append(
                wide_TD + normed.codes.astype(jnp.float32) * normed.scale[:, None] - right_TD
            )
        return jnp.concatenate(found), held


def cases(kind: dict) -> list[Case]:
    """What the process that tries runs."""
    return [ResidualCase(kind), InLayers(ResidualCase(kind))]


def sum_and_norm(rows: Residual, scale_D, eps: float, rounds: str | None, interpret: Any):
    from .hopper_kernel import sum_and_norm

    return sum_and_norm(rows, scale_D, eps, rounds, interpret)


def round_rows(x_TD, kind: str):
    """(codes, scale of each row) by XLA."""
    codes_TD, scale_T1 = (as_bytes if kind == "int8" else as_floats)(x_TD)
    return codes_TD, scale_T1[:, 0]


def in_float64(rows: Residual, scale_D, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """(the sum, its norm), on the host."""
    sum_TD = np.asarray(rows.x_TD, np.float64)
    if rows.y_TD is not None:
        sum_TD = sum_TD + normal(np.asarray(rows.y_TD, np.float64), rows.scale_D, eps)
    return sum_TD, normal(sum_TD, scale_D, eps)


def normal(x_TD: np.ndarray, norm, eps: float) -> np.ndarray:
    """The norm of rows; they themselves where there is none."""
    if norm is None:
        return x_TD
    if isinstance(norm, LayerNorm):
        x_TD = x_TD - np.mean(x_TD, -1, keepdims=True)
    scale_D, bias_D = scale_and_bias(norm)
    x_TD = (
        x_TD / np.sqrt(np.mean(x_TD**2, -1, keepdims=True) + eps) * np.asarray(scale_D, np.float64)
    )
    return x_TD if bias_D is None else x_TD + np.asarray(bias_D, np.float64)


def random_norm(name: str | None, D: int, rng):
    """A norm by its name in a kind."""
    if name is None:
        return None
    scale_D = jnp.asarray(1 + 0.3 * rng.standard_normal(D), jnp.float32)
    if name == "scale":
        return scale_D
    return LayerNorm(
        scale_D,
        None if name == "centred" else jnp.asarray(0.3 * rng.standard_normal(D), jnp.float32),
    )
