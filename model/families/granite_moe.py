"""Granite 3's mixtures of experts, some with shared experts."""

from ..config import Attention, Layer, Mlp, ModelConfig, Moe
from .common import Keys, model_config
from .granite import multipliers
from .granite_hybrid import canonical, sources


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(hf)
    context_length = keys.count("max_position_embeddings", 2048)
    heads = keys.heads()
    bias = keys("attention_bias", False)
    heads["scale"] = keys.positive("attention_multiplier", 1.0)
    activation = keys.activation("hidden_act")
    attention = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], max_len or context_length),
        bias=bias,
        out_bias=bias,
    )
    moe = Moe(
        experts=keys.count("num_local_experts", 8),
        top_k=keys.count("num_experts_per_tok", 2),
        dim=keys.count("intermediate_size", 11008),
        activation=activation,
        score="softmax_top",
    )
    shared_width = keys("shared_intermediate_size", 0)
    shared_mlp = Mlp(shared_width, activation) if shared_width else None
    layers = (Layer(attention, shared_mlp, moe),) * keys.count("num_hidden_layers")
    return model_config(keys, hf["model_type"], layers, context_length, **multipliers(keys))


__all__ = ["canonical", "config", "sources"]
