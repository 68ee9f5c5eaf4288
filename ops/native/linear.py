"""Weights as the kernels want them: nodes in place of arrays, made once while a model is loaded.

A node's `einsum` sums over the last axes of x; `node[tokens]` looks up rows of one that is also an embedding.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from . import kernel_names, target

LANES = 16  # outputs of a block
FUSED = {"silu": 1, "gelu_tanh": 2}  # activations that the kernels know


class Product:
    """What all nodes do; one that is a matrix of a stack says so by `which`."""

    which = None

    @property
    def node(self) -> Any:
        return self

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        lead = x.shape[: x.ndim - len(self.node.into)]
        return call(self.node, x, bias, dtype or x.dtype, which=self.which).reshape(*lead, *self.node.out)

    def gated(self, x, activation: str):
        """activation(gate) * up in one pass, where the outputs are [2, F]; None if the kernels cannot do that."""
        out = self.node.out
        if activation not in FUSED or len(out) != 2 or out[-1] % LANES:
            return None
        return call(self.node, x, None, x.dtype, FUSED[activation], self.which).reshape(*x.shape[:-1], out[-1])


@struct.dataclass
class Tiled(Product):
    """A float32 or bfloat16 weight."""

    tiles: Any  # [O / 16, K / group, 16, group]
    into: tuple[int, ...] = struct.field(pytree_node=False)
    out: tuple[int, ...] = struct.field(pytree_node=False)

    @property
    def kernel(self) -> str:
        return kernel_names.DENSE[self.tiles.dtype.name]

    def __getitem__(self, tokens_T):
        block, lane = tokens_T // LANES, tokens_T % LANES
        return self.tiles[block, :, lane].reshape(tokens_T.shape[0], -1)[:, : math.prod(self.into)]


@struct.dataclass
class TiledInt8(Product):
    """Signed bytes; in groups of four they meet rows of bytes, in groups of two rows of bfloat16."""

    tiles: Any  # [O / 16, K / group, 16, group]
    scale: Any  # float32 [O, padded]
    sum: Any  # int32 [O, padded]
    into: tuple[int, ...] = struct.field(pytree_node=False)
    out: tuple[int, ...] = struct.field(pytree_node=False)

    @property
    def kernel(self) -> str:
        return kernel_names.int8(dynamic=self.tiles.shape[-1] == 4)

    def __getitem__(self, tokens_T):
        block, lane = tokens_T // LANES, tokens_T % LANES
        rows = self.tiles[block, :, lane].reshape(tokens_T.shape[0], -1)[:, : math.prod(self.into)]
        return rows.astype(jnp.float32) * self.scale[tokens_T][:, None]


@struct.dataclass
class TiledInt4(Product):
    """Four bits a weight; see formats.h."""

    tiles: Any  # uint32 [O / 16, K / 8, 16]
    scale: Any  # float16 [O / 16, K / group, 16]
    zero: Any  # uint8, the same shape or empty
    into: tuple[int, ...] = struct.field(pytree_node=False)
    out: tuple[int, ...] = struct.field(pytree_node=False)
    kernel = "int4"


@struct.dataclass
class TiledMxfp4(Product):
    """Floats of four bits; see formats.h."""

    tiles: Any  # uint32 [O / 16, K / 8, 16]
    scale: Any  # uint8 [O / 16, K / 32, 16]
    into: tuple[int, ...] = struct.field(pytree_node=False)
    out: tuple[int, ...] = struct.field(pytree_node=False)
    kernel = "mxfp4"


@struct.dataclass
class Many:
    """A stack of matrices. A product names those that it wants, so that none is cut out of the stack before."""

    each: Any  # a node whose arrays are [E, ...]

    def pick(self, e) -> "One":
        return One(self.each, jnp.reshape(e, 1))

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        """Each matrix with rows of its own: x is [T, E, K]."""
        T, E = x.shape[:2]
        every = call(self.each, jnp.swapaxes(x, 0, 1), bias, dtype or x.dtype, which=jnp.arange(E))
        return jnp.swapaxes(every.reshape(E, T, *self.each.out), 0, 1)


@struct.dataclass
class One(Product):
    """A matrix of a stack."""

    each: Any
    which: Any  # int32 [1]

    @property
    def node(self) -> Any:
        return self.each


def call(node, x, bias, dtype, activation: int = 0, which=None):
    """The products with the matrices `which` of a stack, each with its share of the rows; or the only product."""
    stacked = () if which is None else which.shape
    rows = x.reshape(*stacked, -1, math.prod(node.into))
    which = jnp.zeros(0, jnp.int32) if which is None else which
    if bias is None:
        bias_O = jnp.zeros(0, jnp.float32)
    else:
        bias_O = bias.reshape(-1).astype(jnp.float32)
        bias_O = jnp.pad(bias_O, (0, -bias_O.shape[0] % LANES))
    outputs = node.out[-1] if activation else math.prod(node.out)
    run = jax.ffi.ffi_call(target(node.kernel), jax.ShapeDtypeStruct((*rows.shape[:-1], outputs), dtype))
    return run(rows, *jax.tree.leaves(node), bias_O, which, activation=np.int32(activation))
