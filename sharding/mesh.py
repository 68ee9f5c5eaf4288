"""The device mesh, and the mesh axes that each logical axis of an array is split over."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .device_axes import ONE_DEVICE, Axis, DeviceAxes
from .spec import ArraySpec, Interleaved

AXES = ("data", "pipe", "context", "tensor", "expert")
# From the slowest to the fastest varying: neighbouring devices split `tensor`, which communicates
# most.
DEVICE_ORDER = ("data", "pipe", "context", "expert", "tensor")

MeshAxes = str | tuple[str, ...] | None  # of several, the first varies slowest
RULES: dict[str, MeshAxes] = {
    "vocab": "tensor",
    "heads": "tensor",
    "ffn": "tensor",
    "experts": ("data", "context", "expert"),
    "embed": None,
}
PADDED = {"vocab"}  # logical axes that are padded to divide

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
    available = jax.devices() if devices is None else devices
    if min(shape) < 1 or math.prod(shape) > len(available):
        requested = " x ".join(f"{name} {size}" for name, size in zip(AXES, shape, strict=True))
        raise ValueError(
            f"a mesh of {requested} needs {math.prod(shape)} devices; there are {len(available)}"
        )
    sizes = dict(zip(AXES, shape, strict=True))
    grid = np.array(available[: math.prod(shape)], object).reshape(
        [sizes[name] for name in DEVICE_ORDER]
    )
    chosen = grid.transpose([DEVICE_ORDER.index(name) for name in AXES]).reshape(-1).tolist()
    return jax.make_mesh(shape, AXES, devices=chosen, axis_types=(AxisType.Auto,) * len(AXES))


def stage_meshes(mesh: Mesh) -> list[Mesh]:
    """A mesh for each pipeline stage, with the same axes."""
    axis = AXES.index("pipe")
    return [
        Mesh(devices, AXES, axis_types=mesh.axis_types)
        for devices in np.split(mesh.devices, mesh.shape["pipe"], axis)
    ]


def sharding(spec: ArraySpec, mesh: Mesh | AbstractMesh, rules: Rules = RULES) -> NamedSharding:
    """The sharding of an array: each logical axis over the mesh axes of its rule, or unsplit."""
    axes_by_dim = [mesh_axes(axis, rules) for axis in spec.axes]
    for axis, size, mesh_axis in zip(spec.axes, spec.shape, axes_by_dim, strict=True):
        if mesh_axis is not None:
            shard_layout(axis, size, devices_along(mesh_axis, mesh), mesh_axis)
    return NamedSharding(mesh, PartitionSpec(*axes_by_dim))


def devices_along(over: MeshAxes, mesh: Mesh | AbstractMesh) -> int:
    """The number of devices along these axes."""
    names = (over,) if isinstance(over, str) else over or ()
    return math.prod(mesh.shape[name] for name in names)


def mesh_axes(axis: str | Interleaved | None, rules: Rules) -> MeshAxes:
    """The mesh axes that the rules assign to a logical axis."""
    name = axis.axis if isinstance(axis, Interleaved) else axis
    if name is None:
        return None
    if name not in rules:
        raise ValueError(
            f"no rule for the logical axis {name!r}; there are rules for {', '.join(rules)}"
        )
    return rules[name]


@lru_cache(256)  # layers have the same axes
def shard_layout(
    axis: str | Interleaved | None, size: int, devices: int, over: MeshAxes
) -> np.ndarray | None:
    """The indices of an axis in the order in which devices store them, device by device; -1 is
    padding.

    None if that is the identity: no index twice and no padding.
    """
    name, sizes, shared, repeated, widths = (
        axis if isinstance(axis, Interleaved) else Interleaved(axis or "", (size,))
    )
    widths = widths or (1,) * len(sizes)

    def fits(index: int, devices: int) -> bool:
        is_replicated = index in shared and devices % sizes[index] == 0
        return name in PADDED or (sizes[index] + repeated) % devices == 0 or is_replicated

    total = sum(run_size * width for run_size, width in zip(sizes, widths, strict=True))
    elements_by_run = []
    for index, run_size in enumerate(sizes):
        if not fits(index, devices):
            fitting = [
                n
                for n in range(1, 2 * devices + 1)
                if all(fits(run, n) for run in range(len(sizes)))
            ]
            mesh_axis = over if isinstance(over, str) else " x ".join(over or ())
            raise ValueError(
                f"{name!r} has size {run_size + repeated}, which does not divide over "
                f"{mesh_axis}={devices}; {mesh_axis} could be {', '.join(map(str, fitting))}"
            )
        if index in shared and run_size < devices:
            elements = np.repeat(np.arange(run_size), devices // run_size)
        else:
            elements = np.arange(-(-(run_size + repeated) // devices) * devices)
            elements = np.where(
                (elements < run_size) | (elements >= run_size + repeated),
                elements,
                elements % run_size,
            )
        elements = np.where(elements < run_size, elements, -1)
        elements = np.where(
            elements[:, None] < 0, -1, elements[:, None] * widths[index] + np.arange(widths[index])
        )
        elements_by_run.append(elements.reshape(devices, -1))
    starts = np.cumsum(
        [0, *(run_size * width for run_size, width in zip(sizes, widths, strict=True))][:-1]
    )
    placed = [
        np.where(elements < 0, -1, start + elements)
        for start, elements in zip(starts, elements_by_run, strict=True)
    ]
    layout = np.concatenate(placed, axis=1).reshape(-1)
    if size != total:  # several numbers for each element
        elements_per_index = size // total
        layout = (layout[:, None] * elements_per_index + np.arange(elements_per_index)).reshape(-1)
    return None if layout.size == size and (layout == np.arange(size)).all() else layout


def shard_layouts(
    spec: ArraySpec, mesh: Mesh | AbstractMesh, rules: Rules = RULES
) -> list[np.ndarray | None]:
    """The `shard_layout` of each axis."""
    axes_by_dim = [mesh_axes(axis, rules) for axis in spec.axes]
    return [
        None
        if mesh_axis is None
        else shard_layout(axis, size, devices_along(mesh_axis, mesh), mesh_axis)
        for axis, size, mesh_axis in zip(spec.axes, spec.shape, axes_by_dim, strict=True)
    ]


def take_elements(leaf, elements: np.ndarray, axis: int):
    """These elements of an axis, with zeros for padding."""
    values = np.take(leaf, np.maximum(elements, 0), axis=axis)
    is_padding = (elements < 0).reshape(-1, *[1] * (leaf.ndim - 1 - axis))
    return np.where(is_padding, np.zeros((), values.dtype), values) if is_padding.any() else values


def shardings(tree, mesh: Mesh | AbstractMesh, rules: Rules = RULES):
    """The shardings of a tree of specs, as a tree of the same structure."""
    return jax.tree.map(lambda spec: sharding(spec, mesh, rules), tree)


def device_axes(mesh: Mesh | None) -> DeviceAxes:
    """The axes of a mesh, for code that runs on each device."""
    if mesh is None:
        return ONE_DEVICE
    tensor, expert, context, data = (
        Axis(name, mesh.shape[name]) for name in ("tensor", "expert", "context", "data")
    )
    return DeviceAxes(tensor, expert, context, data=data)
