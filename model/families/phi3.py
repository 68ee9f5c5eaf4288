"""Phi-3 and Phi-4: Llama with fused projections; the small ones have long contexts by longrope."""

from functools import partial

from ..config import Attention, Layer, Mlp, ModelConfig, ModelError
from .common import Keys, model_config, model_sources, narrower

EARLY_NAMES = ("su", "yarn")  # what the first configs called longrope


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(rename_longrope(hf))
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        keys.refuse(name, False)
    keys.refuse("full_attn_mod", 1)
    keys.refuse("interpolate_factor", 1)
    longest, heads = keys.count("max_position_embeddings", 4096), keys.heads()
    attention = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], max_len or longest),
        window=narrower(keys.count("sliding_window", None), longest),
    )
    layer = Layer(attention, Mlp(keys.count("intermediate_size"), keys.activation("hidden_act")))
    layers = (layer,) * keys.count("num_hidden_layers")
    return model_config(keys, "phi3", layers, longest, norm_eps=keys.positive("rms_norm_eps", 1e-5))


def rename_longrope(hf: dict) -> dict:
    """`hf` with its longrope under that name; no other scaling exists for these models."""
    hf = dict(hf)
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(params := hf.get(name), dict):
            continue
        kind = params.get("rope_type") or params.get("type") or "default"
        kind = "longrope" if kind in EARLY_NAMES else kind
        if kind not in ("default", "longrope"):
            raise ModelError(f"config.json: rope_type {kind!r} is not supported for phi3; it can be longrope")
        hf[name] = params | {"rope_type": kind, "type": None}
    return hf


sources = partial(model_sources, fused=("qkv", "gate_up"))
