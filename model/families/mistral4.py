"""Mistral 4: DeepSeek's latent attention with queries scaled by position, and experts by
softmax.
"""

from dataclasses import replace

from ..config import Layer, Mlp, ModelConfig, Moe
from .common import Keys, model_config
from .deepseek import expert_fields, ignored, latent_attention, sources
from .ministral3 import split_temperature

MISSING = {  # defaults
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
}
ROPE = {  # default without any rope keys
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    hf, temperature = split_temperature(hf, ROPE)
    rope = dict(hf.get("rope_parameters") or hf["rope_scaling"])
    rope.pop("partial_rotary_factor", None)  # relative to the whole head; qk_rope_head_dim counts
    keys = Keys(MISSING | hf | {"rope_parameters": rope})
    keys.ignore("rope_scaling")
    context_length = keys.count("max_position_embeddings", 1048576)
    activation = keys.activation("hidden_act")
    attention = replace(latent_attention(keys, max_len or context_length), temperature=temperature)
    dense = Layer(attention, keys.mlp())
    shared = keys.count("n_shared_experts")
    moe = Moe(
        **expert_fields(keys, 1.0),
        activation=activation,
        normalize=keys("norm_topk_prob", True),
        groups=keys.count("n_group", 1),
        top_groups=keys.count("topk_group", 1),
        group_score="top2",
    )
    sparse = Layer(attention, Mlp(shared * moe.dim, activation), moe)
    first = keys("first_k_dense_replace", 0)
    layers = tuple(dense if i < first else sparse for i in range(keys.count("num_hidden_layers")))
    return model_config(keys, "mistral4", layers, context_length)


__all__ = ["config", "ignored", "sources"]
