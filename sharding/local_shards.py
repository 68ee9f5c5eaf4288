"""The shards held by this process's devices: nothing else of an array need be read or kept here."""

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, Sharding

from .mesh import element_orders, sharding, take_elements
from .spec import ArraySpec


def sharded_shape(spec: ArraySpec, mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
    """The shape of the whole sharded array: with the elements that several devices hold, and padding to divide."""
    found = element_orders(spec, mesh)
    return tuple(size if order is None else order.size for size, order in zip(spec.shape, found, strict=True))


def as_stored(spec: ArraySpec, mesh: Mesh) -> bool:
    """Whether the shards are equal cuts of the array as it is stored."""
    return all(order is None for order in element_orders(spec, mesh))


def local_elements(spec: ArraySpec, mesh: Mesh) -> list[np.ndarray]:
    """For each axis a mask of the stored elements that this process holds a part of."""
    found = [
        np.arange(size) if order is None else order
        for size, order in zip(spec.shape, element_orders(spec, mesh), strict=True)
    ]
    wanted = [np.zeros(size, bool) for size in spec.shape]
    for index in sharding(spec, mesh).addressable_devices_indices_map(sharded_shape(spec, mesh)).values():
        for mask, order, cut in zip(wanted, found, index or (), strict=False):
            elements = order[cut]
            mask[elements[elements >= 0]] = True
    return wanted


def shard(leaf: np.ndarray, spec: ArraySpec, mesh: Mesh, where: Sharding) -> jax.Array:
    """Builds a sharded array from a host array.

    `where` is the spec's sharding or a finer one. The elements that this process does not hold may have any value.
    """
    found = element_orders(spec, mesh)

    def part(index: tuple[slice, ...]) -> np.ndarray:
        value = leaf
        for at, (order, cut) in enumerate(zip(found, index, strict=True)):
            value = value[(slice(None),) * at + (cut,)] if order is None else take_elements(value, order[cut], at)
        return value

    return jax.make_array_from_callback(sharded_shape(spec, mesh), where, part)
