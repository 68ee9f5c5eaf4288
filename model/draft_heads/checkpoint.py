"""Load and save the weights of draft heads."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...ops import native
from ..checkpoint import published
from ..checkpoint.dense_leaf import leaf_to_tensors, read_leaf
from ..checkpoint.folder import CONFIG, read_json
from ..checkpoint.loader import put_packed, put_unpacked
from ..checkpoint.safetensors import SINGLE, find_tensors, write_tensors
from ..config import ModelError
from ..families.common import Source
from .heads import DraftHeads, canonical_name
from .sources import is_ignored, weight_sources
from .weights import DraftHeadsWeights, abstract


def load(
    folder: Path,
    heads: DraftHeads,
    progress: Callable[[int], None] = lambda count: None,
    skip_packing: bool = False,
) -> DraftHeadsWeights:
    """Load the weights of a folder. `skip_packing`: to train or save them."""
    # Quantised matrices are dequantised.
    _, stored = published.split_quantization(
        published.add_side_config(folder, read_json(folder / CONFIG))
    )
    gathered = published.gather(find_tensors(folder), stored)
    tensors: dict[str, Any] = {
        canonical_name(name, heads.kind): tensor for name, tensor in gathered.items()
    }
    specs = abstract(heads)
    tensor_sources = jax.tree.map(
        lambda spec, source: source.found_in(tensors), specs, weight_sources(heads)
    )
    check_tensors(folder, heads, tensors, tensor_sources)
    for_kernels = native.serves() and not skip_packing

    def read(spec, leaf_sources):
        leaf = read_leaf(spec, leaf_sources, tensors)
        progress(leaf.nbytes)
        return jax.block_until_ready(
            put_packed(spec, leaf, heads.model.rows) if for_kernels else put_unpacked(spec, leaf)
        )

    weights = jax.tree.map(read, specs, tensor_sources)
    check_tokens(heads, weights)
    return weights


def check_tensors(folder: Path, heads: DraftHeads, tensors: dict[str, Any], tensor_sources) -> None:
    """Check that the heads' tensors exist in their shapes, and that there are no others."""
    needed = {source.name: source.shape for source in jax.tree.leaves(tensor_sources)}
    for name, shape in needed.items():
        if name not in tensors:
            raise ModelError(f"{folder} lacks the tensor {name!r}, which {heads.kind} heads need")
        if tensors[name].shape != shape:
            raise ModelError(
                f"tensor {name!r} has shape {list(tensors[name].shape)}; config.json wants "
                f"{list(shape)}"
            )
    extra = [
        name for name in tensors if name not in needed and not name.endswith("rotary_emb.inv_freq")
    ]
    if extra := sorted(name for name in extra if not is_ignored(name, heads)):
        raise ModelError(
            f"{folder} holds the tensor {extra[0]!r}, which {heads.kind} heads do not have"
        )


def check_tokens(heads: DraftHeads, weights: DraftHeadsWeights) -> None:
    """Check that a reduced vocabulary maps to distinct tokens of the target's."""
    if weights.tokens_U is None:
        return
    tokens_U = np.asarray(weights.tokens_U)
    V = heads.model.vocab_size
    if len(set(tokens_U.tolist())) < len(tokens_U) or tokens_U.min() < 0 or tokens_U.max() >= V:
        count = len(tokens_U)
        raise ModelError(
            f"{heads.kind} heads must map their {count} tokens to different ones from 0 to {V - 1}"
        )


def save(
    folder: Path, heads: DraftHeads, weights: DraftHeadsWeights, config: dict[str, Any]
) -> None:
    """Write a folder for `read_heads` and `load`; `config` becomes its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}

    def put(source: Source, leaf):
        leaf_tensors = leaf_to_tensors(source.parts, np.asarray(leaf))
        tensors.update(
            {name: value.astype(heads.model.dtype) for name, value in leaf_tensors.items()}
        )

    matrices = weight_sources(heads).replace(tokens_U=None)
    weights_to_save = weights.replace(tokens_U=None)
    jax.tree.map(put, matrices, weights_to_save, is_leaf=lambda node: isinstance(node, Source))
    if heads.kind == "eagle3":
        tensors = {
            re.sub(r"^layers\.0\.", "midlayer.", name): value for name, value in tensors.items()
        }
    tensors = dict(sorted((tensors | vocabulary_tensors(heads, weights)).items()))
    layout = {name: (value.dtype, value.shape) for name, value in tensors.items()}
    write_tensors(folder / SINGLE, layout, tensors.values())
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def vocabulary_tensors(heads: DraftHeads, weights: DraftHeadsWeights) -> dict[str, np.ndarray]:
    """The tensors that define a reduced vocabulary."""
    if weights.tokens_U is None:
        return {}
    tokens_U = np.asarray(weights.tokens_U, np.int64)
    if heads.kind == "medusa":
        return {"token_map": tokens_U}
    offset_U = tokens_U - np.arange(len(tokens_U))
    return {"d2t": offset_U, "t2d": np.isin(np.arange(heads.model.vocab_size), tokens_U)}
