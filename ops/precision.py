"""The precision of matrix products with float32 operands."""

import jax
import jax.numpy as jnp
from jax import Array


def precision(*operands: Array) -> jax.lax.Precision | None:
    """HIGHEST if an operand is float32: by default GPUs multiply float32 as TF32, TPUs as bfloat16.

    None, the default precision, for other dtypes and on CPUs, which always use all bits.
    """
    if jax.default_backend() == "cpu" or all(x.dtype != jnp.float32 for x in operands):
        return None
    return jax.lax.Precision.HIGHEST
