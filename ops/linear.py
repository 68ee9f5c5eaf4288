"""Every product with a weight, and every look-up in one, whatever form the weight has."""

from .implementations import choose
from .weight import Weight

# Tried in order; one that cannot serve a weight raises NotImplementedError.
IMPLEMENTATIONS = {"native": ".native.linear", "xla": ".weight"}


def weight_of(w, implementation: str | None = None) -> Weight:
    """An array or a node as the weight that its implementation, or the one that is named, multiplies with."""
    return choose(IMPLEMENTATIONS, __package__ or "", lambda module: module.weight_of(w), implementation)


def einsum(subscripts: str, x, w, dtype=None, implementation: str | None = None):
    """The product summed in float32 and returned in `dtype` (x's by default)."""
    return project(subscripts, x, w, None, dtype, implementation)


def project(subscripts: str, x, w, bias=None, dtype=None, implementation: str | None = None):
    """A product plus its bias, if it has one; the bias is added before rounding."""
    return weight_of(w, implementation).einsum(subscripts, x, bias, dtype)


def gated(subscripts: str, x, w, activation: str, implementation: str | None = None):
    """activation(gate) * up of a product whose last axes are [2, F]."""
    return weight_of(w, implementation).gated(subscripts, x, activation)


def rows(table) -> int:
    """How many rows an embedding has on this device."""
    return weight_of(table).rows
