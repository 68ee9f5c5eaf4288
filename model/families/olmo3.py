"""OLMo 3: OLMo 2 with a window on three of four layers; only global layers scale their rope."""

from dataclasses import replace
from functools import partial

from ..config import Attention, Mlp, ModelConfig
from .common import POST_NORMS, Keys, layer_types, layers_by_type, model_config, model_sources

THETA = 500000.0


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys({"sliding_window": 4096} | hf)
    context_length = keys.count("max_position_embeddings", 2048)
    heads = keys.heads()
    bias = keys("attention_bias", False)
    H = heads["head_dim"]
    served = max_len or context_length
    rope = keys.rope(H, served, "full_attention", THETA)
    full = Attention(**heads, rope=rope, qk_norm="all", bias=bias, out_bias=bias)
    rope = keys.rope(
        H, served, "sliding_attention", keys("rope_theta", THETA), ignores_old_keys=True
    )
    sliding = replace(full, rope=rope)
    L = keys.count("num_hidden_layers")
    kinds = layer_types(
        keys, L, ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(L)]
    )
    mlp = Mlp(keys.count("intermediate_size"), keys.activation("hidden_act"))
    window = keys.count("sliding_window", None)
    layers = layers_by_type(
        kinds, mlp, full, sliding, window, context_length, pre_norm=False, post_norm=True
    )
    return model_config(
        keys, "olmo3", layers, context_length, norm_eps=keys.positive("rms_norm_eps", 1e-5)
    )


sources = partial(model_sources, norms=POST_NORMS)
