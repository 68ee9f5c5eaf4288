"""Matrices whose inputs and outputs are clipped to bounds of their own."""

from typing import Any

import jax.numpy as jnp

from .. import linear
from .weight import Weight, plain


class Clipped(Weight):
    """Matrices of the same inputs, side by side along their first output axis.

    Each clips its inputs before the product and its outputs after it.
    """

    matrices: tuple[Any, ...]
    bounds_P22: Any  # float32: of each matrix the minimum and maximum of inputs, then of outputs

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        if bias is not None:
            raise NotImplementedError("clipped products have no bias")
        x = plain(x)
        bounds_P22 = self.bounds_P22.astype(x.dtype)
        outputs = []
        for matrix, (in_bounds, out_bounds) in zip(self.matrices, bounds_P22, strict=True):
            out = linear.einsum(subscripts, jnp.clip(x, *in_bounds), matrix, dtype)
            outputs.append(jnp.clip(out, *out_bounds))
        operand, _, result = subscripts.partition("->")
        first_output = next(
            axis for axis, letter in enumerate(result) if letter not in operand.partition(",")[0]
        )
        return jnp.concatenate(outputs, axis=first_output)


def weight_of(w) -> Weight:
    """The weight if it is clipped; otherwise NotImplementedError, see `quire.ops.linear`."""
    if not isinstance(w, Clipped):
        raise NotImplementedError("the weight is not clipped")
    return w


def varies() -> None:
    """Batch-invariant as its products are; see `quire.ops.implementations`."""
