"""Self-test cases of the residual kernel: random rows, against float64."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..gpu.self_test import Case, InLayers
from ..linear.weight import RoundedRows, plain
from ..norm import LayerNorm, scale_and_bias
from ..quant.fp8 import round_to_float8
from ..quant.int8 import round_to_int8
from . import Residual

LARGEST_ERROR = {"bfloat16": 6e-3, "float32": 1e-5}  # relative to float64
EPS = 1e-5


@dataclass(frozen=True)
class ResidualCase:
    """Compares the sums and their norms, for rows of different magnitudes."""

    kind: dict
    rows: int = 300  # more than twice the number of multiprocessors
    interpret: Any = None
    name: str = "sums and norms"

    @property
    def allowed(self) -> float:
        return LARGEST_ERROR[self.kind["dtype"]]

    def build(self, seed: int):
        rng = np.random.default_rng(seed)
        D = self.kind["width"]

        def random_rows():
            sizes = rng.choice([0.01, 1, 50], (self.rows, 1))
            return jnp.asarray(rng.standard_normal((self.rows, D)) * sizes, self.kind["dtype"])

        y_TD = random_rows() if self.kind["adds"] else None
        y_norm = random_norm(self.kind["added_norm"], D, rng)
        inputs = Residual(random_rows(), y_TD, y_norm), random_norm(self.kind["norm"], D, rng)
        sum_TD, normed_TD = in_float64(*inputs, EPS)
        size_T1 = np.sqrt(np.mean(sum_TD**2, 1, keepdims=True))
        expected = [sum_TD / size_T1, normed_TD, *[normed_TD] * (self.kind["rounds"] is not None)]
        return (), (*inputs, jnp.asarray(size_T1, jnp.float32)), np.concatenate(expected)

    def run(self, donated, inputs):
        """Sums, norms and, if the kernel rounds, norms plus the rounding's difference from XLA's.

        Sums are scaled to the same magnitude, so that large rows do not hide errors in small ones.
        """
        residual, norm, size_T1 = inputs
        sum_TD, normed = sum_and_norm(residual, norm, EPS, self.kind["rounds"], self.interpret)
        normed_f32_TD = plain(normed).astype(jnp.float32)
        results = [sum_TD / size_T1, normed_f32_TD]
        if isinstance(normed, RoundedRows):
            codes_TD, scale_T = round_rows(normed.rows, normed.kind)
            dequantised_TD = codes_TD.astype(jnp.float32) * scale_T[:, None]
            results.append(
                normed_f32_TD
                + normed.codes.astype(jnp.float32) * normed.scale[:, None]
                - dequantised_TD
            )
        return jnp.concatenate(results), donated


def cases(kind: dict) -> list[Case]:
    """The cases of the self-test."""
    return [ResidualCase(kind), InLayers(ResidualCase(kind))]


def sum_and_norm(rows: Residual, scale_D, eps: float, rounds: str | None, interpret: Any):
    from .hopper_kernel import sum_and_norm

    return sum_and_norm(rows, scale_D, eps, rounds, interpret)


def round_rows(x_TD, kind: str):
    """(quantised values, scale of each row), by XLA."""
    codes_TD, scale_T1 = (round_to_int8 if kind == "int8" else round_to_float8)(x_TD)
    return codes_TD, scale_T1[:, 0]


def in_float64(rows: Residual, scale_D, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """(the sum, its norm), computed on the host."""
    sum_TD = np.asarray(rows.x_TD, np.float64)
    if rows.y_TD is not None:
        sum_TD = sum_TD + normalise(np.asarray(rows.y_TD, np.float64), rows.scale_D, eps)
    return sum_TD, normalise(sum_TD, scale_D, eps)


def normalise(x_TD: np.ndarray, norm, eps: float) -> np.ndarray:
    """The norm of rows; the rows themselves if `norm` is None."""
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
    """Random weights of a norm with this `norm_kind`."""
    if name is None:
        return None
    scale_D = jnp.asarray(1 + 0.3 * rng.standard_normal(D), jnp.float32)
    if name == "scale":
        return scale_D
    return LayerNorm(
        scale_D,
        None if name == "centred" else jnp.asarray(0.3 * rng.standard_normal(D), jnp.float32),
    )
