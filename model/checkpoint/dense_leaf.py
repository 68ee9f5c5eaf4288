"""Read one array of the weight tree from the checkpoint tensors that make it up."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...ops.quant import FormatError
from ...sharding.spec import ArraySpec, empty
from ..config import ModelError
from .safetensors import Tensor, fill


def read_leaf(
    spec: ArraySpec, sources, tensors: Mapping[str, Any], needed: Sequence[np.ndarray] | None = None
) -> np.ndarray:
    """Read an array. Elements outside of the `needed` masks (one per axis) may be uninitialised."""
    is_partial = needed is not None and not all(mask.all() for mask in needed)
    leaf = None
    for source in sources:
        tensor = tensors[source.name]
        at = source.at if isinstance(source.at, tuple) else (source.at,)
        cuts = () if needed is None else needed_block(needed, at)
        if cuts is None:
            continue
        value = tensor.mapped() if is_partial and isinstance(tensor, Tensor) else tensor.read()
        try:
            value = source.transform(value)
        except FormatError as error:
            raise ModelError(f"tensor {source.name!r} {error}") from None
        if (
            len(sources) == 1
            and value.shape == spec.shape
            and value.dtype == spec.dtype
            and value.flags.c_contiguous
        ):
            return value  # without a copy
        if leaf is None:
            leaf = empty(spec.shape, spec.dtype)
        out = leaf if at == () else leaf[at]
        fill(*(out[cuts], value[cuts]) if cuts else (out, value))
    assert leaf is not None, "a process has a part of every array"
    return leaf


def leaf_to_tensors(sources, leaf: np.ndarray) -> dict[str, np.ndarray]:
    """The inverse of `read_leaf`: the checkpoint tensors that make up an array."""
    tensors = {}
    for source in sources:
        # Reading permutes the elements: an array of indices sent through it gives the permutation.
        indices = source.transform(np.arange(math.prod(source.shape)).reshape(source.shape)).astype(
            np.int64
        )
        flat = np.empty(indices.size, leaf.dtype)
        flat[indices.reshape(-1)] = leaf[source.at].reshape(-1)
        tensors[source.name] = flat.reshape(source.shape)
    return tensors


def needed_block(needed: Sequence[np.ndarray], at: tuple[Any, ...]) -> tuple[slice, ...] | None:
    """The smallest block within the index `at` that has every needed element; None if none is."""
    cuts = []
    for mask, axis_index in zip(needed, at + (slice(None),) * (len(needed) - len(at)), strict=True):
        positions = np.flatnonzero(mask[axis_index])
        if not positions.size:
            return None
        if isinstance(axis_index, slice):
            cuts.append(slice(int(positions[0]), int(positions[-1]) + 1))
    return tuple(cuts)
