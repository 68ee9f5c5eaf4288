"""Specs of matrices in the model's weight format, and of norms."""

import math
from typing import Any

import jax.numpy as jnp

from ..ops.quant import packed
from ..sharding.spec import ArraySpec, Interleaved
from .config import ModelConfig


def norm(size: int, axis: str | Interleaved | None = None) -> ArraySpec:
    """A norm's scale: always float32, since it is small and rounding would cost accuracy."""
    return ArraySpec((size,), jnp.float32, (axis,), "ones")


def matrix(
    config: ModelConfig,
    into: tuple[int, ...],
    out: tuple[int, ...],
    axes: tuple[str | Interleaved | None, ...],
) -> Any:
    """A weight [*into, *out] in the model's format; products sum over `into`."""
    inputs = tuple(range(len(into)))
    dense = ArraySpec(
        into + out, jnp.dtype(config.dtype), axes, fan_in=math.prod(into), inputs=inputs
    )
    return packed(config.quant, dense)
