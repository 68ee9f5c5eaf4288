"""A leaf of the weight tree that is one array, read from the tensors of a checkpoint."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...ops.quant import FormatError
from ...sharding.spec import ArraySpec, empty
from ..config import ModelError
from .safetensors import Tensor, fill


def read_leaf(
    spec: ArraySpec, parts, tensors: dict[str, Any], needed: Sequence[np.ndarray] | None = None
) -> np.ndarray:
    """The array. `needed` marks for each axis the elements that are; the others may come out as anything."""
    few, leaf = needed is not None and not all(mask.all() for mask in needed), None
    for part in parts:
        source, at = tensors[part.name], part.at if isinstance(part.at, tuple) else (part.at,)
        cuts = () if needed is None else bounds(needed, at)
        if cuts is None:
            continue
        value = source.mapped() if few and isinstance(source, Tensor) else source.read()
        try:
            value = part.turn(value)
        except FormatError as error:
            raise ModelError(f"tensor {part.name!r} {error}") from None
        if len(parts) == 1 and value.shape == spec.shape and value.dtype == spec.dtype and value.flags.c_contiguous:
            return value  # as it was read
        if leaf is None:
            leaf = empty(spec.shape, spec.dtype)
        out = leaf if at == () else leaf[at]
        fill(*(out[cuts], value[cuts]) if cuts else (out, value))
    assert leaf is not None, "a process has a part of every array"
    return leaf


def unread_leaf(parts, leaf: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors that `read_leaf` made a leaf of."""
    tensors = {}
    for part in parts:
        # Reading is a permutation: sent through it, the numbers of the places tell where each value came from.
        places = part.turn(np.arange(math.prod(part.shape)).reshape(part.shape)).astype(np.int64)
        flat = np.empty(places.size, leaf.dtype)
        flat[places.reshape(-1)] = leaf[part.at].reshape(-1)
        tensors[part.name] = flat.reshape(part.shape)
    return tensors


def bounds(needed: Sequence[np.ndarray], at: tuple[Any, ...]) -> tuple[slice, ...] | None:
    """Within the place `at`, the smallest block with every needed element; None where none is needed."""
    cuts = []
    for mask, where in zip(needed, at + (slice(None),) * (len(needed) - len(at)), strict=True):
        found = np.flatnonzero(mask[where])
        if not found.size:
            return None
        if isinstance(where, slice):
            cuts.append(slice(int(found[0]), int(found[-1]) + 1))
    return tuple(cuts)
