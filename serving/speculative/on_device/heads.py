"""Loading of draft heads, which share the target's embedding and output matrices."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ....model import draft_heads
from ....model.checkpoint import loader
from ....model.checkpoint.placement import Location
from ....model.config import ModelError
from ....model.draft_heads import DraftHeads
from ....model.expert_copies import redundancy_of
from ....sharding.mesh import Mesh
from .loading import FIELD, DrafterContext, draft_folder


def read_heads(context: DrafterContext) -> tuple[DraftHeads, partial[Any]]:
    """(the heads' configuration, what loads their weights)."""
    options = context.options
    speculation = context.speculation
    if options.pipeline_parallel_size > 1:
        raise ModelError(
            f"{FIELD}.method is {speculation.method!r} with pipeline_parallel_size "
            f"{options.pipeline_parallel_size}: heads draft with tables of both ends of the model; "
            "use the method draft_model, ngram or suffix"
        )
    if options.weights_host_bytes is not None:
        raise ModelError(
            f"{FIELD}.method is {speculation.method!r}, and weights_host_bytes is given: heads "
            "draft with the model's own tables, which must be on the device; use the method "
            "draft_model, ngram or suffix"
        )
    folder = context.folder
    if speculation.model is not None:
        folder = draft_folder(speculation, options)
    heads = draft_heads.read_heads(folder, context.config, speculation.method)
    if redundancy_of(heads.model):
        raise ModelError(
            f"{FIELD}.method is {speculation.method!r} with expert_redundancy: its experts have "
            "one copy each"
        )
    return heads, partial(load_heads, folder, heads, options.load_format, context.mesh)


def load_heads(folder: Path, heads: DraftHeads, load_format: str, mesh: Mesh | None) -> Any:
    """The heads' weights.

    On several devices their layers are split as the target's; the rest is replicated.
    """
    if load_format == "dummy":
        weights = loader.random_weights(draft_heads.abstract(heads))
    else:
        weights = draft_heads.load(folder, heads, skip_packing=mesh is not None)
    if mesh is None:
        return weights
    location = Location(mesh)
    replicated = NamedSharding(mesh, P())
    layers = jax.tree.map(
        lambda spec, leaf: location.shard(spec, np.asarray(leaf)),
        draft_heads.abstract(heads).layers,
        weights.layers,
    )
    return jax.device_put(weights.replace(layers=()), replicated).replace(layers=layers)
