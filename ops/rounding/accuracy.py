"""Self-test cases of the rounding kernel: rows of different magnitudes, against float64."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..gpu.self_test import Case, InLayers
from ..quant import fp8, int8

LARGEST_ERROR = 1e-4  # relative to float64, for the scales


@dataclass(frozen=True)
class RoundingCase:
    """Compares the quantised values and the scales."""

    kind: dict
    rows: int = 300  # more than twice the number of multiprocessors
    interpret: Any = None
    allowed: float = LARGEST_ERROR
    name: str = "codes and scales"

    @property
    def weight(self) -> float:
        """The weight of a scale in the result: it counts as much as all values of its row."""
        return limit(self.kind["codes"]) * self.kind["width"] ** 0.5

    def build(self, seed: int):
        rng = np.random.default_rng(seed)
        x_RK = rng.standard_normal((self.rows, self.kind["width"])) * rng.choice(
            [0.01, 1, 50], (self.rows, 1)
        )
        x_RK[1] = 0
        x_RK = jnp.asarray(x_RK, jnp.bfloat16)
        codes_RK, scale_R = in_float64(x_RK, self.kind["codes"])
        size_R = np.where(scale_R > 0, scale_R, 1)
        inputs = x_RK, jnp.asarray(codes_RK, jnp.float32), jnp.asarray(size_R, jnp.float32)
        return (), inputs, np.concatenate((codes_RK, self.weight * (scale_R / size_R)[:, None]), 1)

    def run(self, donated, inputs):
        """The results. Where a quotient is nearly a tie, both neighbours are accepted."""
        x_RK, expected_RK, size_R = inputs
        kind = self.kind["codes"]
        codes_RK, scale_R = code_rows(x_RK, kind, self.interpret)
        codes_RK = codes_RK.astype(jnp.float32)
        max_abs_R1 = jnp.max(jnp.abs(x_RK.astype(jnp.float32)), 1, keepdims=True)
        quotient_RK = x_RK.astype(jnp.float32) * jnp.where(
            max_abs_R1 > 0, limit(kind) / max_abs_R1, 0
        )
        nearest_codes = [
            round_to_code(quotient_RK * jnp.float32(1 + d), kind) for d in (-1e-5, 1e-5)
        ]
        is_near_tie_RK = (nearest_codes[0] != nearest_codes[1]) & (
            (codes_RK == nearest_codes[0]) | (codes_RK == nearest_codes[1])
        )
        return jnp.concatenate(
            (
                jnp.where(is_near_tie_RK, expected_RK, codes_RK),
                self.weight * (scale_R / size_R)[:, None],
            ),
            1,
        ), donated


def cases(kind: dict) -> list[Case]:
    """The cases of the self-test."""
    return [RoundingCase(kind), InLayers(RoundingCase(kind))]


def code_rows(x_RK, codes: str, interpret: Any):
    from .hopper_kernel import code_rows

    return code_rows(x_RK, codes, interpret)


def limit(codes: str) -> int:
    return int8.LIMIT if codes == "int8" else fp8.LIMIT


def round_to_code(x_RK, codes: str):
    if codes == "int8":
        return jnp.round(x_RK)
    return jnp.clip(x_RK, -fp8.LIMIT, fp8.LIMIT).astype(jnp.float8_e4m3fn).astype(jnp.float32)


def in_float64(x_RK, codes: str) -> tuple[np.ndarray, np.ndarray]:
    """(quantised values, scales), computed on the host."""
    x_RK = np.asarray(x_RK, np.float64)
    max_abs_R = np.abs(x_RK).max(1)
    inverse_R = np.divide(
        limit(codes), max_abs_R, out=np.zeros_like(max_abs_R), where=max_abs_R > 0
    )
    scaled_RK = x_RK * inverse_R[:, None]
    codes_RK = (
        np.rint(scaled_RK) if codes == "int8" else scaled_RK.astype(fp8.E4M3).astype(np.float64)
    )
    return codes_RK, max_abs_R / limit(codes)
