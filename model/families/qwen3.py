"""Qwen3, and the text part of Qwen3-VL: Qwen2 with head norms on queries and keys, mostly without
biases.
"""

from ..config import Attention, ModelConfig
from .common import Keys, model_config, model_sources, without_mrope
from .qwen2 import windowed_layers


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    if hf["model_type"] == "qwen3_vl_text":
        hf = {"rope_theta": 500000.0} | without_mrope(hf)
    keys = Keys(hf)
    context_length = keys.count("max_position_embeddings", 32768)
    heads = keys.heads(head_dim=128)
    bias = keys("attention_bias", False)
    attention = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], max_len or context_length),
        bias=bias,
        out_bias=bias,
        qk_norm="head",
    )
    return model_config(
        keys, "qwen3", windowed_layers(keys, attention, context_length), context_length
    )


sources = model_sources
