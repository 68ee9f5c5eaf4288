"""LFM2 with experts: dense layers, then layers with experts selected by sigmoid plus bias."""

from ..config import Layer, Mlp, ModelConfig, Moe
from .common import Keys, model_config
from .lfm2 import canonical, mixers, shared_fields, sources


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys({"rope_theta": 1000000.0, "num_key_value_heads": 8} | hf)
    context_length = keys.count("max_position_embeddings", 128000)
    num_dense = keys("num_dense_layers", 2)
    moe = Moe(
        experts=keys.count("num_experts", 32),
        top_k=keys.count("num_experts_per_tok", 4),
        dim=keys.count("moe_intermediate_size", 1792),
        score="sigmoid",
        normalize=keys("norm_topk_prob", True),
        scaling=keys.positive("routed_scaling_factor", 1.0),
        choice_bias=keys("use_expert_bias", True),
    )
    mlp = Mlp(keys.count("intermediate_size", 7168))
    mixers_by_layer = mixers(keys, max_len or context_length)
    layers = tuple(
        Layer(mixer, mlp) if i < num_dense else Layer(mixer, moe=moe)
        for i, mixer in enumerate(mixers_by_layer)
    )
    return model_config(keys, "lfm2_moe", layers, context_length, **shared_fields(keys))


__all__ = ["canonical", "config", "sources"]
