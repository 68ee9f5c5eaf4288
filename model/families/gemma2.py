"""Gemma 2: norms before and after each block, soft caps, and a window on every other layer."""

from functools import partial

from ..config import Attention, Layer, Mlp, ModelConfig
from .common import SANDWICH_NORMS, Keys, layer_types, layers_by_type, model_config, model_sources

MISSING = {  # defaults
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(MISSING | hf)
    keys.ignore("hidden_act", "sliding_window_size")  # older names, not used
    keys.refuse("use_bidirectional_attention", False)
    context_length = keys.count("max_position_embeddings", 8192)
    heads = keys.heads(256)
    bias = keys("attention_bias", False)
    heads["scale"] = keys.positive("query_pre_attn_scalar", 256) ** -0.5
    attention = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], max_len or context_length),
        soft_cap=keys.positive("attn_logit_softcapping", None),
        bias=bias,
        out_bias=bias,
    )
    L = keys.count("num_hidden_layers")
    kinds = layer_types(
        keys, L, ["full_attention" if i % 2 else "sliding_attention" for i in range(L)]
    )
    return windowed_config(keys, "gemma2", kinds, attention, attention, context_length)


def windowed_config(
    keys: Keys,
    family: str,
    kinds: list[str],
    full: Attention,
    sliding: Attention,
    context_length: int,
) -> ModelConfig:
    """The config of a Gemma model whose layers all have the same MLP size."""
    mlp = Mlp(keys.count("intermediate_size"), keys.activation("hidden_activation"))
    window = keys.count("sliding_window", None)
    layers = layers_by_type(kinds, mlp, full, sliding, window, context_length, post_norm=True)
    return gemma_config(keys, family, layers, context_length)


def gemma_config(
    keys: Keys, family: str, layers: tuple[Layer, ...], context_length: int, **fields
) -> ModelConfig:
    """The config from the keys that all Gemma models share."""
    return model_config(
        keys,
        family,
        layers,
        context_length,
        tied=keys("tie_word_embeddings", True),
        embed_scale=keys("hidden_size") ** 0.5,
        final_soft_cap=keys.positive("final_logit_softcapping", None),
        **fields,
    )


sources = partial(model_sources, norms=SANDWICH_NORMS, norm_offset=1.0)
