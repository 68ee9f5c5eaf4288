"""What the devices of this process have of an array that is dealt to a mesh: nothing else need be read or kept here."""

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, Sharding

from .mesh import orders, sharding, taken
from .spec import ArraySpec

Index = tuple[slice | np.ndarray, ...]


def dealt_shape(spec: ArraySpec, mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
    """With the elements that several devices have, and those that make an axis divide."""
    found = orders(spec, mesh)
    return tuple(size if order is None else order.size for size, order in zip(spec.shape, found, strict=True))


def as_stored(spec: ArraySpec, mesh: Mesh) -> bool:
    """Whether equal cuts of the array as it is stored give each device its own."""
    return all(order is None for order in orders(spec, mesh))


def needed(spec: ArraySpec, mesh: Mesh) -> list[np.ndarray]:
    """For each axis, which of the stored elements this process has a part of."""
    found = [
        np.arange(size) if order is None else order for size, order in zip(spec.shape, orders(spec, mesh), strict=True)
    ]
    wanted = [np.zeros(size, bool) for size in spec.shape]
    for index in sharding(spec, mesh).addressable_devices_indices_map(dealt_shape(spec, mesh)).values():
        for mask, order, cut in zip(wanted, found, index or (), strict=False):
            elements = order[cut]
            mask[elements[elements >= 0]] = True
    return wanted


def place(leaf: np.ndarray, spec: ArraySpec, mesh: Mesh, where: Sharding) -> jax.Array:
    """An array on a mesh, where the parts are cuts of those that `sharding` gives, or these.

    Of what this process does not need the leaf may hold anything.
    """
    found = orders(spec, mesh)

    def part(index: tuple[slice, ...]) -> np.ndarray:
        value = leaf
        for at, (order, cut) in enumerate(zip(found, index, strict=True)):
            value = value[(slice(None),) * at + (cut,)] if order is None else taken(value, order[cut], at)
        return value

    return jax.make_array_from_callback(dealt_shape(spec, mesh), where, part)
