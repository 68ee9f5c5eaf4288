"""The checkpoint to quantise, read layer by layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...sharding.spec import ArraySpec
from ..checkpoint.dense_leaf import read_leaf
from ..checkpoint.loader import find_sources
from ..checkpoint.published import gather
from ..checkpoint.safetensors import Tensor
from ..config import ModelConfig
from ..stored_format import StoredFormat
from ..weights import LayerWeights, ModelWeights, abstract, dense_specs
from .inputs import Inputs, RecordedMatrix, RecordedStack, empty_inputs, measure_inputs
from .whole import Batch

Key = tuple[str, int | None]  # of a matrix: (leaf name, index in the stack or None)


@dataclass(frozen=True)
class Leaf:
    """A leaf of a layer's weights; `rounded` if it is made of matrices that are quantised."""

    name: str
    spec: ArraySpec
    sources: Sequence[Any]
    rounded: bool

    def key(self, source_tensor: Any) -> Key:
        """The key of the matrix that a source tensor belongs to."""
        at = source_tensor.at if isinstance(source_tensor.at, tuple) else (source_tensor.at,)
        return self.name, int(at[0]) if self.spec.stacked else None

    @property
    def size(self) -> int:
        """The number of inputs of a matrix."""
        return int(np.prod([self.spec.shape[axis] for axis in self.spec.inputs]))


@dataclass(frozen=True)
class CheckpointSource:
    """A folder's tensors by canonical name, and the configuration to write them with."""

    config: ModelConfig
    stored: StoredFormat
    tensors: Mapping[str, Tensor]
    sources: ModelWeights

    @classmethod
    def open(cls, folder: Path, config: ModelConfig, stored: StoredFormat) -> "CheckpointSource":
        return cls(config, stored, *find_sources(folder, config))

    @cached_property
    def dense(self) -> ModelConfig:
        """The configuration in which calibration runs: float32, unquantised."""
        return replace(self.config, dtype="float32", quant=None)

    @cached_property
    def specs(self) -> ModelWeights:
        return dense_specs(self.dense)

    @cached_property
    def target_specs(self) -> ModelWeights:
        """The specs of the weights to write."""
        return abstract(self.config)

    def embedding(self) -> ModelWeights:
        """Only the weights of `decoder.embed`."""
        of_rows = ("embed_VD", "embed_norm_D", "position_embed_PD", "type_embed_ID")
        return self.outside(
            *of_rows, "per_layer_embed_VLA", "per_layer_proj_DLA", "per_layer_norm_A"
        )

    def ends(self) -> ModelWeights:
        """Only the weights of `decoder.final_norm` and `decoder.logits`."""
        return self.outside(
            "embed_VD" if self.dense.tied else "head_VD", "final_norm_D", "head_bias_V"
        )

    def outside(self, *names: str) -> ModelWeights:
        """The dense weights with these names, and no others."""
        specs, sources = (
            {name: getattr(tree, name) for name in names} for tree in (self.specs, self.sources)
        )
        weights = jax.tree.map(
            lambda spec, sources: jnp.asarray(read_leaf(spec, sources, self.tensors)),
            specs,
            sources,
        )
        return ModelWeights(**{"embed_VD": None, "final_norm_D": None} | weights, layers=())

    def leaves(self, index: int) -> dict[str, Leaf]:
        """The leaves of a layer by name, such as `mlp.down_FD`."""
        flat, tree = jax.tree_util.tree_flatten_with_path(self.specs.layers[index])
        sources = tree.flatten_up_to(self.sources.layers[index])
        target_specs = tree.flatten_up_to(self.target_specs.layers[index])
        leaves = {}
        for (path, spec), leaf_sources, node in zip(flat, sources, target_specs, strict=True):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            matrices = all(
                len(self.tensors[source_tensor.name].shape) == 2 for source_tensor in leaf_sources
            )
            leaves[name] = Leaf(
                name, spec, leaf_sources, matrices and not isinstance(node, ArraySpec)
            )
        return leaves

    def layer(self, index: int, quantised: Mapping[str, Tensor] | None = None) -> LayerWeights:
        """The dense weights of a layer; `quantised` replaces tensors, by their names in files."""
        replacements: Mapping[str, Any] = gather(dict(quantised or {}), self.stored)
        tensors = {
            name: replacements.get(tensor.name, tensor) for name, tensor in self.tensors.items()
        }
        leaves = [
            jnp.asarray(read_leaf(leaf.spec, leaf.sources, tensors))
            for leaf in self.leaves(index).values()
        ]
        return jax.tree.unflatten(jax.tree.structure(self.specs.layers[index]), leaves)

    def inputs(self, index: int, batches: Sequence[Batch]) -> dict[Key, Inputs]:
        """The statistics of each matrix's inputs in a layer."""
        weights = self.layer(index)
        leaves = list(self.leaves(index).values())
        statistics = {
            leaf.key(source_tensor): empty_inputs(leaf.size)
            for leaf in leaves
            if leaf.rounded
            for source_tensor in leaf.sources
        }
        has_stacks = any(leaf.rounded and leaf.spec.stacked for leaf in leaves)
        for batch in batches if statistics else ():
            rows: dict[Key, list[Any]] = {}
            recorded_weights = record_inputs(
                weights, leaves, lambda *key, x, rows=rows: rows.setdefault(key, []).append(x)
            )
            with jax.disable_jit(has_stacks):  # expert indices must be concrete
                batch.run_layer(index, recorded_weights, self.dense)
            live_T1 = batch.positions_T[:, None] >= 0
            for (name, e), arrays in rows.items():
                if e is None:
                    arrays = [jnp.where(live_T1, x.reshape(len(live_T1), -1), 0) for x in arrays]
                statistics[name, e] += measure_inputs(arrays)
        return statistics


def record_inputs(weights: LayerWeights, leaves: Sequence[Leaf], record) -> LayerWeights:
    """Replace the matrices to quantise by nodes that call `record(name, place, x=rows)`."""

    def node(leaf: Leaf, array: Any) -> Any:
        if not leaf.rounded:
            return array
        if leaf.spec.stacked:
            return RecordedStack(array, lambda e, x: record(leaf.name, e, x=x))
        return RecordedMatrix(array, lambda x: record(leaf.name, None, x=x))

    arrays, tree = jax.tree.flatten(weights)
    return jax.tree.unflatten(
        tree, [node(leaf, array) for leaf, array in zip(leaves, arrays, strict=True)]
    )
