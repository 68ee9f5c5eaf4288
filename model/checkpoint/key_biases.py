"""Exclude layers with large key biases from KV-cache quantisation, before pages are allocated."""

import logging
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax.numpy as jnp

from ..config import Attention, ModelConfig
from ..mixers.attention import bias_left
from ..weights import dense_specs
from . import orbax
from .dense_leaf import read_leaf
from .loader import find_sources

# Root mean square over a head of the key bias that `key_shift` does not remove. Keys without a bias
# have 1 or 2 themselves in the models that we saw. In Qwen2.5 0.5B layer 0 has 9.7, no other more
# than 1.7.
LIMIT = 4.0


def skip_biased_layers(folder: Path, config: ModelConfig) -> ModelConfig:
    """Keep the KV cache of such layers in the model's dtype; the log names them.

    Layers that the user named take precedence. Converted checkpoints are not inspected: their
    weights cannot be read before all are loaded.
    """
    coded = [
        index for index in config.kv_layers if jnp.dtype(config.layer_kv_dtype(index)).itemsize == 1
    ]
    biased = [index for index in coded if has_key_bias(config.layers[index].attention)]
    if not biased or config.kv_cache_skips or orbax.holds_weights(folder):
        return config
    tensors, model_sources = find_sources(folder, config)
    specs = dense_specs(config)
    skipped: tuple[int, ...] = ()
    for index in biased:
        a = config.layers[index].attention
        assert isinstance(a, Attention)  # `has_key_bias`
        bias_sources = model_sources.layers[index].attention.qkv_bias_GH
        bias_GH = read_leaf(specs.layers[index].attention.qkv_bias_GH, bias_sources, tensors)
        if bias_left(a, bias_GH) > LIMIT:
            skipped += (index,)
    if skipped:
        warn_of_skipped(config.kv_cache_dtype, config.dtype, skipped)
    return replace(config, kv_cache_skips=skipped)


@cache
def warn_of_skipped(cache_dtype: str, dtype: str, layers: tuple[int, ...]) -> None:
    logging.getLogger("quire").warning(
        "kv_cache_dtype is %s, but keys and values stay in %s in these layers, whose large key "
        "biases would leave little of a code to the rest of a key: %s; kv_cache_dtype_skip_layers "
        "can name others",
        cache_dtype,
        dtype,
        ", ".join(map(str, layers)),
    )


def has_key_bias(mixer) -> bool:
    """Whether a layer adds a bias to its own keys and does not normalise them afterwards."""
    return (
        isinstance(mixer, Attention)
        and mixer.bias
        and mixer.kv_source is None
        and mixer.qk_norm is None
    )
