"""Weights as the kernels want them: nodes in place of arrays, made once while a model is loaded."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...sharding import struct
from ..native import has, kernel_names, target
from .weight import Weight, check_subscripts

LANES = 16  # outputs of a block
FUSED = {"silu": 1, "gelu_tanh": 2}  # activations that the kernels know


@struct.dataclass(kw_only=True)
class Product(Weight):
    """What all nodes do, and the sizes of their axes, as `check_subscripts` wants them."""

    into: tuple[int, ...] = struct.field(pytree_node=False)
    out: tuple[int, ...] = struct.field(pytree_node=False)
    inputs: tuple[int, ...] = struct.field(pytree_node=False)
    which: Any = None  # int32 [1]: the one that is meant of a stack, whose arrays are [E, ...]
    # whether the kernel rounds the rows to bytes
    in_bytes: bool = struct.field(pytree_node=False, default=False)
    # whether float32 rows keep all their bits
    float_rows: bool = struct.field(pytree_node=False, default=False)
    native = True
    kernel = ""  # the name of the kernel that takes the arrays

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        check_subscripts(subscripts, x, self.into, self.out, self.inputs)
        lead = x.shape[: x.ndim - len(self.into)]
        return call(self, x, bias, dtype or x.dtype).reshape(*lead, *self.out)

    def gated(self, subscripts: str, x, activation: str):
        """In one pass where the outputs are [2, F] and the kernels know the activation."""
        if activation not in FUSED or len(self.out) != 2 or self.out[-1] % LANES:
            return super().gated(subscripts, x, activation)
        check_subscripts(subscripts, x, self.into, self.out, self.inputs)
        return call(self, x, None, x.dtype, FUSED[activation]).reshape(*x.shape[:-1], self.out[-1])

    @property
    def rows(self) -> int:
        return math.prod(self.out)

    def meeting(self, x) -> tuple[Any, Any]:
        """Rows as the kernel takes them, and the scale of each, where they are rounded before."""
        return x, None


@struct.dataclass
class Tiled(Product):
    """A float32 or bfloat16 weight."""

    tiles: Any  # [O / 16, K / group, 16, group]

    @property
    def kernel(self) -> str:
        return kernel_names.DENSE[self.tiles.dtype.name]

    def __getitem__(self, index):
        block = index // LANES
        lane = index % LANES
        return self.tiles[block, :, lane].reshape(index.shape[0], -1)[:, : math.prod(self.into)]


@struct.dataclass
class Many(Weight):
    """A stack of matrices.

    A product names those that it wants, so that none is cut out of the stack before.
    """

    each: Any  # a node whose arrays are [E, ...]
    native = True

    def pick(self, e) -> Product:
        return self.each.replace(which=jnp.reshape(e, 1))

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        """Each matrix with rows of its own: x is [T, E, K]."""
        check_subscripts(
            subscripts, x, self.each.into, self.each.out, self.each.inputs, stacked=True
        )
        T, E = x.shape[:2]
        every = call(
            self.each.replace(which=jnp.arange(E)), jnp.swapaxes(x, 0, 1), bias, dtype or x.dtype
        )
        return jnp.swapaxes(every.reshape(E, T, *self.each.out), 0, 1)


def keeps_floats(rows: str) -> bool:
    """Whether rows of this type, as `Weight.for_kernels` has it, are multiplied with all bits of
    float32.
    """
    return rows.endswith("float32")


def has_kernel(name: str) -> bool:
    """Whether weights can be laid out for a kernel, and multiplied by it."""
    return has("pack", name)


def has_dense_product(dtype: str) -> bool:
    """The same of the kernel for dense weights of a type."""
    return has_kernel(kernel_names.DENSE[dtype])


def has_product(kernel: str, rows: str) -> bool:
    """Whether weights can be laid out for the kernel that multiplies their codes with rows of this
    type.
    """
    return has_kernel(kernel_names.FLOAT_ROWS[kernel] if keeps_floats(rows) else kernel)


def row_options(kernel: str, group: int, rows: str) -> dict[str, bool]:
    """How a node's kernel takes rows of this type: the fields `in_bytes` and `float_rows` of
    `Product`.
    """
    return {"in_bytes": in_bytes(kernel, group, rows), "float_rows": keeps_floats(rows)}


def in_bytes(kernel: str, group: int, rows: str) -> bool:
    """Whether rows of this type are rounded to bytes for a kernel's codes."""
    return (
        rows.startswith("int8")
        and takes_bytes(kernel, group)
        and has(kernel_names.ROUNDING[kernel])
    )


def takes_bytes(kernel: str, group: int) -> bool:
    """Whether there is a kernel for that which is faster. With smaller groups none is."""
    return group >= 32 and kernel in kernel_names.ROUNDING


def call(node: Product, x, bias, dtype, activation: int = 0):
    """The products with the matrices that are meant of a stack, each with its share of the rows; or
    the only one.
    """
    which = jnp.zeros(0, jnp.int32) if node.which is None else node.which
    rows, scale = node.meeting(
        x.reshape(*(() if node.which is None else which.shape), -1, math.prod(node.into))
    )
    if scale is not None:
        y = run_kernel(node, rows, which, None, jnp.float32, 0) * scale
        return (y if bias is None else y + bias.reshape(-1)).astype(dtype)
    return run_kernel(node, rows, which, bias, dtype, activation)


def run_kernel(node: Product, rows, which, bias, dtype, activation: int):
    """The kernel's products of [.., T, K] rows."""
    if bias is None:
        bias_O = jnp.zeros(0, jnp.float32)
    else:
        bias_O = bias.reshape(-1).astype(jnp.float32)
        bias_O = jnp.pad(bias_O, (0, -bias_O.shape[0] % LANES))
    outputs = node.out[-1] if activation else math.prod(node.out)
    variants = (
        kernel_names.ROUNDING
        if node.in_bytes
        else kernel_names.FLOAT_ROWS
        if node.float_rows
        else {}
    )
    name = variants.get(node.kernel, node.kernel)
    run = jax.ffi.ffi_call(target(name), jax.ShapeDtypeStruct((*rows.shape[:-1], outputs), dtype))
    return run(
        rows,
        *jax.tree.leaves(node.replace(which=None)),
        bias_O,
        which,
        activation=np.int32(activation),
    )


def weight_of(w) -> Weight:
    """The weight for products by the kernels."""
    if not isinstance(w, Weight) or not w.native:
        raise NotImplementedError("the weight is not laid out for the kernels")
    return w


def varies() -> None:
    """A row's bits are the same in any company."""
