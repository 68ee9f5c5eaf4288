"""The dense values of a quantised weight."""

import jax.numpy as jnp
import numpy as np

from quire.ops.linear import einsum


def restored(node):
    """The values that a node stands for, by multiplying it with the unit matrix."""
    size = int(np.prod(node.into))
    return np.asarray(einsum("TD,DGF->TGF", jnp.eye(size), node, jnp.float32)).reshape(
        *node.into, *node.out
    )
