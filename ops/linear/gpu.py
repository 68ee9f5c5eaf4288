"""Dense products on NVIDIA GPUs."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp

from ...sharding import struct
from ..quant.compressed import Rounded
from . import weight as xla
from .gpu_kernel import prepare
from .gpu_kernel.shape import FEATURES
from .weight import GpuMatrix, Weight, check_subscripts, plain

EACH = r"(\w)(\w)(\w),\2(\w)\3->\1\2\4"  # rows of each head by the head's own matrix


@struct.dataclass
class Multiplied(Weight):
    """A weight whose products the kernel computes; what else is asked of it, XLA does."""

    weight: Any
    interpret: Any = struct.field(pytree_node=False, default=None)
    takes_rounded = True

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        if re.fullmatch(EACH, subscripts) and isinstance(self.weight, jax.Array) and bias is None:
            return prepare.each(
                x, GpuMatrix(self.weight), dtype=dtype or x.dtype, interpret=self.interpret
            )
        rows, flat, turned, lead, out = self.read(subscripts, x)
        y = prepare.dense(
            rows, flat, bias, dtype=dtype or plain(x).dtype, turned=turned, interpret=self.interpret
        )
        return y.reshape(*lead, *out)

    def gated(self, subscripts: str, x, activation: str):
        rows, flat, turned, lead, out = self.read(subscripts, x)
        if len(out) == 2 and out[0] == 1:
            return super().gated(subscripts, x, activation)
        if turned or len(out) != 2 or out[0] != 2:
            raise NotImplementedError(
                "gate and up must be the last axes but one of a weight whose inputs come first"
            )
        y = prepare.dense(
            rows,
            flat,
            dtype=plain(x).dtype,
            parts=2,
            activation=activation,
            interpret=self.interpret,
        )
        return y.reshape(*lead, out[-1])

    def exact(self, subscripts: str, x):
        """bfloat16 in three summands has all bits of float32; outputs are filled up with zeros."""
        if not isinstance(self.weight, jax.Array) or self.weight.ndim != 2:
            raise NotImplementedError("the weight must be one matrix that is not quantised")
        inputs, outputs = self.weight.shape
        lead = x.shape[:-1]
        check_subscripts(subscripts, x, (inputs,), (outputs,), (0,))
        matrix = GpuMatrix(jnp.pad(self.weight, ((0, 0), (0, -outputs % FEATURES))))
        if self.weight.dtype == jnp.float32:
            matrix = GpuMatrix(prepare.summands(matrix.array), summands=prepare.SUMMANDS)
        y_RO = prepare.dense(
            x.reshape(-1, inputs), matrix, dtype=jnp.float32, interpret=self.interpret
        )
        return y_RO[:, :outputs].reshape(*lead, outputs)

    def read(self, subscripts: str, x):
        """(rows, the weight, whether its inputs come last, axes of the rows, axes of the
        outputs).
        """
        matrix = prepare.matrix(self.weight)
        given = x
        x = plain(x)
        # its codes have the inputs first, wherever they stand in the subscripts
        if isinstance(self.weight, Rounded):
            axes = len(self.weight.into)
            into = self.weight.into
            out = self.weight.out
            if not matrix.group:  # of this device's part, where it is split
                into = matrix.array.shape[:axes]
                out = matrix.array.shape[axes:]
            check_subscripts(subscripts, x, into, out, self.weight.inputs)
            return given.reshape(-1, math.prod(into)), matrix, False, x.shape[: x.ndim - axes], out
        if not isinstance(self.weight, jax.Array):
            raise NotImplementedError("a stack of matrices is no weight of one product")
        operands, _, result = subscripts.partition("->")
        rows, _, letters = operands.partition(",")
        into = "".join(letter for letter in letters if letter not in result)
        kept = "".join(letter for letter in letters if letter in result)
        lead = rows.removesuffix(into)
        turned = letters == kept + into and not letters.startswith(into)
        if (
            not into
            or rows != lead + into
            or result != lead + kept
            or letters not in (into + kept, kept + into)
        ):
            raise NotImplementedError(f"{subscripts!r} is not a product of rows with one matrix")
        sizes = dict(zip(letters, self.weight.shape, strict=True))
        inputs = math.prod(sizes[letter] for letter in into)
        return (
            x.reshape(-1, inputs),
            matrix,
            turned,
            x.shape[: len(lead)],
            tuple(sizes[n] for n in kept),
        )

    def __getitem__(self, index):
        return xla.weight_of(self.weight)[index]

    @property
    def rows(self) -> int:
        return xla.weight_of(self.weight).rows

    def pick(self, e):
        return xla.weight_of(self.weight).pick(e)


def weight_of(w, interpret: Any = None) -> Weight:
    """The weight for products by the kernel."""
    prepare.machine(interpret)
    return Multiplied(w, interpret)


def varies() -> None:
    """A row's bits are the same in any company."""
