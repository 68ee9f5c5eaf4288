"""Where the arrays of a model go as they are loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ...ops.native.pack import pack
from ...ops.quant.mxfp4 import Mxfp4
from ...sharding import local_shards
from ...sharding.mesh import sharding, stage_meshes
from ...sharding.spec import ArraySpec, nbytes
from ..config import ModelConfig
from ..partition import stages
from ..weights import ModelWeights, abstract

HOST = "pinned_host"  # memory that a device can copy from by itself


@dataclass(frozen=True)
class Home:
    """Where a part of the weights lies: on one device or those of a stage, or in the host's memory beside them."""

    mesh: Mesh | None = None  # None: one device
    parted: bool = False  # over `context` too: put together when it is wanted
    on_host: bool = False  # brought when it is wanted

    def sharding(self, spec: ArraySpec) -> Sharding:
        """Of an array there."""
        if self.mesh is None:
            return SingleDeviceSharding(jax.local_devices()[0], memory_kind=HOST if self.on_host else None)
        found = sharding(spec, self.mesh)
        if self.parted:
            shape, size = local_shards.sharded_shape(spec, self.mesh), self.mesh.shape["context"]
            found = NamedSharding(self.mesh, part_over(found, shape, size))
        return found.with_memory_kind(HOST) if self.on_host else found


def part_over(found: NamedSharding, shape: tuple[int, ...], size: int) -> PartitionSpec:
    """The same with the longest axis that is whole, and divides, over `context`; of experts each is on one device."""
    over = [*found.spec, *[None] * (len(shape) - len(found.spec))]
    if any(isinstance(axis, tuple) and "context" in axis for axis in over):
        return found.spec
    free = [at for at, axis in enumerate(over) if axis is None and shape[at] % size == 0]
    if free:
        over[max(free, key=lambda at: shape[at])] = "context"
    return PartitionSpec(*over)


@dataclass(frozen=True)
class Homes:
    """How a model's weights are spread: over which devices, and what of its layers is parted or lies on the host."""

    mesh: Mesh | None = None
    parted: bool = False
    on_host: frozenset[int] = frozenset()  # layers

    def tree(self, config: ModelConfig) -> ModelWeights:
        """The home of each part."""
        meshes: list[Mesh | None] = [None] if self.mesh is None else [*stage_meshes(self.mesh)]
        pairs = zip(meshes, stages(config, len(meshes)), strict=True)
        layers = [Home(mesh, self.parted, index in self.on_host) for mesh, stage in pairs for index in stage.layers]
        first, last = Home(meshes[0]), Home(meshes[-1])
        per_layer = first if config.per_layer_dim else None
        return ModelWeights(
            embed_VD=first,
            layers=tuple(layers),
            final_norm_D=last,
            head_VD=None if config.tied else last,
            per_layer_embed_VLA=per_layer,
            per_layer_proj_DLA=per_layer,
            per_layer_norm_A=per_layer,
        )


def host_layers(config: ModelConfig, wanted: int) -> frozenset[int]:
    """The fewest layers whose weights take so many bytes, or all of them; as evenly apart as can be."""
    sizes = [nbytes(layer) for layer in abstract(config).layers]
    chosen: list[int] = []
    while sum(sizes[index] for index in chosen) < wanted and len(chosen) < len(sizes):
        count = len(chosen) + 1
        chosen = [len(sizes) * at // count for at in range(count)]
    return frozenset(chosen)


def place(spec: ArraySpec, leaf):
    """A finished leaf on the device."""
    return jax.device_put(leaf)


def place_packed(spec: ArraySpec, leaf, narrow: bool = True):
    """The same, laid out for the kernels. That of MXFP4 rounds its rows to bfloat16, which only `narrow` ones are."""
    return jax.device_put(leaf if isinstance(leaf, Mxfp4) and not narrow else pack(spec, leaf))


def place_over(home: Home, spec, leaf):
    """A finished leaf, each device of a mesh having its part."""
    return jax.tree.map(lambda one, array: local_shards.shard(array, one, home.mesh, home.sharding(one)), spec, leaf)


def place_all(config: ModelConfig, homes: Homes, put: Callable[..., Any], *trees) -> ModelWeights:
    """`put(home, ...)` of each leaf, or of a stack that the checkpoint holds packed."""

    def settle(home: Home, *leaf):
        placed = put(home, *leaf)
        if home.mesh is None and home.on_host:
            placed = jax.device_put(placed, jax.tree.map(lambda x: x.sharding.with_memory_kind(HOST), placed))
        return placed

    homes_tree = homes.tree(config)

    def settle_part(home: Home, *nodes):
        return jax.tree.map(partial(settle, home), *nodes, is_leaf=lambda node: isinstance(node, Mxfp4))

    weights = jax.tree.map(settle_part, homes_tree, *trees)
    return complete(weights, config, homes)


def spread(homes_tree: ModelWeights, specs: ModelWeights) -> ModelWeights:
    """The home of each leaf."""
    return jax.tree.map(lambda home, node: jax.tree.map(lambda _: home, node), homes_tree, specs)


def complete(weights: ModelWeights, config: ModelConfig, homes: Homes) -> ModelWeights:
    """The words are wanted at both ends: a model of several stages has them twice."""
    if homes.mesh is None or homes.mesh.shape["pipe"] == 1 or not config.tied:
        return weights
    last = stage_meshes(homes.mesh)[-1]
    head = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(last, x.sharding.spec)), weights.embed_VD)
    return weights.replace(head_VD=head)


def abstract_over(config: ModelConfig, mesh: Mesh, specs: ModelWeights) -> ModelWeights:
    """The weights as they lie on a mesh, without memory."""

    def struct(home: Home, spec: ArraySpec):
        return jax.ShapeDtypeStruct(local_shards.sharded_shape(spec, mesh), spec.dtype, sharding=home.sharding(spec))

    homes = Homes(mesh).tree(config)
    weights = jax.tree.map(struct, spread(homes, specs), specs)
    if mesh.shape["pipe"] == 1 or not config.tied:
        return weights
    return weights.replace(head_VD=jax.tree.map(lambda spec: struct(homes.final_norm_D, spec), specs.embed_VD))
