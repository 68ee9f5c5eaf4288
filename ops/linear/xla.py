"""Products by XLA, with arrays and with every weight that is not packed for the native kernels."""

from typing import Any

import jax.numpy as jnp

from ..precision import precision
from .weight import Weight


class Dense(Weight):
    """An unquantised array as a weight."""

    array: Any

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        exact = precision(x, self.array)
        out = jnp.einsum(
            subscripts, x, self.array, precision=exact, preferred_element_type=jnp.float32
        )
        return (out if bias is None else out + bias).astype(dtype or x.dtype)

    def __getitem__(self, index):
        return self.array[index]

    @property
    def rows(self) -> int:
        return self.array.shape[0]


def weight_of(w) -> Weight:
    """The weight, arrays wrapped in `Dense`; NotImplementedError if it is packed."""
    if not isinstance(w, Weight):
        return Dense(w)
    if w.native:
        raise NotImplementedError("the weight is laid out for the native kernels")
    return w


def varies() -> str:
    return "products by XLA are summed in an order that depends on the number of rows"
