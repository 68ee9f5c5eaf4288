"""Phi-3.5-MoE: layer norms with bias, a bias on the head, two experts by sparse-mixer weights."""

from ..config import Attention, Layer, ModelConfig, Moe
from ..weights import LayerWeights, ModelWeights
from .common import (
    Keys,
    effective_window,
    layer_norm,
    model_config,
    model_sources,
    sparse_layer_sources,
    vector,
)
from .mixtral import canonical as canonical


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(hf)
    context_length = keys.count("max_position_embeddings", 131072)
    heads = keys.heads()
    bias = keys("attention_bias", False)
    attention = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], max_len or context_length, theta=1e6),
        window=effective_window(keys.count("sliding_window", None), context_length),
        bias=bias,
        out_bias=bias,
    )
    moe = Moe(
        experts=keys.count("num_local_experts", 16),
        top_k=keys.count("num_experts_per_tok", 2),
        dim=keys.count("intermediate_size", 6400),
        activation=keys.activation("hidden_act"),
        score="mixer",
        jitter=keys("router_jitter_noise", 0.01),
        normalize=False,
    )
    keys.ignore("input_jitter_noise")  # training only
    layers = (Layer(attention, moe=moe),) * keys.count("num_hidden_layers")
    return model_config(
        keys,
        "phimoe",
        layers,
        context_length,
        norm="layer_bias",
        head_bias=keys("lm_head_bias", False),
    )


def layer(config: ModelConfig, index: int, prefix: str) -> LayerWeights:
    layer_prefix = f"{prefix}layers.{index}"
    D = config.dim
    return sparse_layer_sources(
        config, index, prefix, names={"experts": ("w1", "w3", "w2")}
    ).replace(
        pre_attention_norm_D=layer_norm(f"{layer_prefix}.input_layernorm", D),
        pre_mlp_norm_D=layer_norm(f"{layer_prefix}.post_attention_layernorm", D),
    )


def sources(config: ModelConfig) -> ModelWeights:
    return model_sources(config, layer=layer).replace(
        final_norm_D=layer_norm("model.norm", config.dim),
        head_bias_V=vector("lm_head.bias", config.vocab_size) if config.head_bias else None,
    )
