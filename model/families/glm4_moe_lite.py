"""GLM-4.7-Flash: a small DeepSeek-V3 with its own defaults."""

from ..config import Layer, Mlp, ModelConfig, ModelError
from .common import Keys, model_config
from .deepseek import ignored, latent_attention, sigmoid_experts, sources

MISSING = {  # defaults
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
}


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(MISSING | hf)
    context_length = keys.count("max_position_embeddings", 202752)
    activation = keys.activation("hidden_act")
    attention = latent_attention(keys, max_len or context_length)
    moe = sigmoid_experts(keys, activation)
    shared = Mlp(keys.count("n_shared_experts") * moe.dim, activation)
    layers_by_kind = {
        "dense": Layer(attention, keys.mlp()),
        "sparse": Layer(attention, shared, moe),
    }
    L = keys.count("num_hidden_layers")
    first_sparse = keys("first_k_dense_replace", 1)
    kinds = keys("mlp_layer_types", ["dense" if i < first_sparse else "sparse" for i in range(L)])
    if len(kinds) != L or {*map(str, kinds)} - {*layers_by_kind}:
        raise ModelError(
            f"config.json: mlp_layer_types must have {L} entries, each dense or sparse"
        )
    layers = tuple(layers_by_kind[kind] for kind in kinds)
    return model_config(
        keys, "glm4_moe_lite", layers, context_length, norm_eps=keys.positive("rms_norm_eps", 1e-5)
    )


__all__ = ["config", "ignored", "sources"]
