"""Where the arrays of a model lie: on which devices, and which of them in the host's memory."""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ...ops.linear.weight import Weight
from ...sharding import local_shards
from ...sharding.mesh import sharding, stage_meshes
from ...sharding.spec import ArraySpec, nbytes
from ..config import ModelConfig
from ..partition import stages
from ..weights import ModelWeights, abstract

HOST = "pinned_host"  # memory that a device can copy from by itself


@dataclass(frozen=True)
class Location:
    """Where a part of the weights lies: on one device or those of a stage, or in the host's memory beside them."""

    mesh: Mesh | None = None  # None: one device
    parted: bool = False  # split over `context` too; a step gathers it when it needs it
    on_host: bool = False  # a step copies it to the device when it needs it

    def split(self, spec: Any, leaf: Any) -> Any:
        """A leaf of numpy arrays over the mesh, each device having its part."""
        mesh = self.mesh
        assert mesh is not None
        return jax.tree.map(lambda one, array: local_shards.shard(array, one, mesh, self.sharding(one)), spec, leaf)

    def settle(self, leaf: Any) -> Any:
        """A leaf on the one device, moved to the host's memory if it is to lie there."""
        if not self.on_host:
            return leaf
        return jax.device_put(leaf, jax.tree.map(lambda x: x.sharding.with_memory_kind(HOST), leaf))

    def sharding(self, spec: ArraySpec) -> Sharding:
        """The sharding of an array that lies there."""
        if self.mesh is None:
            return SingleDeviceSharding(jax.local_devices()[0], memory_kind=HOST if self.on_host else None)
        found = sharding(spec, self.mesh)
        if self.parted:
            shape, size = local_shards.sharded_shape(spec, self.mesh), self.mesh.shape["context"]
            found = NamedSharding(self.mesh, part_over(found, shape, size))
        return found.with_memory_kind(HOST) if self.on_host else found


def part_over(found: NamedSharding, shape: tuple[int, ...], size: int) -> PartitionSpec:
    """The partition with the longest axis that is whole, and divides, split over `context`.

    Experts are split over `context` already.
    """
    over = [*found.spec, *[None] * (len(shape) - len(found.spec))]
    if any(isinstance(axis, tuple) and "context" in axis for axis in over):
        return found.spec
    free = [at for at, axis in enumerate(over) if axis is None and shape[at] % size == 0]
    if free:
        over[max(free, key=lambda at: shape[at])] = "context"
    return PartitionSpec(*over)


@dataclass(frozen=True)
class Placement:
    """Over which devices a model's weights are spread, and which of its layers are parted or lie on the host."""

    mesh: Mesh | None = None
    parted: bool = False
    on_host: frozenset[int] = frozenset()  # layers

    def locations(self, config: ModelConfig) -> ModelWeights:
        """The location of each part of the weight tree: a layer, a table, a norm."""
        meshes: list[Mesh | None] = [None] if self.mesh is None else [*stage_meshes(self.mesh)]
        pairs = zip(meshes, stages(config, len(meshes)), strict=True)
        layers = [Location(mesh, self.parted, index in self.on_host) for mesh, stage in pairs for index in stage.layers]
        first, last = Location(meshes[0]), Location(meshes[-1])
        per_layer = first if config.per_layer_dim else None
        return ModelWeights(
            embed_VD=first,
            layers=tuple(layers),
            final_norm_D=last if config.final_norm else None,
            head_VD=None if config.tied else last,
            head_bias_V=last if config.head_bias else None,
            classes_DC=config.classes and last,
            classes_bias_C=last if config.classes and (config.classes.bias or config.classes.deep) else None,
            classes_up_DF=last if config.classes and config.classes.deep else None,
            classes_up_bias_F=last if config.classes and config.classes.deep else None,
            embed_norm_D=first if config.embed_norm else None,
            position_embed_PD=first if config.positions else None,
            type_embed_ID=first if config.types else None,
            head=tuple(last for _ in config.head),
            per_layer_embed_VLA=per_layer,
            per_layer_proj_DLA=per_layer,
            per_layer_norm_A=per_layer,
        )

    def by_leaf(self, config: ModelConfig, tree: ModelWeights) -> ModelWeights:
        """The location of each leaf of a weight tree, and of each node that stands in place of one."""

        def spread(location: Location, part: Any) -> Any:
            return jax.tree.map(lambda _: location, part, is_leaf=lambda node: isinstance(node, Weight))

        return jax.tree.map(spread, self.locations(config), tree)


def host_layers(config: ModelConfig, wanted: int) -> frozenset[int]:
    """The fewest layers whose weights take `wanted` bytes, or all of them; as evenly apart as can be."""
    sizes = [nbytes(layer) for layer in abstract(config).layers]
    chosen: list[int] = []
    while sum(sizes[index] for index in chosen) < wanted and len(chosen) < len(sizes):
        count = len(chosen) + 1
        chosen = [len(sizes) * at // count for at in range(count)]
    return frozenset(chosen)


def with_head(weights: ModelWeights, config: ModelConfig, placement: Placement) -> ModelWeights:
    """The weights with the tied embedding on the last stage too: both ends of a pipeline need the vocabulary."""
    if placement.mesh is None or placement.mesh.shape["pipe"] == 1 or not config.tied:
        return weights
    last = stage_meshes(placement.mesh)[-1]
    head = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(last, x.sharding.spec)), weights.embed_VD)
    return weights.replace(head_VD=head)


def abstract_over(config: ModelConfig, mesh: Mesh, specs: ModelWeights) -> ModelWeights:
    """The weights as they lie on a mesh, without memory."""

    def structs(location: Location, part: Any):
        def struct(spec: ArraySpec):
            shape = local_shards.sharded_shape(spec, mesh)
            return jax.ShapeDtypeStruct(shape, spec.dtype, sharding=location.sharding(spec))

        return jax.tree.map(struct, part)

    locations = Placement(mesh).locations(config)
    weights = jax.tree.map(structs, locations, specs)
    if mesh.shape["pipe"] == 1 or not config.tied:
        return weights
    return weights.replace(head_VD=structs(locations.final_norm_D, specs.embed_VD))
