"""A stack of matrices in a format: one matrix's node, with a leading axis in all its arrays."""

from dataclasses import replace
from typing import Any

import jax

from ...sharding.spec import ArraySpec
from ..linear.cpu_layout import pack_stack
from ..linear.weight import GpuMatrix, Weight


class Stack(Weight):
    """A stack of quantised matrices. `stack[e]` is the node of one matrix, and reads no other."""

    each: Any  # a node whose arrays are [E, ...]

    def gpu_matrix(self) -> GpuMatrix:
        return self.each.gpu_matrix()

    def __getitem__(self, index):
        return jax.tree.map(lambda leaf: leaf[index], self.each)

    def for_kernels(self, rows: str) -> Weight:
        E = len(jax.tree.leaves(self.each)[0])
        return pack_stack(E, lambda e: self[e].for_kernels(rows)) or self


def matrix_spec(dense: ArraySpec) -> ArraySpec:
    """The spec of one matrix of a stack."""
    inputs = tuple(axis - 1 for axis in dense.inputs)
    return replace(dense, shape=dense.shape[1:], axes=dense.axes[1:], inputs=inputs, stacked=False)


def stack_specs(node: Any, dense: ArraySpec) -> Stack:
    """The specs of a stack of nodes, with the leading axis of the dense stack."""
    E = dense.shape[0]
    axis = dense.axes[0]
    return Stack(
        jax.tree.map(
            lambda leaf: replace(leaf, shape=(E, *leaf.shape), axes=(axis, *leaf.axes)), node
        )
    )
