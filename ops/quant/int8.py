"""INT8: signed bytes with a scale an output. `dynamic`: the rows that meet them become bytes too, each as it comes."""

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from ...sharding.spec import ArraySpec

LIMIT = 127


@struct.dataclass
class Int8:
    """weight = codes * scale; the first len(into) axes of the codes are summed over."""

    codes: Any  # int8 [*into, *out]
    scale: Any  # float32 [*out]
    into: tuple[int, ...] = struct.field(pytree_node=False)
    out: tuple[int, ...] = struct.field(pytree_node=False)
    dynamic: bool = struct.field(pytree_node=False)

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        lead, out = x.shape[: x.ndim - len(self.into)], self.codes.shape[len(self.into) :]
        codes_KO, scale_O = self.codes.reshape(-1, math.prod(out)), self.scale.reshape(-1)
        x_RK = x.reshape(-1, codes_KO.shape[0])
        if self.dynamic:
            rows_RK, row_scale_R1 = as_bytes(x_RK)
            exact = jnp.dot(rows_RK, codes_KO, preferred_element_type=jnp.int32)
            y_RO = exact.astype(jnp.float32) * (scale_O * row_scale_R1)
        else:
            narrow = x_RK.astype(jnp.bfloat16)
            y_RO = jnp.dot(narrow, codes_KO.astype(jnp.bfloat16), preferred_element_type=jnp.float32) * scale_O
        y = y_RO.reshape(*lead, *out)
        return (y if bias is None else y + bias).astype(dtype or x.dtype)

    @property
    def rows(self) -> int:
        """Of an embedding."""
        return self.codes.shape[1]

    def __getitem__(self, tokens_T):
        """Rows of an embedding."""
        return self.codes[:, tokens_T].T.astype(jnp.float32) * self.scale[tokens_T][:, None]


def as_bytes(x_RK):
    """Each row in signed bytes and its scale, such that its largest value is 127."""
    wide = x_RK.astype(jnp.float32)
    most = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    poison = jnp.sum(wide * 0, axis=-1, keepdims=True)  # a row that is not finite stays so
    codes = jnp.round(wide * jnp.where(most > 0, LIMIT / most, 0))
    return jnp.nan_to_num(codes).astype(jnp.int8), most / LIMIT + poison


def spec(dense: ArraySpec, *options: str) -> Int8:
    """The specs of an array kept so; the option `weights` leaves the rows as they are."""
    if set(options) - {"weights"}:
        raise ValueError(f"int8 has no option {'-'.join(options)!r}; it can be weights")
    into, out = split(dense)
    codes = replace(dense, shape=into + out, axes=order(dense), dtype=jnp.int8, init="signed", inputs=())
    scale = ArraySpec(out, jnp.float32, order(dense)[len(into) :], f"scale/{LIMIT}", dense.fan_in)
    return Int8(codes, scale, into, out, dynamic="weights" not in options)


def split(dense: ArraySpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes of the axes that are summed over, and of the others."""
    others = [axis for axis in range(len(dense.shape)) if axis not in dense.inputs]
    return tuple(dense.shape[axis] for axis in dense.inputs), tuple(dense.shape[axis] for axis in others)


def order(dense: ArraySpec) -> tuple[str | None, ...]:
    """The logical axes, those that are summed over first."""
    others = [axis for axis in range(len(dense.shape)) if axis not in dense.inputs]
    return tuple(dense.axes[axis] for axis in (*dense.inputs, *others))


def quantize(weight: np.ndarray, node: Int8) -> Int8:
    """Round to nearest, the largest value of each output at 127."""
    axes = tuple(range(len(node.into)))
    wide = weight.astype(np.float32)
    scale = np.abs(wide).max(axis=axes) / LIMIT
    codes = np.rint(wide * np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)).astype(np.int8)
    return node.replace(codes=codes, scale=scale)
