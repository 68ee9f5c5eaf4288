"""The device mesh, and which of its axes each logical axis of an array is split over."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .device_axes import ONE_DEVICE, Axis, DeviceAxes
from .spec import ArraySpec, Runs

AXES = ("data", "pipe", "context", "tensor", "expert")
# From the slowest to the fastest: neighbouring devices, as on one host, are parts of `tensor`, which sends the most.
DEVICE_ORDER = ("data", "pipe", "context", "expert", "tensor")

MeshAxes = str | tuple[str, ...] | None  # of several the first changes the slowest
RULES: dict[str, MeshAxes] = {
    "vocab": "tensor", "heads": "tensor", "ffn": "tensor", "experts": ("data", "context", "expert"), "embed": None,
}  # fmt: skip
PADDED = {"vocab"}  # logical axes that are padded where they do not divide

Rules = Mapping[str, MeshAxes]


def make_mesh(
    devices: Sequence[Any] | None = None,
    *,
    data: int = 1,
    pipe: int = 1,
    context: int = 1,
    tensor: int = 1,
    expert: int = 1,
) -> Mesh:
    """A mesh with all of `AXES`, on the first devices that it needs."""
    shape = (data, pipe, context, tensor, expert)
    found = jax.devices() if devices is None else devices
    if min(shape) < 1 or math.prod(shape) > len(found):
        wanted = " x ".join(f"{name} {size}" for name, size in zip(AXES, shape, strict=True))
        raise ValueError(f"a mesh of {wanted} needs {math.prod(shape)} devices; there are {len(found)}")
    sizes = dict(zip(AXES, shape, strict=True))
    grid = np.array(found[: math.prod(shape)], object).reshape([sizes[name] for name in DEVICE_ORDER])
    chosen = grid.transpose([DEVICE_ORDER.index(name) for name in AXES]).reshape(-1).tolist()
    return jax.make_mesh(shape, AXES, devices=chosen, axis_types=(AxisType.Auto,) * len(AXES))


def stage_meshes(mesh: Mesh) -> list[Mesh]:
    """A mesh for each pipeline stage, with the same axes."""
    at = AXES.index("pipe")
    return [
        Mesh(devices, AXES, axis_types=mesh.axis_types) for devices in np.split(mesh.devices, mesh.shape["pipe"], at)
    ]


def sharding(spec: ArraySpec, mesh: Mesh | AbstractMesh, rules: Rules = RULES) -> NamedSharding:
    """The sharding of an array: each logical axis over the mesh axes that the rules name, or unsplit."""
    over = [mesh_axes(axis, rules) for axis in spec.axes]
    for axis, size, name in zip(spec.axes, spec.shape, over, strict=True):
        if name is not None:
            element_order(axis, size, devices_along(name, mesh), name)
    return NamedSharding(mesh, PartitionSpec(*over))


def devices_along(over: MeshAxes, mesh: Mesh | AbstractMesh) -> int:
    """The number of devices along these axes."""
    names = (over,) if isinstance(over, str) else over or ()
    return math.prod(mesh.shape[name] for name in names)


def mesh_axes(axis: str | Runs | None, rules: Rules) -> MeshAxes:
    """The mesh axes that the rules name for a logical axis."""
    name = axis.axis if isinstance(axis, Runs) else axis
    if name is None:
        return None
    if name not in rules:
        raise ValueError(f"no rule for the logical axis {name!r}; there are rules for {', '.join(rules)}")
    return rules[name]


@lru_cache(256)  # the layers of a model have the same axes
def element_order(axis: str | Runs | None, size: int, devices: int, over: MeshAxes) -> np.ndarray | None:
    """The elements of an axis in the order in which the devices hold them, device after device; -1 is padding.

    None where that is their own order, with no element twice and no padding.
    """
    name, runs, shared, again, widths = axis if isinstance(axis, Runs) else Runs(axis or "", (size,))
    widths = widths or (1,) * len(runs)

    def fits(at: int, devices: int) -> bool:
        return name in PADDED or (runs[at] + again) % devices == 0 or (at in shared and devices % runs[at] == 0)

    whole, parts = sum(run * width for run, width in zip(runs, widths, strict=True)), []
    for at, run in enumerate(runs):
        if not fits(at, devices):
            fitting = [n for n in range(1, 2 * devices + 1) if all(fits(each, n) for each in range(len(runs)))]
            where = over if isinstance(over, str) else " x ".join(over or ())
            raise ValueError(
                f"{name!r} has size {run + again}, which does not divide over {where}={devices}; "
                f"{where} could be {', '.join(map(str, fitting))}"
            )
        if at in shared and run < devices:
            part = np.repeat(np.arange(run), devices // run)
        else:
            part = np.arange(-(-(run + again) // devices) * devices)
            part = np.where((part < run) | (part >= run + again), part, part % run)
        part = np.where(part < run, part, -1)
        part = np.where(part[:, None] < 0, -1, part[:, None] * widths[at] + np.arange(widths[at]))
        parts.append(part.reshape(devices, -1))
    starts = np.cumsum([0, *(run * width for run, width in zip(runs, widths, strict=True))][:-1])
    placed = [np.where(part < 0, -1, start + part) for start, part in zip(starts, parts, strict=True)]
    found = np.concatenate(placed, axis=1).reshape(-1)
    if size != whole:  # elements of several numbers each
        each = size // whole
        found = (found[:, None] * each + np.arange(each)).reshape(-1)
    return None if found.size == size and (found == np.arange(size)).all() else found


def element_orders(spec: ArraySpec, mesh: Mesh | AbstractMesh, rules: Rules = RULES) -> list[np.ndarray | None]:
    """`element_order` of each axis."""
    over = [mesh_axes(axis, rules) for axis in spec.axes]
    return [
        None if name is None else element_order(axis, size, devices_along(name, mesh), name)
        for axis, size, name in zip(spec.axes, spec.shape, over, strict=True)
    ]


def take_elements(leaf, found: np.ndarray, at: int):
    """These elements of axis `at`, with zeros for padding."""
    part = np.take(leaf, np.maximum(found, 0), axis=at)
    lost = (found < 0).reshape(-1, *[1] * (leaf.ndim - 1 - at))
    return np.where(lost, np.zeros((), part.dtype), part) if lost.any() else part


def shardings(tree, mesh: Mesh | AbstractMesh, rules: Rules = RULES):
    """A tree of specs with the sharding of each in its place."""
    return jax.tree.map(lambda spec: sharding(spec, mesh, rules), tree)


def device_axes(mesh: Mesh | None) -> DeviceAxes:
    """The axes of a mesh, for the code that runs on each device."""
    if mesh is None:
        return ONE_DEVICE
    tensor, expert, context, data = (Axis(name, mesh.shape[name]) for name in ("tensor", "expert", "context", "data"))
    return DeviceAxes(tensor, expert, context, data=data)
