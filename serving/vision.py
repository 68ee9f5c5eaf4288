"""From options to the vision tower of an engine and the reader of its images."""

import importlib.util
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax.numpy as jnp

from ..model.config import ModelConfig, ModelError
from ..model.images.pixels import value_table
from ..model.images.rule import ImageRule
from ..model.multimodal import Multimodal, has_preprocessor, is_multimodal, read
from ..model.towers.checkpoint import load
from ..model.towers.config import Tower
from ..model.towers.weights import abstract
from ..sharding.spec import nbytes
from .api.image_options import MAX_IMAGES
from .api.options import PARALLEL, EngineOptions
from .device.encode import MediaEncoder, backend
from .media_fetcher import MediaFetcher
from .media_reader import MediaReader

log = logging.getLogger("quire")

# The largest number of rows of an image, by default and where `mm_processor_kwargs` sets its size.
MEDIA_ROWS = {"cpu": 1024, "gpu": 4096}
MAX_MEDIA_ROWS = {"cpu": 2048, "gpu": 8192}
STORE_ROWS = 8192  # of the device's media store
SPANS_ON_CPUS = "images whose tokens attend to later ones are read on CPUs only"


def multimodal_of(folder: Path, options: EngineOptions) -> Multimodal | None:
    """How the model reads images; None if it serves text only, see `text_only_reason`."""
    if text_only_reason(options) or not is_multimodal(folder, options.hf_overrides):
        return None
    if not has_preprocessor(folder):
        return None
    try:
        multimodal = read(folder, options.hf_overrides, options.mm_processor_kwargs)
    except ModelError as error:
        raise ModelError(f"{error} (language_model_only serves text without images)") from None
    return None if text_only_reason(options, multimodal) else multimodal


def max_images(options: EngineOptions) -> int:
    """The maximum number of images of a prompt."""
    return (options.limit_mm_per_prompt or {}).get("image", MAX_IMAGES)


def text_only_reason(options: EngineOptions, multimodal: Multimodal | None = None) -> str | None:
    """Why a model that could read images serves text only; None if it reads them."""
    if options.language_model_only:
        return "language_model_only is set"
    if max_images(options) == 0:
        return "limit_mm_per_prompt is 0 for images"
    if any(getattr(options, name) != 1 for name in (*PARALLEL.values(), "num_processes")):
        return "models that are split over devices or processes read no images"
    if importlib.util.find_spec("PIL") is None:
        return "images need Pillow: pip install 'quire[images]'"
    if multimodal is None or not multimodal.sees_spans:
        return None
    if backend() != "cpu":
        return SPANS_ON_CPUS
    sized = options.on("cpu")
    rows = max(sized.max_num_seqs, 16) + multimodal.rule.max_tokens
    if sized.max_num_batched_tokens < rows:
        return (
            f"a step must hold an image beside other tokens: max_num_batched_tokens is "
            f"{sized.max_num_batched_tokens}, and must be at least {rows}"
        )
    return None


def explain_text_only(folder: Path, options: EngineOptions) -> None:
    """Log why a model that could read images serves text only."""
    if not is_multimodal(folder, options.hf_overrides):
        return
    reason = text_only_reason(options)
    if reason is None and not has_preprocessor(folder):
        reason = "preprocessor_config.json is missing, which says how images are read"
    if reason is None:
        multimodal = read(folder, options.hf_overrides, options.mm_processor_kwargs)
        reason = text_only_reason(options, multimodal)
    log.info("the model serves text only: %s", reason)


def tower_of(config: ModelConfig, tower: Tower) -> Tower:
    """The tower in the dtype of the text model."""
    return replace(tower, model=replace(tower.model, dtype=config.dtype))


def media_bytes(config: ModelConfig, tower: Tower) -> int:
    """Bytes of the tower's weights and of the media store."""
    tower = tower_of(config, tower)
    row_bytes = tower.merger.out * jnp.dtype(config.dtype).itemsize
    return nbytes(abstract(tower)) + STORE_ROWS * (1 + len(tower.deepstack)) * row_bytes


def max_media_rows(rule: ImageRule, platform: str, max_len: int, is_sized: bool = False) -> int:
    """The largest number of rows of an image.

    Args:
        rule: How the model reads images.
        platform: "cpu" or "gpu".
        max_len: The maximum length of a sequence.
        is_sized: Whether `mm_processor_kwargs` sets the size of images.
    """
    limits = MAX_MEDIA_ROWS if is_sized else MEDIA_ROWS
    return min(rule.max_tokens, limits[platform], max_len, STORE_ROWS)


def media_of(
    folder: Path,
    config: ModelConfig,
    multimodal: Multimodal,
    max_len: int,
    options: EngineOptions,
) -> tuple[MediaEncoder, MediaReader]:
    """The encoder of a model's images, and what reads them from requests."""
    tower = tower_of(config, multimodal.tower)
    is_sized = bool(
        set(options.mm_processor_kwargs or ()) & {"max_pixels", "max_soft_tokens", "size"}
    )
    max_rows = max_media_rows(multimodal.rule, backend(), max_len, is_sized)
    load_tower = partial(load, folder, tower, multimodal.kind)
    log.info("reads images, of up to %d tokens each", max_rows)
    encoder = MediaEncoder(
        tower,
        value_table(multimodal.rule),
        load_tower,
        STORE_ROWS,
        max_rows,
        has_one_size=multimodal.rule.has_fixed_size,
    )
    reader = MediaReader(
        multimodal,
        max_rows * tower.group,
        max_images(options),
        options.max_image_pixels,
        MediaFetcher(options.allowed_media_domains or (), options.allowed_local_media_path),
    )
    return encoder, reader
