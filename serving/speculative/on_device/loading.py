"""Loads the drafter of a device method, after checking that it fits the target and the devices."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ....model import partition
from ....model.checkpoint import hub
from ....model.config import ModelConfig, ModelError
from ....sharding.mesh import Mesh, stage_meshes
from ...api.options import EngineOptions
from .. import __name__ as PACKAGE
from ..config import SpeculativeConfig
from .drafting import DeviceDrafter

FIELD = "speculative_config"


class DraftSource(NamedTuple):
    """A drafter, and what loads its weights (None: they are a part of the target's)."""

    drafter: DeviceDrafter
    config: ModelConfig  # of the drafter's own layers
    load: Callable[[], Any] | None


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter is made for."""

    speculation: SpeculativeConfig
    options: EngineOptions
    folder: Path  # of the target
    config: ModelConfig  # of the target
    max_len: int
    mesh: Mesh | None  # the last pipeline stage's


def load_drafter(
    options: EngineOptions,
    folder: Path,
    config: ModelConfig,
    max_len: int,
    mesh: Mesh | None = None,
) -> DraftSource | None:
    """The drafter of an engine whose model is `config`; None if its steps do not draft.

    It is spread over the devices of the mesh as the target is; with pipeline stages it is on the
    last.
    """
    speculation = options.speculation
    if speculation is None or not speculation.traits.on_device:
        return None
    if options.num_processes > 1:
        raise ModelError(
            f"{FIELD}.method is {speculation.method!r} with num_processes "
            f"{options.num_processes}: a drafter that computes is for the devices of one process; "
            "use the method ngram or suffix"
        )
    last_mesh = None if mesh is None else stage_meshes(mesh)[-1]
    context = DrafterContext(speculation, options, folder, config, max_len, last_mesh)
    return import_module(speculation.traits.module, PACKAGE).load_drafter(context)


def check_partition(config: ModelConfig, speculation: SpeculativeConfig, mesh: Mesh | None) -> None:
    """Refuse a drafter that cannot be split over the devices."""
    if mesh is None:
        return
    # Without experts each device of the expert axis has all of it.
    num_expert_shards = mesh.shape["expert"] if config.experts else 1
    try:
        partition.check(
            config,
            mesh.shape["tensor"],
            num_expert_shards,
            1,
            mesh.shape["data"],
            mesh.shape["context"],
        )
    except ModelError as error:
        raise ModelError(
            f"{FIELD}.{speculation.method}: the drafter cannot be spread over these devices: "
            f"{error}"
        ) from None


def check_kv(draft_config: ModelConfig, config: ModelConfig, max_len: int) -> None:
    """Refuse a drafter whose keys and values do not fit into the target's page tables."""
    if draft_config.max_len < max_len:
        raise ModelError(
            f"{FIELD}.model was made for {draft_config.max_len} positions, and max_model_len is "
            f"{max_len}; use --max-model-len {draft_config.max_len} or less"
        )
    if draft_config.state_layers:
        raise ModelError(
            f"{FIELD}.model has layers that keep a state for each sequence, which drafts would "
            "change; use a model whose layers all have attention"
        )
    if missing := [window for window in draft_config.windows if window not in config.windows]:
        kind = "without a window" if missing[0] is None else f"with a window of {missing[0]}"
        raise ModelError(
            f"{FIELD}.model has layers {kind}, which the model itself has not: they would need "
            "pages of their own"
        )


def draft_folder(speculation: SpeculativeConfig, options: EngineOptions) -> Path:
    return hub.resolve(speculation.model, hub.FILES, speculation.revision, options.download_dir)
