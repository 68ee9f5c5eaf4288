"""Dense products on NVIDIA GPUs."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp

from ...sharding import struct
from ..quant.compressed import Rounded
from . import xla
from .gpu_kernel import prepare
from .gpu_kernel.shape import FEATURES
from .weight import GpuMatrix, Weight, check_subscripts, plain

# subscripts of products in which each head has rows and a matrix of its own
PER_HEAD = r"(\w)(\w)(\w),\2(\w)\3->\1\2\4"


class GpuWeight(Weight):
    """A weight whose products the GPU kernel computes; lookups and single matrices use XLA."""

    weight: Any
    interpret: Any = struct.field(pytree_node=False, default=None)
    takes_rounded = True

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        if (
            re.fullmatch(PER_HEAD, subscripts)
            and isinstance(self.weight, jax.Array)
            and bias is None
        ):
            return prepare.multiply_heads(
                x, GpuMatrix(self.weight), dtype=dtype or x.dtype, interpret=self.interpret
            )
        rows, matrix, transposed, lead, out = self.parse_product(subscripts, x)
        y = prepare.dense(
            rows,
            matrix,
            bias,
            dtype=dtype or plain(x).dtype,
            transposed=transposed,
            interpret=self.interpret,
        )
        return y.reshape(*lead, *out)

    def gated(self, subscripts: str, x, activation: str):
        rows, matrix, transposed, lead, out = self.parse_product(subscripts, x)
        if len(out) == 2 and out[0] == 1:
            return super().gated(subscripts, x, activation)
        if transposed or len(out) != 2 or out[0] != 2:
            raise NotImplementedError(
                "gate and up must be the last axes but one of a weight whose inputs come first"
            )
        y = prepare.dense(
            rows,
            matrix,
            dtype=plain(x).dtype,
            projections=2,
            activation=activation,
            interpret=self.interpret,
        )
        return y.reshape(*lead, out[-1])

    def exact(self, subscripts: str, x):
        """See `Weight.exact`: a float32 weight is split into three bfloat16 summands.

        The summands hold all bits of float32. Outputs are padded to the kernel's tiles.
        """
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

    def parse_product(self, subscripts: str, x):
        """Check a product and flatten its operands to matrices.

        Returns:
            (rows, matrix, transposed, lead, out): the rows [R, inputs], the weight, whether the
            weight is [outputs, inputs], the leading axes of x, and the output axes.
        """
        matrix = prepare.as_gpu_matrix(self.weight)
        rows = x
        x = plain(x)
        # the codes of quantised weights have the inputs first, whatever the subscripts say
        if isinstance(self.weight, Rounded):
            axes = len(self.weight.into)
            into = self.weight.into
            out = self.weight.out
            if not matrix.group:  # the sizes on this device, if the weight is split
                into = matrix.array.shape[:axes]
                out = matrix.array.shape[axes:]
            check_subscripts(subscripts, x, into, out, self.weight.inputs)
            lead = x.shape[: x.ndim - axes]
            return rows.reshape(-1, math.prod(into)), matrix, False, lead, out
        if not isinstance(self.weight, jax.Array):
            raise NotImplementedError("a stack of matrices is no weight of one product")
        operands, _, result = subscripts.partition("->")
        row_letters, _, weight_letters = operands.partition(",")
        summed = "".join(letter for letter in weight_letters if letter not in result)
        output_letters = "".join(letter for letter in weight_letters if letter in result)
        lead_letters = row_letters.removesuffix(summed)
        transposed = weight_letters == output_letters + summed and not weight_letters.startswith(
            summed
        )
        if (
            not summed
            or row_letters != lead_letters + summed
            or result != lead_letters + output_letters
            or weight_letters not in (summed + output_letters, output_letters + summed)
        ):
            raise NotImplementedError(f"{subscripts!r} is not a product of rows with one matrix")
        sizes = dict(zip(weight_letters, self.weight.shape, strict=True))
        inputs = math.prod(sizes[letter] for letter in summed)
        return (
            x.reshape(-1, inputs),
            matrix,
            transposed,
            x.shape[: len(lead_letters)],
            tuple(sizes[letter] for letter in output_letters),
        )

    def __getitem__(self, index):
        return xla.weight_of(self.weight)[index]

    @property
    def rows(self) -> int:
        return xla.weight_of(self.weight).rows

    def pick(self, e):
        return xla.weight_of(self.weight).pick(e)


def weight_of(w, interpret: Any = None) -> Weight:
    """The weight with products by the kernel; NotImplementedError if this GPU has no kernel."""
    prepare.choose_kernel(interpret)
    return GpuWeight(w, interpret)


def varies() -> None:
    """Batch-invariant: a row's result does not depend on the other rows."""
