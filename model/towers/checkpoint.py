"""Load the weights of a vision tower from the folder of its model."""

from collections.abc import Callable
from pathlib import Path

import jax

from ...ops import native
from ..checkpoint.dense_leaf import read_leaf
from ..checkpoint.loader import put_packed, put_unpacked
from ..checkpoint.safetensors import find_tensors
from ..config import ModelError
from . import module_of
from .config import Tower
from .weights import TowerWeights, abstract


def has_tower(folder: Path, kind: str) -> bool:
    """Whether the folder holds the weights of a tower of this `model_type`, as safetensors."""
    prefixes = module_of(kind).PREFIXES
    has_weights = any(folder.glob("*.safetensors"))
    return has_weights and any(name.startswith(prefixes) for name in find_tensors(folder))


def load(
    folder: Path, tower: Tower, kind: str, progress: Callable[[int], None] = lambda count: None
) -> TowerWeights:
    """Load the weights of a tower, packed for the kernels where they serve.

    Args:
        folder: The folder of the multimodal model.
        tower: The tower.
        kind: Its `model_type`.
        progress: Called with the bytes of each array that was read.
    """
    tensors = find_tensors(folder)
    prefixes = module_of(kind).PREFIXES
    prefix = max(  # the longest that some tensor has
        (p for p in prefixes if any(name.startswith(p) for name in tensors)),
        key=len,
        default=prefixes[0],
    )
    specs = abstract(tower)
    tensor_sources = jax.tree.map(
        lambda spec, source: source.found_in(tensors),
        specs,
        module_of(kind).sources(tower, prefix=prefix),
    )
    for source in jax.tree.leaves(tensor_sources):
        if source.name not in tensors:
            raise ModelError(
                f"{folder} lacks the tensor {source.name!r} of the vision tower; "
                "language_model_only serves text without it"
            )
        if tensors[source.name].shape != source.shape:
            raise ModelError(
                f"tensor {source.name!r} has shape {list(tensors[source.name].shape)}; "
                f"vision_config wants {list(source.shape)}"
            )

    def read(spec, leaf_sources):
        leaf = read_leaf(spec, leaf_sources, tensors)
        progress(leaf.nbytes)
        return jax.block_until_ready(
            put_packed(spec, leaf, tower.model.rows)
            if native.serves()
            else put_unpacked(spec, leaf)
        )

    return jax.tree.map(read, specs, tensor_sources)
