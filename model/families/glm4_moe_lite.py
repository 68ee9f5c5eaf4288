"""GLM-4.7-Flash: DeepSeek-V3 in small, with its own defaults."""

from ..config import Layer, Mlp, ModelConfig, ModelError
from .common import Keys, model_config
from .deepseek import ignored, latent_attention, sigmoid_experts, sources

MISSING = {  # what a config.json without these keys means
    "kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256,
    "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8,
}  # fmt: skip


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(MISSING | hf)
    longest, activation = keys.count("max_position_embeddings", 202752), keys.activation("hidden_act")
    attention, moe = latent_attention(keys, max_len or longest), sigmoid_experts(keys, activation)
    shared = Mlp(keys.count("n_shared_experts") * moe.dim, activation)
    layers = {"dense": Layer(attention, keys.mlp()), "sparse": Layer(attention, shared, moe)}
    L, first = keys.count("num_hidden_layers"), keys("first_k_dense_replace", 1)
    kinds = keys("mlp_layer_types", ["dense" if i < first else "sparse" for i in range(L)])
    if len(kinds) != L or {*map(str, kinds)} - {*layers}:
        raise ModelError(f"config.json: mlp_layer_types must have {L} entries, each dense or sparse")
    made = tuple(layers[kind] for kind in kinds)
    return model_config(keys, "glm4_moe_lite", made, longest, norm_eps=keys.positive("rms_norm_eps", 1e-5))


__all__ = ["config", "ignored", "sources"]
