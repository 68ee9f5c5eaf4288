"""Command R, R7B and A: parallel attention and MLP, norms with mean subtraction, scaled logits."""

from dataclasses import replace
from functools import partial

from ..config import Attention, ModelConfig
from .common import Keys, layer_types, layers_by_type, model_config, model_sources

HARMLESS = {  # keys about the training code -> the only value that is supported
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "rotary_pct": 1.0,
    "use_parallel_embedding": False,
    "position_embedding_type": "rope_gptj",
    "use_qk_norm": False,
    "order_of_interleaved_layers": "local_attn_first",
}


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(hf)
    kind = hf["model_type"]
    for name, value in HARMLESS.items():
        keys.refuse(name, value)
    keys.ignore("layer_switch")  # repeats layer_types
    context_length = keys.count("max_position_embeddings", 8192)
    heads = keys.heads()
    bias = keys("attention_bias", False)
    theta = {"cohere": 500000.0, "cohere2": 10000.0}[kind]
    rotary = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], max_len or context_length, theta=theta),
        bias=bias,
        out_bias=bias,
    )
    L = keys.count("num_hidden_layers")
    mlp = keys.mlp()
    full = rotary
    kinds = None
    window = None
    if kind == "cohere2":  # its global layers have no rotary embedding
        full = replace(rotary, rope=None)
        window = keys.count("sliding_window", 4096)
        period = keys.count("sliding_window_pattern", 4)
        kinds = layer_types(
            keys,
            L,
            ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(L)],
        )
    layers = layers_by_type(
        kinds or ["full_attention"] * L, mlp, full, rotary, window, context_length, parallel=True
    )
    return model_config(
        keys,
        kind,
        layers,
        context_length,
        norm_eps=keys.positive("layer_norm_eps", 1e-5),
        logit_scale=keys.positive("logit_scale", 0.0625),
        tied=keys("tie_word_embeddings", True),
        centred=True,
    )


sources = partial(
    model_sources, norms={"pre_attention_norm_D": "input_layernorm"}, interleaved=True
)
