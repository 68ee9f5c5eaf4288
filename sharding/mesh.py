"""The device mesh, and which of its axes each logical axis of an array is split over."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .device_axes import ALONE, Axis, Team
from .spec import ArraySpec, Runs

AXES = ("data", "pipe", "context", "tensor", "expert")
# How they lie on the devices: neighbours, as on one host, are parts of `tensor`, which sends the most.
APART = ("data", "pipe", "context", "expert", "tensor")

Over = str | tuple[str, ...] | None  # axes of the mesh; of several the first changes the slowest
RULES: dict[str, Over] = {
    "vocab": "tensor", "heads": "tensor", "ffn": "tensor", "experts": ("data", "context", "expert"), "embed": None,
}  # fmt: skip
PADDED = {"vocab"}  # these axes are made longer where they do not divide

Rules = Mapping[str, Over]


def make_mesh(
    devices: Sequence[Any] | None = None,
    *,
    data: int = 1,
    pipe: int = 1,
    context: int = 1,
    tensor: int = 1,
    expert: int = 1,
) -> Mesh:
    """A mesh with all of `AXES`, over the first devices that it needs."""
    shape = (data, pipe, context, tensor, expert)
    found = jax.devices() if devices is None else devices
    if min(shape) < 1 or math.prod(shape) > len(found):
        wanted = " x ".join(f"{name} {size}" for name, size in zip(AXES, shape, strict=True))
        raise ValueError(f"a mesh of {wanted} needs {math.prod(shape)} devices; there are {len(found)}")
    sizes = dict(zip(AXES, shape, strict=True))
    grid = np.array(found[: math.prod(shape)], object).reshape([sizes[name] for name in APART])
    chosen = grid.transpose([APART.index(name) for name in AXES]).reshape(-1).tolist()
    return jax.make_mesh(shape, AXES, devices=chosen, axis_types=(AxisType.Auto,) * len(AXES))


def stage_meshes(mesh: Mesh) -> list[Mesh]:
    """The devices of each stage of a pipeline, as a mesh with the same axes."""
    at = AXES.index("pipe")
    return [
        Mesh(devices, AXES, axis_types=mesh.axis_types) for devices in np.split(mesh.devices, mesh.shape["pipe"], at)
    ]


def sharding(spec: ArraySpec, mesh: Mesh | AbstractMesh, rules: Rules = RULES) -> NamedSharding:
    """Where an array lies: each logical axis over the mesh axis that the rules name, or whole."""
    over = [over_axis(axis, rules) for axis in spec.axes]
    for axis, size, name in zip(spec.axes, spec.shape, over, strict=True):
        if name is not None:
            order(axis, size, devices_along(name, mesh), name)
    return NamedSharding(mesh, PartitionSpec(*over))


def devices_along(over: Over, mesh: Mesh | AbstractMesh) -> int:
    """How many devices an axis is split over."""
    names = (over,) if isinstance(over, str) else over or ()
    return math.prod(mesh.shape[name] for name in names)


def over_axis(axis: str | Runs | None, rules: Rules) -> Over:
    """The mesh axes that a logical one is split over."""
    name = axis.axis if isinstance(axis, Runs) else axis
    if name is None:
        return None
    if name not in rules:
        raise ValueError(f"no rule for the logical axis {name!r}; there are rules for {', '.join(rules)}")
    return rules[name]


def order(axis: str | Runs | None, size: int, devices: int, over: Over) -> np.ndarray | None:
    """Which of an axis' elements each device has, one device after the other; -1 is none. None: as they come."""
    name, runs, shared, again = axis if isinstance(axis, Runs) else Runs(axis or "", (size,))

    def fits(at: int, devices: int) -> bool:
        return name in PADDED or (runs[at] + again) % devices == 0 or (at in shared and devices % runs[at] == 0)

    whole, parts = sum(runs), []
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
        parts.append(np.where(part < run, part, -1).reshape(devices, -1))
    starts = np.cumsum((0, *runs[:-1]))
    placed = [np.where(part < 0, -1, start + part) for start, part in zip(starts, parts, strict=True)]
    found = np.concatenate(placed, axis=1).reshape(-1)
    if size != whole:  # elements of several numbers each
        each = size // whole
        found = (found[:, None] * each + np.arange(each)).reshape(-1)
    return None if found.size == size and (found == np.arange(size)).all() else found


def orders(spec: ArraySpec, mesh: Mesh | AbstractMesh, rules: Rules = RULES) -> list[np.ndarray | None]:
    """`order` of each axis."""
    over = [over_axis(axis, rules) for axis in spec.axes]
    return [
        None if name is None else order(axis, size, devices_along(name, mesh), name)
        for axis, size, name in zip(spec.axes, spec.shape, over, strict=True)
    ]


def taken(leaf, found: np.ndarray, at: int):
    """These elements of an axis, and zeros for those that are none."""
    part = np.take(leaf, np.maximum(found, 0), axis=at)
    lost = (found < 0).reshape(-1, *[1] * (leaf.ndim - 1 - at))
    return np.where(lost, np.zeros((), part.dtype), part) if lost.any() else part


def deal(leaf, spec: ArraySpec, mesh: Mesh, rules: Rules = RULES):
    """An array in the order in which the devices have it: then equal cuts give each what is its own."""
    for at, found in enumerate(orders(spec, mesh, rules)):
        leaf = leaf if found is None else taken(leaf, found, at)
    return leaf


def shardings(tree, mesh: Mesh | AbstractMesh, rules: Rules = RULES):
    """The same tree with each spec's sharding."""
    return jax.tree.map(lambda spec: sharding(spec, mesh, rules), tree)


def team(mesh: Mesh | None) -> Team:
    """The devices of a mesh, as each of them sees the others."""
    if mesh is None:
        return ALONE
    tensor, expert, context, data = (Axis(name, mesh.shape[name]) for name in ("tensor", "expert", "context", "data"))
    return Team(tensor, expert, context, apart=data)
