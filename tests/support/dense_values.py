"""The dense values of a quantised weight."""

import jax.numpy as jnp
import numpy as np

from quire.ops.linear import einsum


def dequantize(node):
    """Dequantise a node by a product with the identity matrix."""
    size = int(np.prod(node.into))
    return np.asarray(einsum("TD,DGF->TGF", jnp.eye(size), node, jnp.float32)).reshape(
        *node.into, *node.out
    )
