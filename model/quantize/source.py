"""The checkpoint that is to be rounded, a layer at a time."""

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
from ..checkpoint.loader import find_parts
from ..checkpoint.published import gather
from ..checkpoint.safetensors import Tensor
from ..config import ModelConfig
from ..stored_format import StoredFormat
from ..weights import LayerWeights, ModelWeights, abstract, dense_specs
from .inputs import Inputs, Watched, WatchedStack, measured, none_yet
from .whole import Batch

Key = tuple[str, int | None]  # of a matrix: its leaf in the layer, and its place where that is a stack


@dataclass(frozen=True)
class Leaf:
    """A leaf of a layer's weights, and the tensors that it is made of; `rounded`: they are matrices to be rounded."""

    name: str
    spec: ArraySpec
    parts: Sequence[Any]
    rounded: bool

    def key(self, part: Any) -> Key:
        """Of the matrix whose inputs a tensor meets."""
        at = part.at if isinstance(part.at, tuple) else (part.at,)
        return self.name, int(at[0]) if self.spec.stacked else None

    @property
    def size(self) -> int:
        """How many inputs a matrix has."""
        return int(np.prod([self.spec.shape[axis] for axis in self.spec.inputs]))


@dataclass(frozen=True)
class Source:
    """A folder's tensors by their family's names, and the configuration that they are to be written with."""

    config: ModelConfig
    stored: StoredFormat
    tensors: Mapping[str, Tensor]
    parts: ModelWeights

    @classmethod
    def of(cls, folder: Path, config: ModelConfig, stored: StoredFormat) -> "Source":
        return cls(config, stored, *find_parts(folder, config))

    @cached_property
    def dense(self) -> ModelConfig:
        """The model as it runs here: in float32, whose rounding is lost beside that of codes."""
        return replace(self.config, dtype="float32", quant=None)

    @cached_property
    def specs(self) -> ModelWeights:
        return dense_specs(self.dense)

    @cached_property
    def wanted(self) -> ModelWeights:
        """The specs of what is to be written."""
        return abstract(self.config)

    def embedding(self) -> ModelWeights:
        """The weights of `decoder.embed`, and no others."""
        of_rows = ("embed_VD", "embed_norm_D", "position_embed_PD", "type_embed_ID")
        return self.outside(*of_rows, "per_layer_embed_VLA", "per_layer_proj_DLA", "per_layer_norm_A")

    def ends(self) -> ModelWeights:
        """The weights of `decoder.final_norm` and `decoder.logits`."""
        return self.outside("embed_VD" if self.dense.tied else "head_VD", "final_norm_D", "head_bias_V")

    def outside(self, *names: str) -> ModelWeights:
        """The dense weights of these names, and no others."""
        specs, parts = ({name: getattr(tree, name) for name in names} for tree in (self.specs, self.parts))
        found = jax.tree.map(lambda spec, parts: jnp.asarray(read_leaf(spec, parts, self.tensors)), specs, parts)
        return ModelWeights(**{"embed_VD": None, "final_norm_D": None} | found, layers=())

    def leaves(self, index: int) -> dict[str, Leaf]:
        """The leaves of a layer by name, such as `mlp.down_FD`."""
        flat, tree = jax.tree_util.tree_flatten_with_path(self.specs.layers[index])
        parts = tree.flatten_up_to(self.parts.layers[index])
        wanted = tree.flatten_up_to(self.wanted.layers[index])
        found = {}
        for (path, spec), some, node in zip(flat, parts, wanted, strict=True):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            matrices = all(len(self.tensors[part.name].shape) == 2 for part in some)
            found[name] = Leaf(name, spec, some, matrices and not isinstance(node, ArraySpec))
        return found

    def layer(self, index: int, made: Mapping[str, Tensor] | None = None) -> LayerWeights:
        """The dense weights of a layer; tensors that were `made`, by their names in files, stand for its own."""
        found: Mapping[str, Any] = gather(dict(made or {}), self.stored)
        tensors = {name: found.get(tensor.name, tensor) for name, tensor in self.tensors.items()}
        leaves = [jnp.asarray(read_leaf(leaf.spec, leaf.parts, tensors)) for leaf in self.leaves(index).values()]
        return jax.tree.unflatten(jax.tree.structure(self.specs.layers[index]), leaves)

    def inputs(self, index: int, batches: Sequence[Batch]) -> dict[Key, Inputs]:
        """What each matrix of a layer meets."""
        weights, leaves = self.layer(index), list(self.leaves(index).values())
        found = {leaf.key(part): none_yet(leaf.size) for leaf in leaves if leaf.rounded for part in leaf.parts}
        choosing = any(leaf.rounded and leaf.spec.stacked for leaf in leaves)
        for batch in batches if found else ():
            rows: dict[Key, list[Any]] = {}
            own = watched(weights, leaves, lambda *key, x, rows=rows: rows.setdefault(key, []).append(x))
            with jax.disable_jit(choosing):  # so that it is known which expert meets which rows
                batch.through(index, own, self.dense)
            live_T1 = batch.positions_T[:, None] >= 0
            for (name, e), some in rows.items():
                if e is None:
                    some = [jnp.where(live_T1, x.reshape(len(live_T1), -1), 0) for x in some]
                found[name, e] += measured(some)
        return found


def watched(weights: LayerWeights, leaves: Sequence[Leaf], tell) -> LayerWeights:
    """The weights with nodes that `tell(name, place, x=rows)` in place of the matrices that are to be rounded."""

    def node(leaf: Leaf, array: Any) -> Any:
        if not leaf.rounded:
            return array
        if leaf.spec.stacked:
            return WatchedStack(array, lambda e, x: tell(leaf.name, e, x=x))
        return Watched(array, lambda x: tell(leaf.name, None, x=x))

    arrays, tree = jax.tree.flatten(weights)
    return jax.tree.unflatten(tree, [node(leaf, array) for leaf, array in zip(leaves, arrays, strict=True)])
