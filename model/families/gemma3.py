"""Gemma 3: Gemma 2 with head norms instead of soft caps; local and global layers differ in rope."""

from dataclasses import replace

from ..config import Attention, ModelConfig
from .common import Keys, layer_types
from .gemma2 import sources, windowed_config

MISSING = {  # defaults: the larger models omit most keys
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
}  # fmt: skip


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(MISSING | hf)
    both_ways = keys("use_bidirectional_attention", False)
    if both_ways:  # bidirectional: the key counts both sides of the window
        keys.hf["sliding_window"] = keys.count("sliding_window") // 2 + 1
    keys.refuse("attn_logit_softcapping")
    context_length = keys.count("max_position_embeddings", 131072)
    heads = keys.heads(256)
    heads["scale"] = keys.positive("query_pre_attn_scalar", 256) ** -0.5
    bias = keys("attention_bias", False)
    H = heads["head_dim"]
    served = max_len or context_length
    local_theta = keys("rope_local_base_freq", 10000.0)
    full = Attention(
        **heads,
        rope=keys.rope(H, served, "full_attention", 1e6),
        qk_norm="head",
        bias=bias,
        out_bias=bias,
        both_ways=both_ways,
    )
    sliding = replace(
        full, rope=keys.rope(H, served, "sliding_attention", local_theta, ignores_old_keys=True)
    )
    L = keys.count("num_hidden_layers")
    period = keys.count("sliding_window_pattern", 6)
    kinds = layer_types(
        keys, L, ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(L)]
    )
    return windowed_config(keys, "gemma3_text", kinds, full, sliding, context_length)


__all__ = ["config", "sources"]
