"""The specs that every block is made of: matrices in the model's format, and norms."""

import math
from typing import Any

import jax.numpy as jnp

from ..ops.quant import packed
from ..sharding.spec import ArraySpec, Runs
from .config import ModelConfig


def norm(size: int, axis: str | Runs | None = None) -> ArraySpec:
    """A norm's scale: always float32, since it is small and rounding it would cost accuracy."""
    return ArraySpec((size,), jnp.float32, (axis,), "ones")


def matrix(config: ModelConfig, into: tuple[int, ...], out: tuple[int, ...], axes: tuple[str | None, ...]) -> Any:
    """A weight [*into, *out] whose products sum over `into`, in the model's format."""
    inputs = tuple(range(len(into)))
    dense = ArraySpec(into + out, jnp.dtype(config.dtype), axes, fan_in=math.prod(into), inputs=inputs)
    return packed(config.quant, dense)
