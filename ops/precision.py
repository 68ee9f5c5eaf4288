"""How exactly a product is computed where its operands are float32."""

import jax
import jax.numpy as jnp
from jax import Array


def precision(*operands: Array) -> jax.lax.Precision | None:
    """All bits of float32, if that is what an operand is: GPUs multiply them as TF32 by default,
    TPUs as bfloat16.

    A CPU has no other way, and is asked for nothing.
    """
    if jax.default_backend() == "cpu" or all(x.dtype != jnp.float32 for x in operands):
        return None
    return jax.lax.Precision.HIGHEST
