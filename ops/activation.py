"""Activations.

Gate and up come stacked on an axis of size two; where there is no gate its size is one.
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
    """activation(gate) * up; with a clamp, gpt-oss's form: gate * sigmoid(alpha * gate) * (up +
    1).
    """
    if up_TGF.shape[-2] == 1:
        return ACTIVATIONS[activation](up_TGF[..., 0, :])
    return combine(up_TGF[..., 0, :], up_TGF[..., 1, :], activation, clamp, alpha)


def combine(gate, up, activation: str, clamp: float | None = None, alpha: float = 1.0):
    """The same of two arrays."""
    if clamp is None:
        return ACTIVATIONS[activation](gate) * up
    gate = jnp.minimum(gate, clamp)
    up = jnp.clip(up, -clamp, clamp)
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)


def soft_cap(x, cap: float | None):
    """cap * tanh(x / cap): bounded by cap, and close to x where x is small; x without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)
