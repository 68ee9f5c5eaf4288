"""Phi-3 and Phi-4: Llama with fused projections; the small models have long contexts by
longrope.
"""

from functools import partial

from ..config import Attention, Layer, Mlp, ModelConfig, ModelError
from .common import Keys, effective_window, model_config, model_sources

EARLY_NAMES = ("su", "yarn")  # longrope in the first configs


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(rename_longrope(hf))
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        keys.refuse(name, False)
    keys.refuse("full_attn_mod", 1)
    keys.refuse("interpolate_factor", 1)
    context_length = keys.count("max_position_embeddings", 4096)
    heads = keys.heads()
    attention = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], max_len or context_length),
        window=effective_window(keys.count("sliding_window", None), context_length),
    )
    layer = Layer(attention, Mlp(keys.count("intermediate_size"), keys.activation("hidden_act")))
    layers = (layer,) * keys.count("num_hidden_layers")
    return model_config(
        keys, "phi3", layers, context_length, norm_eps=keys.positive("rms_norm_eps", 1e-5)
    )


def rename_longrope(hf: dict) -> dict:
    """Rename the RoPE scaling type to longrope, the only scaling of these models."""
    hf = dict(hf)
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(params := hf.get(name), dict):
            continue
        kind = params.get("rope_type") or params.get("type") or "default"
        kind = "longrope" if kind in EARLY_NAMES else kind
        if kind not in ("default", "longrope"):
            raise ModelError(
                f"config.json: rope_type {kind!r} is not supported for phi3; it can be longrope"
            )
        hf[name] = params | {"rope_type": kind, "type": None}
    return hf


sources = partial(model_sources, fused=("qkv", "gate_up"))
