"""Gemma 3: Gemma 2 with head norms in place of soft caps; local and global layers differ in their rope."""

from dataclasses import replace

from ..config import Attention, ModelConfig
from .common import Keys, layer_types
from .gemma2 import sources, windowed

MISSING = {  # what a config.json without these keys means: the larger models leave most of them out
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
}  # fmt: skip


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(MISSING | hf)
    both_ways = keys("use_bidirectional_attention", False)
    if both_ways:  # the window is that of both sides together
        keys.hf["sliding_window"] = keys.count("sliding_window") // 2 + 1
    keys.refuse("attn_logit_softcapping")
    longest, heads = keys.count("max_position_embeddings", 131072), keys.heads(256)
    heads["scale"], bias = keys.positive("query_pre_attn_scalar", 256) ** -0.5, keys("attention_bias", False)
    H, served = heads["head_dim"], max_len or longest
    local = keys("rope_local_base_freq", 10000.0)
    full = Attention(
        **heads,
        rope=keys.rope(H, served, "full_attention", 1e6),
        qk_norm="head",
        bias=bias,
        out_bias=bias,
        both_ways=both_ways,
    )
    sliding = replace(full, rope=keys.rope(H, served, "sliding_attention", local, plain=True))
    L, every = keys.count("num_hidden_layers"), keys.count("sliding_window_pattern", 6)
    kinds = layer_types(keys, L, ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(L)])
    return windowed(keys, "gemma3_text", kinds, full, sliding, longest)


__all__ = ["config", "sources"]
