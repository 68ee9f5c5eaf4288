"""OLMoE: norms across all heads, and experts in every layer."""

from functools import partial

from ..config import Attention, Layer, ModelConfig, Moe
from .common import Keys, model_config, model_sources, sparse_layer_sources


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(hf)
    keys.refuse("clip_qkv")
    context_length = keys.count("max_position_embeddings", 4096)
    heads = keys.heads()
    bias = keys("attention_bias", False)
    rope = keys.rope(heads["head_dim"], max_len or context_length)
    attention = Attention(**heads, rope=rope, bias=bias, out_bias=bias, qk_norm="all")
    moe = Moe(
        experts=keys.count("num_experts", 64),
        top_k=keys.count("num_experts_per_tok", 8),
        dim=keys.count("intermediate_size", 2048),
        activation=keys.activation("hidden_act"),
        normalize=keys("norm_topk_prob", False),
    )
    layers = (Layer(attention, moe=moe),) * keys.count("num_hidden_layers")
    return model_config(
        keys, "olmoe", layers, context_length, norm_eps=keys.positive("rms_norm_eps", 1e-5)
    )


sources = partial(model_sources, layer=sparse_layer_sources)
