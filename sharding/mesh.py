"""The device mesh, and which of its axes each logical axis of an array is split over."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .spec import ArraySpec

AXES = ("data", "pipe", "context", "tensor", "expert")

# "qkv" holds the query heads, then the keys', then the values': cut into equal runs, a device would get queries without
# the keys they meet. So it stays whole until the heads are dealt out by groups.
RULES = {"vocab": "tensor", "heads": "tensor", "ffn": "tensor", "experts": "expert", "embed": None, "qkv": None}


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
    chosen = found[: math.prod(shape)]
    return jax.make_mesh(shape, AXES, devices=chosen, axis_types=(AxisType.Auto,) * len(AXES))


def sharding(spec: ArraySpec, mesh: Mesh, rules: Mapping[str, str | None] = RULES) -> NamedSharding:
    """Where an array lies: each logical axis over the mesh axis that the rules name, or whole."""
    for axis, size in zip(spec.axes, spec.shape, strict=True):
        if axis is None:
            continue
        if axis not in rules:
            raise ValueError(f"no rule for the logical axis {axis!r}; there are rules for {', '.join(rules)}")
        over = rules[axis]
        if over is not None and size % mesh.shape[over]:
            fitting = [str(n) for n in range(1, size + 1) if size % n == 0 and n <= 2 * mesh.shape[over]]
            raise ValueError(
                f"{axis!r} has size {size}, which does not divide over {over}={mesh.shape[over]}; "
                f"{over} could be {', '.join(fitting)}"
            )
    return NamedSharding(mesh, PartitionSpec(*(axis and rules[axis] for axis in spec.axes)))


def shardings(tree, mesh: Mesh, rules: Mapping[str, str | None] = RULES):
    """The same tree with each spec's sharding."""
    return jax.tree.map(lambda spec: sharding(spec, mesh, rules), tree)
