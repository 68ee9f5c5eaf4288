"""Drafting heads from a published folder to arrays, and back."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...ops import native
from ..checkpoint import published
from ..checkpoint.dense_leaf import read_leaf, unread_leaf
from ..checkpoint.folder import CONFIG, read_json
from ..checkpoint.loader import put_as_it_is, put_packed
from ..checkpoint.safetensors import SINGLE, find_tensors, write_tensors
from ..config import ModelError
from ..families.common import Source
from .heads import DraftHeads, canonical
from .sources import sources, unread
from .weights import DraftHeadsWeights, abstract


def load(
    folder: Path, heads: DraftHeads, progress: Callable[[int], None] = lambda count: None, plain: bool = False
) -> DraftHeadsWeights:
    """The weights of a folder. `plain`: not laid out for the kernels, to be trained or written again."""
    _, stored = published.split(published.described(folder, read_json(folder / CONFIG)))  # codes are widened
    found = published.gather(find_tensors(folder), stored)
    tensors: dict[str, Any] = {canonical(name, heads.kind): tensor for name, tensor in found.items()}
    specs = abstract(heads)
    parts = jax.tree.map(lambda spec, source: source.found_in(tensors), specs, sources(heads))
    check_tensors(folder, heads, tensors, parts)
    for_kernels = native.serves() and not plain

    def read(spec, parts):
        leaf = read_leaf(spec, parts, tensors)
        progress(leaf.nbytes)
        return jax.block_until_ready(
            put_packed(spec, leaf, heads.model.rows) if for_kernels else put_as_it_is(spec, leaf)
        )

    weights = jax.tree.map(read, specs, parts)
    check_tokens(heads, weights)
    return weights


def check_tensors(folder: Path, heads: DraftHeads, tensors: dict[str, Any], parts) -> None:
    """Every tensor that the heads need is there and has its shape, and there is none that is not known."""
    needed = {part.name: part.shape for part in jax.tree.leaves(parts)}
    for name, shape in needed.items():
        if name not in tensors:
            raise ModelError(f"{folder} lacks the tensor {name!r}, which {heads.kind} heads need")
        if tensors[name].shape != shape:
            raise ModelError(f"tensor {name!r} has shape {list(tensors[name].shape)}; config.json wants {list(shape)}")
    extra = [name for name in tensors if name not in needed and not name.endswith("rotary_emb.inv_freq")]
    if extra := sorted(name for name in extra if not unread(name, heads)):
        raise ModelError(f"{folder} holds the tensor {extra[0]!r}, which {heads.kind} heads do not have")


def check_tokens(heads: DraftHeads, weights: DraftHeadsWeights) -> None:
    """The tokens of a smaller vocabulary are tokens of the target's, each once."""
    if weights.tokens_U is None:
        return
    tokens_U, V = np.asarray(weights.tokens_U), heads.model.vocab_size
    if len(set(tokens_U.tolist())) < len(tokens_U) or tokens_U.min() < 0 or tokens_U.max() >= V:
        count = len(tokens_U)
        raise ModelError(f"{heads.kind} heads must map their {count} tokens to different ones from 0 to {V - 1}")


def save(folder: Path, heads: DraftHeads, weights: DraftHeadsWeights, config: dict[str, Any]) -> None:
    """A folder that `read_heads` and `load` read; `config` becomes its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}

    def put(source: Source, leaf):
        parts = unread_leaf(source.parts, np.asarray(leaf))
        tensors.update({name: value.astype(heads.model.dtype) for name, value in parts.items()})

    matrices, own = sources(heads).replace(tokens_U=None), weights.replace(tokens_U=None)
    jax.tree.map(put, matrices, own, is_leaf=lambda node: isinstance(node, Source))
    if heads.kind == "eagle3":
        tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): value for name, value in tensors.items()}
    tensors = dict(sorted((tensors | maps(heads, weights)).items()))
    layout = {name: (value.dtype, value.shape) for name, value in tensors.items()}
    write_tensors(folder / SINGLE, layout, tensors.values())
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def maps(heads: DraftHeads, weights: DraftHeadsWeights) -> dict[str, np.ndarray]:
    """The tensors that say which tokens a smaller vocabulary has."""
    if weights.tokens_U is None:
        return {}
    tokens_U = np.asarray(weights.tokens_U, np.int64)
    if heads.kind == "medusa":
        return {"token_map": tokens_U}
    offset_U = tokens_U - np.arange(len(tokens_U))
    return {"d2t": offset_U, "t2d": np.isin(np.arange(heads.model.vocab_size), tokens_U)}
