"""Packs weights into the layouts of the native kernels, once, while a model is loaded.

This module packs dense weights and has the functions with which the quantised formats in
`ops/quant` pack theirs.
"""

import ctypes
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ...sharding.spec import ArraySpec, empty
from ..native import has, kernel_names, library
from .cpu import LANES, PackedStack, PackedWeight, TiledDense
from .weight import Weight


def pack(spec: ArraySpec, leaf, rows: str = "bfloat16"):
    """Pack a loaded leaf; returned unchanged if no kernel takes it.

    Args:
        spec: Spec of the leaf's dense form.
        rows: Type of the rows that will be multiplied with it; see `Weight.for_kernels`.
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


def pack_dense(inputs: tuple[int, ...], leaf: np.ndarray) -> TiledDense:
    """Pack an array whose products sum over the axes `inputs`, which are its first or its last."""
    output_axes = tuple(axis for axis in range(leaf.ndim) if axis not in inputs)
    into, out = (tuple(leaf.shape[axis] for axis in axes) for axes in (inputs, output_axes))
    matrix_KO = (
        leaf.reshape(math.prod(into), -1) if inputs[0] == 0 else leaf.reshape(-1, math.prod(into)).T
    )
    return TiledDense(tile(matrix_KO, 4 // leaf.dtype.itemsize), into=into, out=out, inputs=inputs)


def tile(matrix_KO: np.ndarray, group: int) -> np.ndarray:
    """Lay out a matrix as [blocks of 16 outputs, K / group, 16, group]; K is padded with zeros."""
    K, O = matrix_KO.shape
    size = matrix_KO.dtype.itemsize
    step = 64 // min(size, 2)  # inputs that an AMX instruction takes
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
    """Lay out packed codes [four_bits.count(K), O], two a byte, in blocks of 16 outputs."""
    O = packed_KO.shape[1]
    packed_KO = np.ascontiguousarray(packed_KO)
    tiles = empty((-(-O // LANES), padded // 8, LANES), np.uint32)
    library("pack").quire_tile_int4(
        address(packed_KO), address(tiles), *map(ctypes.c_int64, (K, padded, O))
    )
    return tiles


# By the bits of a code: so many neighbouring inputs of an output share so many 32-bit words.
WORDS = {5: (32, 5), 6: (16, 3)}


def tile_bits(codes_KO: np.ndarray, bits: int, padded: int) -> np.ndarray:
    """Pack codes [K, O] of five or six bits, one a byte, densely in blocks of 16 outputs."""
    K, O = codes_KO.shape
    inputs, words = WORDS[bits]
    codes_KO = np.ascontiguousarray(codes_KO)
    tiles = empty((-(-O // LANES), padded // inputs, words, LANES), np.uint32)
    pack_codes = getattr(library("pack"), f"quire_tile_int{bits}")
    pack_codes(address(codes_KO), address(tiles), *map(ctypes.c_int64, (K, padded, O)))
    return tiles


def by_block(values_GO: np.ndarray) -> np.ndarray:
    """Lay out group values, such as scales [groups, O], in blocks of 16 outputs."""
    padded = np.pad(values_GO, ((0, 0), (0, -values_GO.shape[1] % LANES)))
    return np.ascontiguousarray(padded.reshape(len(values_GO), -1, LANES).swapaxes(0, 1))


def pack_stack(E: int, matrix: Callable[[int], Any]) -> PackedStack | None:
    """Pack a stack matrix by matrix; None if no kernel takes them.

    Besides the unpacked weights only the packed stack is in memory, and one packed matrix.
    """
    stack = None
    for e in range(E):
        node = matrix(e)
        if not isinstance(node, PackedWeight):
            return None
        if stack is None:
            stack = jax.tree.map(lambda array: empty((E, *array.shape), array.dtype), node)
        jax.tree.map(lambda stacked, array, e=e: np.copyto(stacked[e], array), stack, node)
    return PackedStack(stack)


def address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
