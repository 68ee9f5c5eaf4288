"""EXAONE 4: post-norms and head norms; next to windowed layers, global ones have no positions."""

from dataclasses import replace
from functools import partial

from ..config import Attention, ModelConfig, ModelError
from .common import POST_NORMS, Keys, layer_types, layers_by_type, model_config, model_sources


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys({"sliding_window": 4096} | hf)
    context_length = keys.count("max_position_embeddings", 2048)
    heads = keys.heads()
    rope = keys.rope(heads["head_dim"], max_len or context_length)
    window = keys.count("sliding_window", None)
    sliding = Attention(**heads, rope=rope, qk_norm="head")
    full = sliding if window is None else replace(sliding, rope=None)
    L = keys.count("num_hidden_layers")
    kinds = layer_types(keys, L, default_kinds(keys, L, window))
    layers = layers_by_type(
        kinds, keys.mlp(), full, sliding, window, context_length, pre_norm=False, post_norm=True
    )
    return model_config(
        keys, "exaone4", layers, context_length, norm_eps=keys.positive("rms_norm_eps", 1e-5)
    )


def default_kinds(keys: Keys, count: int, window: int | None) -> list[str]:
    """The kinds of layers if config.json does not list them."""
    pattern = keys("sliding_window_pattern", None) or 4
    if window is None:
        return ["full_attention"] * count
    if isinstance(pattern, str):
        if keys("layer_types", None) is None:
            raise ModelError(
                f"config.json: sliding_window_pattern = {pattern!r} without layer_types is not "
                "supported"
            )
        return []
    period = keys.count("sliding_window_pattern", 4)
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(count)]


sources = partial(model_sources, norms=POST_NORMS)
