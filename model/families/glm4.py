"""GLM-4: partial, interleaved rotary embedding; GLM-4-0414 has norms before and after each
block.
"""

from ..config import Attention, Layer, ModelConfig
from ..weights import ModelWeights
from .common import LLAMA_NORMS, Keys, model_config, model_sources

MISSING = {"head_dim": 128, "partial_rotary_factor": 0.5, "num_key_value_heads": 2}
NORMS = LLAMA_NORMS | {
    "post_attention_norm_D": "post_self_attn_layernorm", "post_mlp_norm_D": "post_mlp_layernorm",
}  # fmt: skip


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(MISSING | hf)
    kind = hf["model_type"]
    context_length = keys.count("max_position_embeddings", 131072)
    heads = keys.heads()
    attention = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], max_len or context_length),
        bias=keys("attention_bias", True),
    )
    layers = (Layer(attention, keys.mlp(), post_norm=kind == "glm4"),) * keys.count(
        "num_hidden_layers"
    )
    return model_config(
        keys, kind, layers, context_length, norm_eps=keys.positive("rms_norm_eps", 1.5625e-7)
    )


def sources(config: ModelConfig) -> ModelWeights:
    norms = NORMS if config.family == "glm4" else LLAMA_NORMS
    return model_sources(config, norms=norms, fused=("gate_up",), interleaved=True)
