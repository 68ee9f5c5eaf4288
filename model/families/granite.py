"""Granite 3: Llama with multipliers on embeddings, scores, blocks and logits."""

from ..config import Attention, Layer, ModelConfig
from .common import Keys, model_config, model_sources


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(hf)
    context_length = keys.count("max_position_embeddings", 2048)
    heads = keys.heads()
    bias = keys("attention_bias", False)
    heads["scale"] = keys.positive("attention_multiplier", 1.0)
    attention = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], max_len or context_length),
        bias=bias,
        out_bias=bias,
    )
    layers = (Layer(attention, keys.mlp()),) * keys.count("num_hidden_layers")
    return model_config(keys, "granite", layers, context_length, **multipliers(keys))


def multipliers(keys: Keys) -> dict[str, float]:
    """The multipliers of the whole model."""
    return {
        "embed_scale": keys.positive("embedding_multiplier", 1.0),
        "residual_scale": keys.positive("residual_multiplier", 1.0),
        "logit_scale": 1.0 / keys.positive("logits_scaling", 1.0),
    }


sources = model_sources
