"""The inputs that matrices meet: weights that tell of them, and what is kept of all rows together."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...ops.linear.weight import Weight
from ...ops.linear.xla import Dense
from ...sharding import struct


@dataclass(frozen=True)
class Inputs:
    """What is kept of the rows x that a matrix has met."""

    H: np.ndarray  # [I, I]: the sum of x x^T
    total: np.ndarray  # [I]: the sum of |x|
    top: np.ndarray  # [I]: the largest |x|

    def __add__(self, other: "Inputs") -> "Inputs":
        return Inputs(self.H + other.H, self.total + other.total, np.maximum(self.top, other.top))

    def divided(self, s: np.ndarray) -> "Inputs":
        """Of the rows x / s."""
        return Inputs(self.H / np.outer(s, s), self.total / s, self.top / s)


def none_yet(size: int) -> Inputs:
    return Inputs(np.zeros((size, size), np.float32), np.zeros(size, np.float32), np.zeros(size, np.float32))


def measured(some: Sequence[Any]) -> Inputs:
    """Of arrays of rows [R, I] together."""
    x_RI = jnp.concatenate(some)
    missing = (1 << (len(x_RI) - 1).bit_length()) - len(x_RI)  # rows of zeros add nothing, and few sizes are compiled
    return Inputs(*(np.asarray(value) for value in sums(jnp.pad(x_RI, ((0, missing), (0, 0))))))


@jax.jit
def sums(x_RI):
    x_RI = x_RI.astype(jnp.float32)
    H = jnp.einsum("RI,RJ->IJ", x_RI, x_RI, precision="highest")
    return H, jnp.abs(x_RI).sum(0), jnp.abs(x_RI).max(0)


@struct.dataclass
class Watched(Weight):
    """A matrix that tells of its rows."""

    array: Any
    tell: Callable[[Any], None] = struct.field(pytree_node=False)

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        rows, letters = subscripts.split("->")[0].split(",")
        summed = sum(letter in letters for letter in rows)
        self.tell(x.reshape(*x.shape[: x.ndim - summed], math.prod(x.shape[x.ndim - summed :])))
        return Dense(self.array).einsum(subscripts, x, bias, dtype)


@struct.dataclass
class WatchedStack(Weight):
    """A stack of such matrices. Which one is asked for must be known: its layer runs without `jit`."""

    array: Any
    tell: Callable[[int, Any], None] = struct.field(pytree_node=False)

    def __getitem__(self, index):
        return Watched(self.array[index], partial(self.tell, int(index)))

    def pick(self, e):
        return self[e]
