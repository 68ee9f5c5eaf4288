"""Record the inputs of matrices during calibration, and accumulate their statistics."""

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
    """Statistics of the inputs x of a matrix."""

    H: np.ndarray  # [I, I]: the sum of x x^T
    total: np.ndarray  # [I]: the sum of |x|
    top: np.ndarray  # [I]: the largest |x|

    def __add__(self, added: "Inputs") -> "Inputs":
        return Inputs(self.H + added.H, self.total + added.total, np.maximum(self.top, added.top))

    def divided(self, s: np.ndarray) -> "Inputs":
        """The statistics of x / s."""
        return Inputs(self.H / np.outer(s, s), self.total / s, self.top / s)


def empty_inputs(size: int) -> Inputs:
    return Inputs(
        np.zeros((size, size), np.float32), np.zeros(size, np.float32), np.zeros(size, np.float32)
    )


def measure_inputs(arrays: Sequence[Any]) -> Inputs:
    """The statistics of several arrays of inputs [R, I]."""
    x_RI = jnp.concatenate(arrays)
    # Zero rows do not change the sums, and limit the number of compiled shapes.
    padding = (1 << (len(x_RI) - 1).bit_length()) - len(x_RI)
    return Inputs(
        *(np.asarray(value) for value in input_sums(jnp.pad(x_RI, ((0, padding), (0, 0)))))
    )


@jax.jit
def input_sums(x_RI):
    x_RI = x_RI.astype(jnp.float32)
    H = jnp.einsum("RI,RJ->IJ", x_RI, x_RI, precision="highest")
    return H, jnp.abs(x_RI).sum(0), jnp.abs(x_RI).max(0)


class RecordedMatrix(Weight):
    """A matrix that reports its inputs."""

    array: Any
    record: Callable[[Any], None] = struct.field(pytree_node=False)

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        rows, letters = subscripts.split("->")[0].split(",")
        summed = sum(letter in letters for letter in rows)
        self.record(x.reshape(*x.shape[: x.ndim - summed], math.prod(x.shape[x.ndim - summed :])))
        return Dense(self.array).einsum(subscripts, x, bias, dtype)


class RecordedStack(Weight):
    """A stack of recorded matrices. Indices must be concrete: the layer runs without `jit`."""

    array: Any
    record: Callable[[int, Any], None] = struct.field(pytree_node=False)

    def __getitem__(self, index):
        return RecordedMatrix(self.array[index], partial(self.record, int(index)))

    def pick(self, e):
        return self[e]
