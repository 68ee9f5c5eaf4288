"""Qwen3 with experts in most layers."""

from functools import partial

from ..config import Attention, Layer, Mlp, ModelConfig, Moe
from .common import Keys, effective_window, model_config, model_sources, sparse_layer_sources


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(hf)
    context_length = keys.count("max_position_embeddings", 32768)
    heads = keys.heads()
    bias = keys("attention_bias", False)
    window = keys.count("sliding_window", 4096) if keys("use_sliding_window", False) else None
    keys.ignore("max_window_layers")  # all layers have the same window
    attention = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], max_len or context_length),
        window=effective_window(window, context_length),
        bias=bias,
        out_bias=bias,
        qk_norm="head",
    )
    activation = keys.activation("hidden_act")
    moe = Moe(
        experts=keys.count("num_experts", keys("num_local_experts", 128)),
        top_k=keys.count("num_experts_per_tok", 8),
        dim=keys.count("moe_intermediate_size", 768),
        activation=activation,
        normalize=keys("norm_topk_prob", False),
    )
    sparse = Layer(attention, moe=moe)
    dense = Layer(attention, Mlp(keys.count("intermediate_size", 6144), activation))
    step = keys.count("decoder_sparse_step", 1)
    dense_only = keys("mlp_only_layers", [])
    layers = tuple(
        dense if i in dense_only or (i + 1) % step else sparse
        for i in range(keys.count("num_hidden_layers"))
    )
    return model_config(keys, "qwen3_moe", layers, context_length)


sources = partial(model_sources, layer=sparse_layer_sources)
