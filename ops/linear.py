"""`einsum(subscripts, x, w)`: the one door to every weight product, whatever form the weight has."""

import jax.numpy as jnp


def einsum(subscripts: str, x, w, dtype=None):
    """The product accumulated in float32 and returned in `dtype` (x's by default)."""
    if hasattr(w, "einsum"):  # a quantised node in place of an array
        return w.einsum(subscripts, x).astype(dtype or x.dtype)
    out = jnp.einsum(subscripts, x, w, preferred_element_type=jnp.float32)
    return out.astype(dtype or x.dtype)


def project(subscripts: str, x, w, bias=None):
    """A weight product plus its bias, if it has one; the bias is added before rounding."""
    out = einsum(subscripts, x, w, jnp.float32)
    return (out if bias is None else out + bias).astype(x.dtype)
