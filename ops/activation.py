"""Activation functions.

The gate and up projections are stacked on an axis of size 2; without a gate its size is 1.
"""

from functools import partial

import jax
import jax.numpy as jnp

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def glu(up_TGF, activation: str, clamp: float | None = None, alpha: float = 1.0):
    """Gated linear unit: activation(gate) * up, or activation(up) without a gate.

    With a clamp it has the form of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1).
    """
    if up_TGF.shape[-2] == 1:
        return ACTIVATIONS[activation](up_TGF[..., 0, :])
    return combine(up_TGF[..., 0, :], up_TGF[..., 1, :], activation, clamp, alpha)


def combine(gate, up, activation: str, clamp: float | None = None, alpha: float = 1.0):
    """`glu` with gate and up as separate arrays."""
    if clamp is None:
        return ACTIVATIONS[activation](gate) * up
    gate = jnp.minimum(gate, clamp)
    up = jnp.clip(up, -clamp, clamp)
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)


def soft_cap(x, cap: float | None):
    """Bound x smoothly to the range -cap to cap: cap * tanh(x / cap); x itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)
