"""DeepSeek-V3.2 and GLM-5: up to `index_topk` tokens, all that is served, where the indexer picks every token."""

from ..config import Layer, Mlp, ModelConfig, ModelError
from .common import Keys, model_config
from .deepseek import ignored as predicts_further
from .deepseek import latent_attention, sigmoid_experts, sources

MISSING = {  # what a config.json without these keys means
    "deepseek_v32": {
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
    },
    "glm_moe_dsa": {
        "kv_lora_rank": 512, "q_lora_rank": 2048, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys, kind = Keys(MISSING[hf["model_type"]] | hf), hf["model_type"]
    # Where no more positions are there than the indexer picks, it picks all of them, and attention is dense.
    longest = min(keys.count("max_position_embeddings"), keys.count("index_topk", 2048))
    keys.ignore(*(name for name in hf if name.startswith(("index_", "indexer_"))), "layer_types")
    attention, activation = latent_attention(keys, max_len or longest), keys.activation("hidden_act")
    moe = sigmoid_experts(keys, activation)
    shared = Mlp(keys.count("n_shared_experts") * moe.dim, activation)
    layers = {"dense": Layer(attention, keys.mlp()), "sparse": Layer(attention, shared, moe)}
    L, first = keys.count("num_hidden_layers"), keys("first_k_dense_replace", 3)
    keys.refuse("moe_layer_freq", 1)
    kinds = keys("mlp_layer_types", ["dense" if i < first else "sparse" for i in range(L)])
    if len(kinds) != L or {*map(str, kinds)} - {*layers}:
        raise ModelError(f"config.json: mlp_layer_types must have {L} entries, each dense or sparse")
    keys.quantization("fp8")  # widened at load
    return model_config(keys, kind, tuple(layers[kind] for kind in kinds), longest)


def ignored(name: str, config: ModelConfig) -> bool:
    """The indexers, and the layers past the last."""
    return ".self_attn.indexer." in name or predicts_further(name, config)


__all__ = ["config", "ignored", "sources"]
