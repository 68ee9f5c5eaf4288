"""Weights laid out for the kernels, once, while a model is loaded."""

import ctypes
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ...sharding.spec import ArraySpec, empty
from ..quant.int4 import Int4
from ..quant.int8 import Int8
from ..quant.mxfp4 import Mxfp4
from ..quant.stack import Stack, one_of
from . import has, kernel_names, library
from .linear import LANES, Many, Product, Tiled, TiledInt4, TiledInt8, TiledMxfp4


def pack(spec: ArraySpec, leaf):
    """A loaded leaf as the kernels want it, or as it is if no product of theirs takes it."""
    if isinstance(leaf, Int8):
        return pack_int8(leaf) if has("pack", kernel_names.int8(leaf.dynamic)) else leaf
    if isinstance(leaf, Int4):
        return pack_int4(leaf) if has("pack", "int4") else leaf
    if isinstance(leaf, Mxfp4):
        if not has("pack", "mxfp4"):
            return leaf
        return pack_stack(len(leaf.blocks), lambda e: pack_mxfp4(leaf.blocks[e], leaf.scales[e]))
    if spec.stacked and isinstance(leaf, (Stack, np.ndarray)):
        one = one_of(spec)
        return pack_stack(spec.shape[0], lambda e: pack(one, leaf[e])) or leaf
    if not isinstance(leaf, np.ndarray) or not spec.inputs or leaf.dtype.name not in kernel_names.DENSE:
        return leaf
    return pack_dense(spec, leaf) if has("pack", kernel_names.DENSE[leaf.dtype.name]) else leaf


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
    padded = np.asarray(leaf.scale).reshape(-1, O).shape[0] * leaf.group
    tiles = tile_nibbles(np.asarray(leaf.codes).reshape(-1, O), K, padded)
    scale = by_block(np.asarray(leaf.scale).reshape(-1, O))
    zero = np.zeros(0, np.uint8) if leaf.zero is None else by_block(np.asarray(leaf.zero).reshape(-1, O))
    return TiledInt4(tiles, scale, zero, leaf.into, leaf.out)


def tile_nibbles(packed_KO: np.ndarray, K: int, padded: int) -> np.ndarray:
    """[K / 2, O], two codes a byte, in blocks of sixteen outputs."""
    O, packed_KO = packed_KO.shape[1], np.ascontiguousarray(packed_KO)
    tiles = empty((-(-O // LANES), padded // 8, LANES), np.uint32)
    library("pack").quire_tile_int4(address(packed_KO), address(tiles), *map(ctypes.c_int64, (K, padded, O)))
    return tiles


def by_block(values_GO: np.ndarray) -> np.ndarray:
    """What groups of inputs have, in blocks of sixteen outputs."""
    padded = np.pad(values_GO, ((0, 0), (0, -values_GO.shape[1] % LANES)))
    return np.ascontiguousarray(padded.reshape(len(values_GO), -1, LANES).swapaxes(0, 1))


def pack_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> TiledMxfp4:
    """One matrix."""
    half, *out = blocks.shape
    tiles = tile_nibbles(blocks.reshape(half, -1), 2 * half, 2 * half)
    return TiledMxfp4(tiles, by_block(scales.reshape(len(scales), -1)), (2 * half,), tuple(out))


def pack_stack(E: int, matrix: Callable[[int], Any]) -> Many | None:
    """Matrix by matrix: beside what came there is one more copy, of as many bytes. None if no kernel takes them."""
    stack = None
    for e in range(E):
        node = matrix(e)
        if not isinstance(node, Product):
            return None
        if stack is None:
            stack = jax.tree.map(lambda array: empty((E, *array.shape), array.dtype), node)
        jax.tree.map(lambda whole, array, e=e: np.copyto(whole[e], array), stack, node)
    return Many(stack)


def address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
