"""From options to the vision tower of an engine and the reader of its images."""

import importlib.util
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax.numpy as jnp

from ..model.config import ModelConfig, ModelError
from ..model.images.pixels import value_table
from ..model.multimodal import Multimodal, is_multimodal, read
from ..model.towers.checkpoint import load
from ..model.towers.config import Tower
from ..model.towers.weights import abstract
from ..sharding.spec import nbytes
from .api.options import MAX_IMAGES, PARALLEL, EngineOptions, SizedOptions
from .device.encode import MediaEncoder, backend
from .media_reader import MediaReader

log = logging.getLogger("quire")

MEDIA_ROWS = {"cpu": 1024, "gpu": 4096}  # largest number of rows of an image
STORE_ROWS = 8192  # of the device's media store


def multimodal_of(folder: Path, options: EngineOptions) -> Multimodal | None:
    """How the model reads images; None if it serves text only."""
    if text_only_reason(options) or not is_multimodal(folder, options.hf_overrides):
        return None
    return read(folder, options.hf_overrides, options.mm_processor_kwargs)


def max_images(options: EngineOptions) -> int:
    """The maximum number of images of a prompt."""
    return (options.limit_mm_per_prompt or {}).get("image", MAX_IMAGES)


def text_only_reason(options: EngineOptions) -> str | None:
    """Why a model that could read images serves text only; None if it reads them."""
    if options.language_model_only:
        return "language_model_only is set"
    if max_images(options) == 0:
        return "limit_mm_per_prompt is 0 for images"
    if any(getattr(options, name) != 1 for name in (*PARALLEL.values(), "num_processes")):
        return "models that are split over devices or processes read no images"
    if importlib.util.find_spec("PIL") is None:
        return "images need Pillow: pip install 'quire[images]'"
    return None


def tower_of(config: ModelConfig, multimodal: Multimodal) -> Tower:
    """The tower, in the dtype of the text model."""
    tower = multimodal.tower
    return replace(tower, model=replace(tower.model, dtype=config.dtype))


def media_bytes(config: ModelConfig, multimodal: Multimodal) -> int:
    """Bytes of the tower's weights and of the media store."""
    tower = tower_of(config, multimodal)
    row_bytes = tower.merger.out * jnp.dtype(config.dtype).itemsize
    return nbytes(abstract(tower)) + STORE_ROWS * (1 + len(tower.deepstack)) * row_bytes


def media_of(
    folder: Path,
    config: ModelConfig,
    multimodal: Multimodal,
    max_len: int,
    options: SizedOptions,
) -> tuple[MediaEncoder, MediaReader]:
    """The encoder of a model's images, and what reads them from requests."""
    tower = tower_of(config, multimodal)
    step_rows = options.max_num_batched_tokens
    step_seqs = options.max_num_seqs
    max_rows = MEDIA_ROWS[backend()]
    if options.mm_processor_kwargs:
        max_rows = multimodal.rule.max_tokens or max_rows
    max_rows = min(multimodal.rule.fixed_tokens or max_rows, max_len, STORE_ROWS)
    if multimodal.sees_spans and step_rows < step_seqs + max_rows:
        raise ModelError(
            f"max_num_batched_tokens is {step_rows}; a step must hold an image, {max_rows} tokens, "
            f"beside max_num_seqs ({step_seqs}): at least {step_seqs + max_rows}, or set "
            "language_model_only"
        )
    load_tower = partial(load, folder, tower, multimodal.kind)
    log.info("reads images, of up to %d tokens each", max_rows)
    encoder = MediaEncoder(
        tower,
        value_table(multimodal.rule),
        load_tower,
        STORE_ROWS,
        max_rows,
        has_one_size=multimodal.rule.fixed_tokens is not None,
    )
    reader = MediaReader(
        multimodal, max_rows * tower.group, max_images(options), options.max_image_pixels
    )
    return encoder, reader
