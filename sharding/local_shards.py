"""The shards on this process's devices: the rest of an array is neither read nor stored here."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, Sharding

from .mesh import shard_layouts, sharding, take_elements
from .spec import ArraySpec


def sharded_shape(spec: ArraySpec, mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
    """The shape of the whole sharded array, with replicated elements and padding."""
    layouts = shard_layouts(spec, mesh)
    return tuple(
        size if order is None else order.size
        for size, order in zip(spec.shape, layouts, strict=True)
    )


def as_stored(spec: ArraySpec, mesh: Mesh) -> bool:
    """Whether the shards are equal slices of the stored array."""
    return all(order is None for order in shard_layouts(spec, mesh))


def local_elements(spec: ArraySpec, mesh: Mesh) -> list[np.ndarray]:
    """For each axis, a mask of the stored elements that this process holds a part of."""
    layouts = [
        np.arange(size) if order is None else order
        for size, order in zip(spec.shape, shard_layouts(spec, mesh), strict=True)
    ]
    masks = [np.zeros(size, bool) for size in spec.shape]
    for index in (
        sharding(spec, mesh).addressable_devices_indices_map(sharded_shape(spec, mesh)).values()
    ):
        for mask, order, axis_slice in zip(masks, layouts, index or (), strict=False):
            elements = order[axis_slice]
            mask[elements[elements >= 0]] = True
    return masks


def shard(leaf: np.ndarray, spec: ArraySpec, mesh: Mesh, target: Sharding) -> jax.Array:
    """Build a sharded array from a host array.

    Args:
        leaf: the host array. Elements that this process does not hold may have any value.
        target: the sharding of the spec, or a finer one.
    """
    layouts = shard_layouts(spec, mesh)

    def shard_at(index: Any) -> np.ndarray:
        value = leaf
        for axis, (order, axis_slice) in enumerate(zip(layouts, index, strict=True)):
            value = (
                value[(slice(None),) * axis + (axis_slice,)]
                if order is None
                else take_elements(value, order[axis_slice], axis)
            )
        return value

    return jax.make_array_from_callback(sharded_shape(spec, mesh), target, shard_at)
