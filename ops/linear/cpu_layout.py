"""Weights laid out for the kernels, once, while a model is loaded.

A format's own layout is in its file; here are that of dense weights, and what the formats make
theirs with.
"""

import ctypes
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ...sharding.spec import ArraySpec, empty
from ..native import has, kernel_names, library
from .cpu import LANES, Many, Product, Tiled
from .weight import Weight


def pack(spec: ArraySpec, leaf, rows: str = "bfloat16"):
    """A loaded leaf as the kernels want it, or as it is if no product of theirs takes it.

    `spec` is that of its dense form, `rows` the type of rows that it will meet, as
    `Weight.for_kernels` has it.
    """
    if isinstance(leaf, Weight):
        return leaf.for_kernels(rows)
    if (
        not isinstance(leaf, np.ndarray)
        or not spec.inputs
        or leaf.dtype.name not in kernel_names.DENSE
    ):
        return leaf
    if not has("pack", kernel_names.DENSE[leaf.dtype.name]):
        return leaf
    if not spec.stacked:
        return pack_dense(spec.inputs, leaf)
    inputs = tuple(axis - 1 for axis in spec.inputs)
    return pack_stack(len(leaf), lambda e: pack_dense(inputs, leaf[e]))


def pack_dense(inputs: tuple[int, ...], leaf: np.ndarray) -> Tiled:
    """A matrix whose products sum over the axes `inputs`, which are the first or the last."""
    others = tuple(axis for axis in range(leaf.ndim) if axis not in inputs)
    into, out = (tuple(leaf.shape[axis] for axis in axes) for axes in (inputs, others))
    matrix_KO = (
        leaf.reshape(math.prod(into), -1) if inputs[0] == 0 else leaf.reshape(-1, math.prod(into)).T
    )
    return Tiled(tile(matrix_KO, 4 // leaf.dtype.itemsize), into=into, out=out, inputs=inputs)


def tile(matrix_KO: np.ndarray, group: int) -> np.ndarray:
    """[K, O] in blocks of sixteen outputs."""
    K, O = matrix_KO.shape
    size = matrix_KO.dtype.itemsize
    step = 64 // min(size, 2)  # inputs that AMX takes at a time, padded with zeros
    padded = -(-K // step) * step
    out = empty((-(-O // LANES), padded // group, LANES, group), matrix_KO.dtype)
    strides = (stride // size for stride in matrix_KO.strides)
    sizes = map(ctypes.c_int64, (size, K, padded, O, group, *strides))
    tile_elements = library("pack").quire_tile
    tile_elements.restype = ctypes.c_bool
    if not tile_elements(address(matrix_KO), address(out), *sizes):
        raise TypeError(
            f"the matrix is of {matrix_KO.dtype}; its elements must have 1, 2 or 4 bytes"
        )
    return out


def tile_nibbles(packed_KO: np.ndarray, K: int, padded: int) -> np.ndarray:
    """[four_bits.count(K), O], two codes a byte, in blocks of sixteen outputs."""
    O = packed_KO.shape[1]
    packed_KO = np.ascontiguousarray(packed_KO)
    tiles = empty((-(-O // LANES), padded // 8, LANES), np.uint32)
    library("pack").quire_tile_int4(
        address(packed_KO), address(tiles), *map(ctypes.c_int64, (K, padded, O))
    )
    return tiles


def tile_sixes(codes_KO: np.ndarray, padded: int) -> np.ndarray:
    """Codes of six bits [K, O], a byte each, in blocks of sixteen outputs."""
    K, O = codes_KO.shape
    codes_KO = np.ascontiguousarray(codes_KO)
    tiles = empty((-(-O // LANES), padded // 16, 3, LANES), np.uint32)
    library("pack").quire_tile_int6(
        address(codes_KO), address(tiles), *map(ctypes.c_int64, (K, padded, O))
    )
    return tiles


def by_block(values_GO: np.ndarray) -> np.ndarray:
    """What groups of inputs have, in blocks of sixteen outputs."""
    padded = np.pad(values_GO, ((0, 0), (0, -values_GO.shape[1] % LANES)))
    return np.ascontiguousarray(padded.reshape(len(values_GO), -1, LANES).swapaxes(0, 1))


def pack_stack(E: int, matrix: Callable[[int], Any]) -> Many | None:
    """Matrix by matrix: beside what came there is one more copy, of as many bytes.

    None if no kernel takes them.
    """
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
