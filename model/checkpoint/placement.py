"""Placement of a model's arrays: on which devices, and which in the host's memory."""

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

HOST = "pinned_host"  # memory that devices can copy from


@dataclass(frozen=True)
class Location:
    """The location of some weights: the devices of a stage, or the host's memory beside them."""

    mesh: Mesh | None = None  # None: a single device
    context_sharded: bool = False  # also over `context`; a step gathers the weight
    on_host: bool = False  # a step copies the weight to the device before use

    def shard(self, spec: Any, leaf: Any) -> Any:
        """Shard a leaf of numpy arrays over the mesh."""
        mesh = self.mesh
        assert mesh is not None
        return jax.tree.map(
            lambda array_spec, array: local_shards.shard(
                array, array_spec, mesh, self.sharding(array_spec)
            ),
            spec,
            leaf,
        )

    def move_to_memory(self, leaf: Any) -> Any:
        """Move a leaf from the single device to the host's memory if it belongs there."""
        if not self.on_host:
            return leaf
        return jax.device_put(leaf, jax.tree.map(lambda x: x.sharding.with_memory_kind(HOST), leaf))

    def sharding(self, spec: ArraySpec) -> Sharding:
        """The sharding of an array at this location."""
        if self.mesh is None:
            return SingleDeviceSharding(
                jax.local_devices()[0], memory_kind=HOST if self.on_host else None
            )
        result = sharding(spec, self.mesh)
        if self.context_sharded:
            shape = local_shards.sharded_shape(spec, self.mesh)
            size = self.mesh.shape["context"]
            result = NamedSharding(self.mesh, add_context_axis(result, shape, size))
        return result.with_memory_kind(HOST) if self.on_host else result


def add_context_axis(current: NamedSharding, shape: tuple[int, ...], size: int) -> PartitionSpec:
    """Shard the longest unsharded axis that `size` divides over `context`.

    Experts, which are sharded over `context` already, stay as they are.
    """
    axes = [*current.spec, *[None] * (len(shape) - len(current.spec))]
    if any(isinstance(axis, tuple) and "context" in axis for axis in axes):
        return current.spec
    free = [at for at, axis in enumerate(axes) if axis is None and shape[at] % size == 0]
    if free:
        axes[max(free, key=lambda at: shape[at])] = "context"
    return PartitionSpec(*axes)


@dataclass(frozen=True)
class Placement:
    """The mesh for a model's weights, and the layers whose weights are in the host's memory."""

    mesh: Mesh | None = None
    context_sharded: bool = False
    on_host: frozenset[int] = frozenset()  # layers

    def locations(self, config: ModelConfig) -> ModelWeights:
        """A tree of locations for the parts of the weight tree: layers, tables and norms."""
        meshes: list[Mesh | None] = [None] if self.mesh is None else [*stage_meshes(self.mesh)]
        pairs = zip(meshes, stages(config, len(meshes)), strict=True)
        layers: list[Any] = [
            Location(mesh, self.context_sharded, index in self.on_host)
            for mesh, stage in pairs
            for index in stage.layers
        ]
        first = Location(meshes[0])
        last = Location(meshes[-1])
        per_layer = first if config.per_layer_dim else None
        head: list[Any] = [last for _ in config.head]
        return ModelWeights(
            embed_VD=first,
            layers=tuple(layers),
            final_norm_D=last if config.final_norm else None,
            head_VD=None if config.tied else last,
            head_bias_V=last if config.head_bias else None,
            classes_DC=config.classes and last,
            classes_bias_C=last
            if config.classes and (config.classes.bias or config.classes.deep)
            else None,
            classes_up_DF=last if config.classes and config.classes.deep else None,
            classes_up_bias_F=last if config.classes and config.classes.deep else None,
            embed_norm_D=first if config.embed_norm else None,
            position_embed_PD=first if config.positions else None,
            type_embed_ID=first if config.types else None,
            head=tuple(head),
            per_layer_embed_VLA=per_layer,
            per_layer_proj_DLA=per_layer,
            per_layer_norm_A=per_layer,
        )

    def location_per_leaf(self, config: ModelConfig, tree: ModelWeights) -> ModelWeights:
        """The location of each leaf of a weight tree; a quantised node counts as a leaf."""

        def fill_subtree(location: Location, subtree: Any) -> Any:
            return jax.tree.map(
                lambda _: location, subtree, is_leaf=lambda node: isinstance(node, Weight)
            )

        return jax.tree.map(fill_subtree, self.locations(config), tree)


def choose_host_layers(config: ModelConfig, min_bytes: int) -> frozenset[int]:
    """The fewest layers whose weights take `min_bytes` (or all layers), evenly spaced."""
    sizes = [nbytes(layer) for layer in abstract(config).layers]
    chosen: list[int] = []
    while sum(sizes[index] for index in chosen) < min_bytes and len(chosen) < len(sizes):
        count = len(chosen) + 1
        chosen = [len(sizes) * at // count for at in range(count)]
    return frozenset(chosen)


def add_tied_head(weights: ModelWeights, config: ModelConfig, placement: Placement) -> ModelWeights:
    """Copy a tied embedding to the last pipeline stage, which needs it as its head."""
    if placement.mesh is None or placement.mesh.shape["pipe"] == 1 or not config.tied:
        return weights
    last = stage_meshes(placement.mesh)[-1]
    head = jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(last, x.sharding.spec)), weights.embed_VD
    )
    return weights.replace(head_VD=head)


def abstract_on_mesh(config: ModelConfig, mesh: Mesh, specs: ModelWeights) -> ModelWeights:
    """The weights as abstract arrays with their shardings on a mesh."""

    def structs(location: Location, subtree: Any):
        def struct(spec: ArraySpec):
            shape = local_shards.sharded_shape(spec, mesh)
            return jax.ShapeDtypeStruct(shape, spec.dtype, sharding=location.sharding(spec))

        return jax.tree.map(struct, subtree)

    locations = Placement(mesh).locations(config)
    weights = jax.tree.map(structs, locations, specs)
    if mesh.shape["pipe"] == 1 or not config.tied:
        return weights
    return weights.replace(head_VD=structs(locations.final_norm_D, specs.embed_VD))
