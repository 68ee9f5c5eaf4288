"""Weights as the kernels want them: nodes in place of arrays, made once while a model is loaded.

A node's `einsum` sums over the last axes of x; `node[tokens]` looks up rows of one that is also an embedding.
"""

import ctypes
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ...sharding.spec import ArraySpec, empty
from ..quant.int4 import Int4
from ..quant.int8 import Int8
from ..quant.stack import Stack, one_of
from . import choice, has, library, target

LANES = 16  # outputs of a block
FUSED = {"silu": 1, "gelu_tanh": 2}  # activations that the kernels know


@struct.dataclass
class Tiled:
    """A float32 or bfloat16 weight."""

    tiles: Any  # [O / 16, K / group, 16, group]
    into: tuple[int, ...] = struct.field(pytree_node=False)
    out: tuple[int, ...] = struct.field(pytree_node=False)

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        return product(self, x, bias, dtype)

    def gated(self, x, activation: str):
        return gated(self, x, activation)

    def __getitem__(self, tokens_T):
        block, lane = tokens_T // LANES, tokens_T % LANES
        return self.tiles[block, :, lane].reshape(tokens_T.shape[0], -1)[:, : math.prod(self.into)]

    @property
    def kernel(self):
        return choice.DENSE[self.tiles.dtype.name]

    @property
    def arrays(self):
        return (self.tiles,)


@struct.dataclass
class TiledInt8:
    """Signed bytes; in groups of four they meet rows of bytes, in groups of two rows of bfloat16."""

    tiles: Any  # [O / 16, K / group, 16, group]
    scale: Any  # float32 [O, padded]
    sum: Any  # int32 [O, padded]
    into: tuple[int, ...] = struct.field(pytree_node=False)
    out: tuple[int, ...] = struct.field(pytree_node=False)

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        return product(self, x, bias, dtype)

    def gated(self, x, activation: str):
        return gated(self, x, activation)

    def __getitem__(self, tokens_T):
        block, lane = tokens_T // LANES, tokens_T % LANES
        rows = self.tiles[block, :, lane].reshape(tokens_T.shape[0], -1)[:, : math.prod(self.into)]
        return rows.astype(jnp.float32) * self.scale[tokens_T][:, None]

    @property
    def kernel(self):
        return choice.int8(dynamic=self.tiles.shape[-1] == 4)

    @property
    def arrays(self):
        return self.tiles, self.scale, self.sum


@struct.dataclass
class TiledInt4:
    """Four bits a weight; see linear.h."""

    tiles: Any  # uint32 [O / 16, K / 8, 16]
    scale: Any  # float16 [O / 16, K / group, 16]
    zero: Any  # uint8, the same shape or empty
    into: tuple[int, ...] = struct.field(pytree_node=False)
    out: tuple[int, ...] = struct.field(pytree_node=False)

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        return product(self, x, bias, dtype)

    def gated(self, x, activation: str):
        return gated(self, x, activation)

    @property
    def kernel(self):
        return "int4"

    @property
    def arrays(self):
        return self.tiles, self.scale, self.zero


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
class One:
    """A matrix of a stack."""

    each: Any
    which: Any  # int32 [1]

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        return product(self.each, x, bias, dtype, self.which)

    def gated(self, x, activation: str):
        return gated(self.each, x, activation, self.which)


def product(node, x, bias, dtype, which=None):
    """x over its last axes times the node, plus the bias."""
    lead = x.shape[: x.ndim - len(node.into)]
    return call(node, x, bias, dtype or x.dtype, which=which).reshape(*lead, *node.out)


def gated(node, x, activation: str, which=None):
    """activation(gate) * up in one pass, where the outputs are [2, F]; None if the kernels cannot do that."""
    half = node.out[-1]
    if activation not in FUSED or len(node.out) != 2 or half % LANES:
        return None
    return call(node, x, None, x.dtype, FUSED[activation], which).reshape(*x.shape[:-1], half)


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
    return run(rows, *node.arrays, bias_O, which, activation=np.int32(activation))


def pack(spec: ArraySpec, leaf):
    """A loaded leaf as the kernels want it, or as it is if no product of theirs takes it."""
    if isinstance(leaf, Int8):
        return pack_int8(leaf) if has("pack", choice.int8(leaf.dynamic)) else leaf
    if isinstance(leaf, Int4):
        return pack_int4(leaf) if has("pack", "int4") else leaf
    if spec.stacked and isinstance(leaf, (Stack, np.ndarray)):
        return pack_stack(spec, leaf)
    if not isinstance(leaf, np.ndarray) or not spec.inputs or leaf.dtype.name not in choice.DENSE:
        return leaf
    return pack_dense(spec, leaf) if has("pack", choice.DENSE[leaf.dtype.name]) else leaf


def pack_dense(spec: ArraySpec, leaf: np.ndarray) -> Tiled:
    into, out, matrix_KO = flat(spec, leaf)
    return Tiled(tile(matrix_KO, 4 // leaf.dtype.itemsize), into, out)


def flat(spec: ArraySpec, leaf) -> tuple[tuple[int, ...], tuple[int, ...], np.ndarray]:
    """The sizes of the axes that are summed over and of the others, and the weight as one matrix [K, O]."""
    others = tuple(axis for axis in range(leaf.ndim) if axis not in spec.inputs)
    into, out = (tuple(leaf.shape[axis] for axis in axes) for axes in (spec.inputs, others))
    if spec.inputs[0] == 0:
        return into, out, leaf.reshape(math.prod(into), -1)
    return into, out, leaf.reshape(-1, math.prod(into)).T


def tile(matrix_KO: np.ndarray, group: int) -> np.ndarray:
    """[K, O] in blocks of sixteen outputs."""
    K, O = matrix_KO.shape
    size = matrix_KO.dtype.itemsize
    step = 64 // min(size, 2)  # inputs that AMX takes at a time, padded with zeros
    padded = -(-K // step) * step
    out = empty((-(-O // LANES), padded // group, LANES, group), matrix_KO.dtype)
    strides = (stride // size for stride in matrix_KO.strides)
    sizes = map(ctypes.c_int64, (size, K, padded, O, group, *strides))
    library("pack").quire_tile(address(matrix_KO), address(out), *sizes)
    return out


def pack_int8(leaf: Int8) -> TiledInt8:
    codes_KO = np.asarray(leaf.codes).reshape(math.prod(leaf.into), -1)
    tiles = tile(codes_KO, 4 if leaf.dynamic else 2)
    missing = tiles.shape[0] * LANES - codes_KO.shape[1]
    scale_O = np.pad(np.asarray(leaf.scale, np.float32).reshape(-1), (0, missing))
    return TiledInt8(tiles, scale_O, np.pad(codes_KO.sum(0, dtype=np.int32), (0, missing)), leaf.into, leaf.out)


def pack_int4(leaf: Int4) -> TiledInt4:
    K, O = math.prod(leaf.into), math.prod(leaf.out)
    packed_KO = np.ascontiguousarray(np.asarray(leaf.codes).reshape(-1, O))
    padded = np.asarray(leaf.scale).reshape(-1, O).shape[0] * leaf.group
    tiles = empty((-(-O // LANES), padded // 8, LANES), np.uint32)
    library("pack").quire_tile_int4(address(packed_KO), address(tiles), *map(ctypes.c_int64, (K, padded, O)))

    def by_block(values_GO):
        groups = values_GO.shape[0]
        padded = np.pad(values_GO, ((0, 0), (0, -O % LANES)))
        return np.ascontiguousarray(padded.reshape(groups, -1, LANES).swapaxes(0, 1))

    scale = by_block(np.asarray(leaf.scale).reshape(-1, O))
    zero = np.zeros(0, np.uint8) if leaf.zero is None else by_block(np.asarray(leaf.zero).reshape(-1, O))
    return TiledInt4(tiles, scale, zero, leaf.into, leaf.out)


def pack_stack(spec: ArraySpec, leaf: Stack | np.ndarray) -> Many | Stack | np.ndarray:
    """Matrix by matrix: beside what came there is one more copy, of as many bytes."""
    first, one, E = leaf[0], one_of(spec), spec.shape[0]
    if (packed := pack(one, first)) is first:
        return leaf
    out = jax.tree.map(lambda array: empty((E, *array.shape), array.dtype), packed)
    for e in range(E):
        jax.tree.map(
            lambda whole, array, e=e: np.copyto(whole[e], array), out, packed if e == 0 else pack(one, leaf[e])
        )
    return Many(out)


def address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
