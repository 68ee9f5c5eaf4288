"""GLM-4.5 to 4.7: experts selected as in DeepSeek-V3; half of each head is rotated."""

from functools import partial

from ..config import Attention, Layer, Mlp, ModelConfig
from .common import Keys, model_config, model_sources, sparse_layer_sources
from .deepseek import ignored, sigmoid_experts

MISSING = {  # defaults
    "partial_rotary_factor": 0.5,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "num_key_value_heads": 8,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 1,
}


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(MISSING | hf)
    context_length = keys.count("max_position_embeddings", 131072)
    heads = keys.heads()
    attention = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], max_len or context_length),
        bias=keys("attention_bias", False),
        qk_norm="head" if keys("use_qk_norm", False) else None,
    )
    moe = sigmoid_experts(keys, keys.activation("hidden_act"))
    shared = Mlp(keys.count("n_shared_experts") * moe.dim, moe.activation)
    dense = Layer(attention, keys.mlp())
    sparse = Layer(attention, shared, moe)
    first = keys("first_k_dense_replace", 1)
    layers = tuple(dense if i < first else sparse for i in range(keys.count("num_hidden_layers")))
    return model_config(
        keys, "glm4_moe", layers, context_length, norm_eps=keys.positive("rms_norm_eps", 1e-5)
    )


sources = partial(model_sources, layer=sparse_layer_sources)

__all__ = ["config", "ignored", "sources"]
