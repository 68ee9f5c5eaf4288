"""`einsum(subscripts, x, w)`: the one door to every weight product, whatever form the weight has."""

import jax.numpy as jnp

from .activation import glu


def einsum(subscripts: str, x, w, dtype=None):
    """The product accumulated in float32 and returned in `dtype` (x's by default)."""
    return project(subscripts, x, w, None, dtype)


def project(subscripts: str, x, w, bias=None, dtype=None):
    """A weight product plus its bias, if it has one; the bias is added before rounding."""
    if hasattr(w, "einsum"):  # a quantised or packed node in place of an array
        return w.einsum(subscripts, x, bias, dtype)
    out = jnp.einsum(subscripts, x, w, preferred_element_type=jnp.float32)
    return (out if bias is None else out + bias).astype(dtype or x.dtype)


def gated(subscripts: str, x, w, activation: str):
    """activation(gate) * up of a product whose last axes are [2, F], in one pass where the weight's node can."""
    if hasattr(w, "gated") and (fused := w.gated(x, activation)) is not None:
        return fused
    return glu(einsum(subscripts, x, w), activation)
