"""Products with weights and lookups in embeddings, for weights of every form."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ...sharding.device_axes import Axis
from ..implementations import choose
from .weight import RoundedRows, Weight

# Tried in order: an implementation raises NotImplementedError if it does not support a weight or a
# product with it.
IMPLEMENTATIONS = {
    "adapter": "..adapter", "clipped": ".clipped", "native": ".cpu", "mosaic": ".gpu", "xla": ".xla",
}  # fmt: skip


def weight_of(w, implementation: str | None = None) -> Weight:
    """Wrap an array or node as a `Weight` of the first implementation that supports it.

    Args:
        implementation: Forces one of IMPLEMENTATIONS.
    """
    return with_weight(w, implementation, lambda weight: weight)


def with_weight(w, implementation: str | None, function: Callable[[Weight], Any]) -> Any:
    """`function(weight)` by the first implementation that supports the weight and the call."""
    return choose(
        IMPLEMENTATIONS, __name__, lambda module: function(module.weight_of(w)), implementation
    )


def einsum(subscripts: str, x, w, dtype=None, implementation: str | None = None):
    """The product, accumulated in float32 and returned in `dtype` (x's by default)."""
    return project(subscripts, x, w, None, dtype, implementation)


def project(subscripts: str, x, w, bias=None, dtype=None, implementation: str | None = None):
    """The product plus an optional bias, which is added before rounding."""
    return with_weight(
        w,
        implementation,
        lambda weight: weight.einsum(subscripts, prepare_rows(weight, x), bias, dtype),
    )


def gated(subscripts: str, x, w, activation: str, implementation: str | None = None):
    """Compute activation(gate) * up.

    The product's last axes are [2, F], gate and up; if they are [1, F], it is activation(up).
    """
    return with_weight(
        w,
        implementation,
        lambda weight: weight.gated(subscripts, prepare_rows(weight, x), activation),
    )


def add_up(subscripts: str, x, w, bias, axis: Axis):
    """The product over inputs that are split over devices, summed over them; adds the bias once."""
    if axis.size == 1:
        return project(subscripts, x, w, bias)
    out = axis.sum(einsum(subscripts, x, w))
    return out if bias is None else (out.astype(jnp.float32) + bias).astype(out.dtype)


def exact(subscripts: str, x, w, implementation: str | None = None):
    """The product in full float32 precision, for routers and other choices of a largest score."""
    return with_weight(w, implementation, lambda weight: weight.exact(subscripts, x))


def prepare_rows(weight: Weight, x):
    """The rows in the form that the weight's products take: `RoundedRows` only if supported."""
    return x.rows if isinstance(x, RoundedRows) and not weight.takes_rounded else x


def rounds(w) -> str | None:
    """The type to which products with a weight quantise their rows: "int8", "float8" or None."""
    return w.rounds if isinstance(w, Weight) else None


def rows(table) -> int:
    """Number of rows of an embedding on this device."""
    return weight_of(table).rows
