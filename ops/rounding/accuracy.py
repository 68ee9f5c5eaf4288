"""Trials of the kernel for a width of rows: random ones of all sizes, and the result in float64."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..gpu.self_test import Case, InLayers
from ..quant import fp8, int8

LARGEST_ERROR = 1e-4  # allowed of the scales; of the codes a few may be on the other side of a half


@dataclass(frozen=True)
class RoundingCase:
    """Codes and the scales of their rows."""

    kind: dict
    rows: int = 300  # more than twice the card's processors
    interpret: Any = None
    allowed: float = LARGEST_ERROR
    name: str = "codes and scales"

    @property
    def weight(self) -> float:
        """Of a scale, which counts as much as all codes of its row."""
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
        given = x_RK, jnp.asarray(codes_RK, jnp.float32), jnp.asarray(size_R, jnp.float32)
        return (), given, np.concatenate((codes_RK, self.weight * (scale_R / size_R)[:, None]), 1)

    def run(self, held, given):
        """A code that is one off where the quotient is nearly half way is right too."""
        x_RK, right_RK, size_R = given
        kind = self.kind["codes"]
        codes_RK, scale_R = code_rows(x_RK, kind, self.interpret)
        codes_RK = codes_RK.astype(jnp.float32)
        most_R1 = jnp.max(jnp.abs(x_RK.astype(jnp.float32)), 1, keepdims=True)
        quotient_RK = x_RK.astype(jnp.float32) * jnp.where(most_R1 > 0, limit(kind) / most_R1, 0)
        both = [nearest(quotient_RK * jnp.float32(1 + d), kind) for d in (-1e-5, 1e-5)]
        near_RK = (both[0] != both[1]) & ((codes_RK == both[0]) | (codes_RK == both[1]))
        return jnp.concatenate(
            (jnp.where(near_RK, right_RK, codes_RK), self.weight * (scale_R / size_R)[:, None]), 1
        ), held


def cases(kind: dict) -> list[Case]:
    """What the process that tries runs."""
    return [RoundingCase(kind), InLayers(RoundingCase(kind))]


def code_rows(x_RK, codes: str, interpret: Any):
    from .hopper_kernel import code_rows

    return code_rows(x_RK, codes, interpret)


def limit(codes: str) -> int:
    return int8.LIMIT if codes == "int8" else fp8.LIMIT


def nearest(x_RK, codes: str):
    if codes == "int8":
        return jnp.round(x_RK)
    return jnp.clip(x_RK, -fp8.LIMIT, fp8.LIMIT).astype(jnp.float8_e4m3fn).astype(jnp.float32)


def in_float64(x_RK, codes: str) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales), on the host."""
    x_RK = np.asarray(x_RK, np.float64)
    most_R = np.abs(x_RK).max(1)
    inverse_R = np.divide(limit(codes), most_R, out=np.zeros_like(most_R), where=most_R > 0)
    exact_RK = x_RK * inverse_R[:, None]
    codes_RK = (
        np.rint(exact_RK) if codes == "int8" else exact_RK.astype(fp8.E4M3).astype(np.float64)
    )
    return codes_RK, most_R / limit(codes)
