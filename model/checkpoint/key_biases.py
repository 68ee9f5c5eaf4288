"""Layers whose key biases leave the rest of a key little of a code, found in the weights before pages are made."""

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
from .loader import find_parts

# The root mean square over a head of what is left of its bias. Without a bias that of a key is 1 or 2 in models that we
# saw. In Qwen2.5 0.5B layer 0 has 9.7 left, and no other layer more than 1.7.
LIMIT = 4.0


def keep_wide(folder: Path, config: ModelConfig) -> ModelConfig:
    """With those layers in the model's dtype where keys and values become codes; the log names them.

    Where the user has named layers, those alone stay wide. Of converted checkpoints none does: no weight of theirs is
    read before all are loaded.
    """
    coded = [index for index in config.kv_layers if jnp.dtype(config.layer_kv_dtype(index)).itemsize == 1]
    biased = [index for index in coded if has_key_bias(config.layers[index].attention)]
    if not biased or config.kv_cache_skips or orbax.holds_weights(folder):
        return config
    tensors, parts = find_parts(folder, config)
    specs = dense_specs(config)
    wide: tuple[int, ...] = ()
    for index in biased:
        sources = parts.layers[index].attention.qkv_bias_GH
        bias_GH = read_leaf(specs.layers[index].attention.qkv_bias_GH, sources, tensors)
        if bias_left(config.layers[index].attention, bias_GH) > LIMIT:
            wide += (index,)
    if wide:
        warn_of_wide(config.kv_cache_dtype, config.dtype, wide)
    return replace(config, kv_cache_skips=wide)


@cache
def warn_of_wide(cache_dtype: str, dtype: str, layers: tuple[int, ...]) -> None:
    logging.getLogger("quire").warning(
        "kv_cache_dtype is %s, but keys and values stay in %s in these layers, whose large key biases would leave "
        "little of a code to the rest of a key: %s; kv_cache_dtype_skip_layers can name others",
        cache_dtype, dtype, ", ".join(map(str, layers)),
    )  # fmt: skip


def has_key_bias(mixer) -> bool:
    """Whether a layer adds a bias to keys of its own that no norm follows."""
    return isinstance(mixer, Attention) and mixer.bias and mixer.kv_source is None and mixer.qk_norm is None
