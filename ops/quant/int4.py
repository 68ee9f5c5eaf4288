"""INT4: four bits a weight, two a byte; `group` inputs of an output share a scale and perhaps a zero."""

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from ...sharding.spec import ArraySpec
from .int8 import order, split

GROUPS = ("32", "64", "128")
MIDDLE = 8  # the code that means nothing where there is no zero


@struct.dataclass
class Int4:
    """weight = (code - zero) * scale.

    input        0 1 2 3 ... 31 | 32 33 ...
    codes        0   1   ... 15 | 16  ...      the even input in a byte's low half, the odd one in its high half
    scale, zero       0         |      1 ...   with a group of 32
    """

    codes: Any  # uint8 [K / 2, O]
    scale: Any  # float16 [K / group, O]
    zero: Any  # uint8 [K / group, O], or None: 8
    into: tuple[int, ...] = struct.field(pytree_node=False)
    out: tuple[int, ...] = struct.field(pytree_node=False)
    group: int = struct.field(pytree_node=False)

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        lead = x.shape[: x.ndim - len(self.into)]
        x_RK = x.reshape(-1, math.prod(self.into)).astype(jnp.bfloat16)
        y_RO = jnp.dot(x_RK, self.dense().astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        y = y_RO.reshape(*lead, *self.out)
        return (y if bias is None else y + bias).astype(dtype or x.dtype)

    def dense(self):
        """The weight as one float32 matrix [K, O]."""
        half, O = self.codes.shape
        shift = jnp.array([0, 4], jnp.uint8).reshape(1, 2, 1)
        code_KO = ((self.codes[:, None] >> shift) & 15).reshape(2 * half, O).astype(jnp.float32)
        zero = MIDDLE if self.zero is None else self.spread(self.zero)
        return (code_KO - zero) * self.spread(self.scale)

    def spread(self, values_GO):
        """What a group shares, for each of its inputs."""
        return jnp.repeat(values_GO.astype(jnp.float32), self.group, axis=0)[: math.prod(self.into)]


def spec(dense: ArraySpec, *options: str) -> Int4:
    """The specs of an array kept so; the options are a group's size and `zero`."""
    sizes = [option for option in options if option in GROUPS]
    if len(sizes) > 1 or set(options) - {"zero", *GROUPS}:
        raise ValueError(f"int4 has no options {'-'.join(options)!r}; they can be {', '.join(GROUPS)} and zero")
    group = int(sizes[0]) if sizes else 32
    into, out = split(dense)
    K, O = math.prod(into), math.prod(out)
    if K % 2:
        raise ValueError(f"{K} inputs cannot be kept two a byte")
    # One matrix: which of its sides is sharded is said by the first axis of each.
    axes = (order(dense)[0], order(dense)[len(into)])
    shared = (-(-K // group), O)
    return Int4(
        codes=replace(dense, shape=(K // 2, O), axes=axes, dtype=jnp.uint8, init="bytes", inputs=()),
        scale=ArraySpec(shared, jnp.float16, (None, axes[1]), f"scale/{MIDDLE}", dense.fan_in),
        zero=ArraySpec(shared, jnp.uint8, (None, axes[1]), "zeros") if "zero" in options else None,
        into=into,
        out=out,
        group=group,
    )


def quantize(weight: np.ndarray, node: Int4) -> Int4:
    """Round to nearest: a group's values spread over -8 to 7, or over 0 to 15 from its least to its largest."""
    K, group = math.prod(node.into), node.group
    wide_KO = weight.astype(np.float32).reshape(K, -1)
    O = wide_KO.shape[1]
    grouped = np.pad(wide_KO, ((0, -K % group), (0, 0))).reshape(-1, group, O)
    if node.zero is None:
        # The sign of the largest decides which end it lies at: all sixteen codes are in use.
        top = np.take_along_axis(grouped, np.abs(grouped).argmax(1)[:, None], 1)[:, 0]
        scale, zero = (top / -MIDDLE).astype(np.float16), np.full_like(grouped[:, :1], MIDDLE)
    else:
        low, high = np.minimum(grouped.min(1), 0), np.maximum(grouped.max(1), 0)
        scale = ((high - low) / 15).astype(np.float16)
        inverse = inverted(scale.astype(np.float32))
        zero = np.clip(np.rint(-low * inverse), 0, 15)[:, None]
    codes = np.rint(grouped * inverted(scale.astype(np.float32))[:, None]) + zero
    codes = np.clip(codes, 0, 15).astype(np.uint8).reshape(-1, O)[:K]
    zeros = None if node.zero is None else zero[:, 0].astype(np.uint8)
    return node.replace(codes=codes[::2] | codes[1::2] << 4, scale=scale, zero=zeros)


def inverted(scale: np.ndarray) -> np.ndarray:
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
