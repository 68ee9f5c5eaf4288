"""Command R, R7B and A: attention and feed-forward block side by side, norms that take the mean off, scaled logits."""

from dataclasses import replace
from functools import partial

from ..config import Attention, ModelConfig
from .common import Keys, layer_types, layers_by_type, model_config, model_sources

HARMLESS = {  # what the files say of the code that trained them, and what each can only be
    "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True, "rotary_pct": 1.0,
    "use_parallel_embedding": False, "position_embedding_type": "rope_gptj", "use_qk_norm": False,
    "order_of_interleaved_layers": "local_attn_first",
}  # fmt: skip


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys, kind = Keys(hf), hf["model_type"]
    for name, value in HARMLESS.items():
        keys.refuse(name, value)
    keys.ignore("layer_switch")  # what layer_types say
    longest, heads, bias = keys.count("max_position_embeddings", 8192), keys.heads(), keys("attention_bias", False)
    theta = {"cohere": 500000.0, "cohere2": 10000.0}[kind]
    turning = Attention(
        **heads, rope=keys.rope(heads["head_dim"], max_len or longest, theta=theta), bias=bias, out_bias=bias
    )
    L, mlp, full, kinds, window = keys.count("num_hidden_layers"), keys.mlp(), turning, None, None
    if kind == "cohere2":  # its layers without a window do not rotate
        full, window = replace(turning, rope=None), keys.count("sliding_window", 4096)
        every = keys.count("sliding_window_pattern", 4)
        kinds = layer_types(keys, L, ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(L)])
    layers = layers_by_type(kinds or ["full_attention"] * L, mlp, full, turning, window, longest, parallel=True)
    return model_config(
        keys,
        kind,
        layers,
        longest,
        norm_eps=keys.positive("layer_norm_eps", 1e-5),
        logit_scale=keys.positive("logit_scale", 0.0625),
        tied=keys("tie_word_embeddings", True),
        centred=True,
    )


sources = partial(model_sources, norms={"pre_attention_norm_D": "input_layernorm"}, interleaved=True)
