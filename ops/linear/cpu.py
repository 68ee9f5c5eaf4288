"""Products by the native CPU kernels, and the weight nodes that hold arrays in their layout.

`cpu_layout.py` makes the nodes once, while a model is loaded.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...sharding import struct
from ..native import has, kernel_names, target
from .weight import Weight, check_subscripts

LANES = 16  # outputs of a block
FUSED = {"silu": 1, "gelu_tanh": 2}  # the kernels' numbers of the activations that they can fuse


class PackedWeight(Weight, kw_only=True):
    """Base class of the nodes: a weight in the layout of a native kernel.

    Args:
        into: Sizes of the axes that products sum over.
        out: Sizes of the other axes.
        inputs: Where the summed axes stand in the unpacked weight.
        matrix_ids: int32 [1], which matrix of a stack to use, if the arrays are [E, ...].
        int8_activations: Whether the kernel rounds activations to int8.
        float_rows: Whether float32 activations keep all their bits.
    """

    into: tuple[int, ...] = struct.field(pytree_node=False)
    out: tuple[int, ...] = struct.field(pytree_node=False)
    inputs: tuple[int, ...] = struct.field(pytree_node=False)
    matrix_ids: Any = None
    int8_activations: bool = struct.field(pytree_node=False, default=False)
    float_rows: bool = struct.field(pytree_node=False, default=False)
    native = True
    kernel = ""  # the name of the kernel that takes the arrays

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        check_subscripts(subscripts, x, self.into, self.out, self.inputs)
        lead = x.shape[: x.ndim - len(self.into)]
        return call(self, x, bias, dtype or x.dtype).reshape(*lead, *self.out)

    def gated(self, subscripts: str, x, activation: str):
        """See `Weight.gated`; one kernel call for outputs [2, F] and a fusable activation."""
        if activation not in FUSED or len(self.out) != 2 or self.out[-1] % LANES:
            return super().gated(subscripts, x, activation)
        check_subscripts(subscripts, x, self.into, self.out, self.inputs)
        return call(self, x, None, x.dtype, FUSED[activation]).reshape(*x.shape[:-1], self.out[-1])

    @property
    def rows(self) -> int:
        return math.prod(self.out)

    def prepare_rows(self, x) -> tuple[Any, Any]:
        """The rows as the kernel takes them, and each row's scale if they are rounded here."""
        return x, None


class TiledDense(PackedWeight):
    """A float32 or bfloat16 weight."""

    tiles: Any  # [O / 16, K / group, 16, group]

    @property
    def kernel(self) -> str:
        return kernel_names.DENSE[self.tiles.dtype.name]

    def __getitem__(self, index):
        block = index // LANES
        lane = index % LANES
        return self.tiles[block, :, lane].reshape(index.shape[0], -1)[:, : math.prod(self.into)]


class PackedStack(Weight):
    """A stack of matrices.

    Products pass the kernel the indices of their matrices, so that no matrix is copied out of the
    stack.
    """

    node: Any  # a node whose arrays are [E, ...]
    native = True

    def pick(self, e) -> PackedWeight:
        return self.node.replace(matrix_ids=jnp.reshape(e, 1))

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        """The product of every matrix with rows of its own: x is [T, E, K]."""
        check_subscripts(
            subscripts, x, self.node.into, self.node.out, self.node.inputs, stacked=True
        )
        T, E = x.shape[:2]
        outputs = call(
            self.node.replace(matrix_ids=jnp.arange(E)),
            jnp.swapaxes(x, 0, 1),
            bias,
            dtype or x.dtype,
        )
        return jnp.swapaxes(outputs.reshape(E, T, *self.node.out), 0, 1)


def keeps_floats(rows: str) -> bool:
    """Whether products keep all bits of float32 rows; `rows` as in `Weight.for_kernels`."""
    return rows.endswith("float32")


def has_kernel(name: str) -> bool:
    """Whether this machine can pack weights for a kernel and multiply with them."""
    return has("pack", name)


def has_dense_product(dtype: str) -> bool:
    """Whether this machine has the kernel for dense weights of a dtype."""
    return has_kernel(kernel_names.DENSE[dtype])


def has_product(kernel: str, rows: str) -> bool:
    """Whether this machine has a kernel for quantised weights and rows of this type."""
    return has_kernel(kernel_names.FLOAT_ROWS[kernel] if keeps_floats(rows) else kernel)


def row_options(kernel: str, rows: str) -> dict[str, Any]:
    """The fields of a `PackedWeight` that say how its kernel takes rows of this type."""
    return {
        "int8_activations": uses_int8_activations(kernel, rows),
        "float_rows": keeps_floats(rows),
    }


def uses_int8_activations(kernel: str, rows: str) -> bool:
    """Whether a kernel rounds rows of this type to int8."""
    return (
        rows.startswith("int8")
        and kernel in kernel_names.ROUNDING
        and has(kernel_names.ROUNDING[kernel])
    )


def call(node: PackedWeight, x, bias, dtype, activation: int = 0):
    """The product with a matrix; of a stack, each selected matrix multiplies its own rows of x."""
    matrix_ids = jnp.zeros(0, jnp.int32) if node.matrix_ids is None else node.matrix_ids
    rows, scale = node.prepare_rows(
        x.reshape(*(() if node.matrix_ids is None else matrix_ids.shape), -1, math.prod(node.into))
    )
    if scale is not None:
        y = run_kernel(node, rows, matrix_ids, None, jnp.float32, 0) * scale
        return (y if bias is None else y + bias.reshape(-1)).astype(dtype)
    return run_kernel(node, rows, matrix_ids, bias, dtype, activation)


def run_kernel(node: PackedWeight, rows, matrix_ids, bias, dtype, activation: int):
    """Call the kernel with rows [..., T, K]."""
    if bias is None:
        bias_O = jnp.zeros(0, jnp.float32)
    else:
        bias_O = bias.reshape(-1).astype(jnp.float32)
        bias_O = jnp.pad(bias_O, (0, -bias_O.shape[0] % LANES))
    outputs = node.out[-1] if activation else math.prod(node.out)
    variants = (
        kernel_names.ROUNDING
        if node.int8_activations
        else kernel_names.FLOAT_ROWS
        if node.float_rows
        else {}
    )
    name = variants.get(node.kernel, node.kernel)
    run = jax.ffi.ffi_call(target(name), jax.ShapeDtypeStruct((*rows.shape[:-1], outputs), dtype))
    return run(
        rows,
        *jax.tree.leaves(node.replace(matrix_ids=None)),
        bias_O,
        matrix_ids,
        activation=np.int32(activation),
    )


def weight_of(w) -> Weight:
    """The weight, if it is packed; NotImplementedError if not."""
    if not isinstance(w, Weight) or not w.native:
        raise NotImplementedError("the weight is not laid out for the kernels")
    return w


def varies() -> None:
    """Batch-invariant: a row's result does not depend on the other rows."""
