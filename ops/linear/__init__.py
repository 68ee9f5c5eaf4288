"""Every product with a weight, and every look-up in one, whatever form the weight has."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ...sharding.device_axes import Axis
from ..implementations import choose
from .weight import RoundedRows, Weight

# Tried in order; one that cannot serve a weight, or a product with it, raises NotImplementedError.
IMPLEMENTATIONS = {"adapter": "..adapter", "native": ".cpu", "mosaic": ".gpu", "xla": ".xla"}


def weight_of(w, implementation: str | None = None) -> Weight:
    """An array or a node as the weight that its implementation, or the one that is named,
    multiplies with.
    """
    return of_weight(w, implementation, lambda weight: weight)


def of_weight(w, implementation: str | None, do: Callable[[Weight], Any]) -> Any:
    """`do(weight)` by the first implementation that serves both."""
    return choose(IMPLEMENTATIONS, __name__, lambda module: do(module.weight_of(w)), implementation)


def einsum(subscripts: str, x, w, dtype=None, implementation: str | None = None):
    """The product summed in float32 and returned in `dtype` (x's by default)."""
    return project(subscripts, x, w, None, dtype, implementation)


def project(subscripts: str, x, w, bias=None, dtype=None, implementation: str | None = None):
    """A product plus its bias, if it has one; the bias is added before rounding."""
    return of_weight(
        w, implementation, lambda weight: weight.einsum(subscripts, meeting(weight, x), bias, dtype)
    )


def gated(subscripts: str, x, w, activation: str, implementation: str | None = None):
    """activation(gate) * up of a product whose last axes are [2, F], activation(up) of one whose
    are [1, F].
    """
    return of_weight(
        w, implementation, lambda weight: weight.gated(subscripts, meeting(weight, x), activation)
    )


def add_up(subscripts: str, x, w, bias, axis: Axis):
    """A product over an axis that the devices split, summed over them; the bias is added once."""
    if axis.size == 1:
        return project(subscripts, x, w, bias)
    out = axis.sum(einsum(subscripts, x, w))
    return out if bias is None else (out.astype(jnp.float32) + bias).astype(out.dtype)


def exact(subscripts: str, x, w, implementation: str | None = None):
    """The product in float32 of rows and a weight, each with all its bits: where small differences
    choose.
    """
    return of_weight(w, implementation, lambda weight: weight.exact(subscripts, x))


def meeting(weight: Weight, x):
    """Rows as a weight's products take them."""
    return x.rows if isinstance(x, RoundedRows) and not weight.takes_rounded else x


def rounds(w) -> str | None:
    """The codes that a product with a weight makes of its rows, or None."""
    return w.rounds if isinstance(w, Weight) else None


def rows(table) -> int:
    """How many rows an embedding has on this device."""
    return weight_of(table).rows
