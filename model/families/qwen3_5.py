"""The text part of Qwen3.5 and Qwen3.5-MoE: Qwen3-Next's layers, with separate tensors."""

from functools import partial
from typing import Any

from ..config import Layer, Mlp, ModelConfig, Moe
from . import qwen3_next
from .common import Keys, model_config, model_sources, without_mrope


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    hf = without_mrope(hf)
    keys = Keys({"partial_rotary_factor": 0.25} | hf)
    keys.refuse("attn_output_gate", True)
    keys.refuse("mamba_ssm_dtype", "float32")
    keys.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    attention, delta = qwen3_next.mixers(keys, max_len)
    activation = keys.activation("hidden_act")
    sparse = "moe" in hf["model_type"]
    if sparse:
        keys.refuse("mlp_only_layers", [])
        moe = Moe(
            experts=keys.count("num_experts", 256),
            top_k=keys.count("num_experts_per_tok", 8),
            dim=keys.count("moe_intermediate_size", 512),
            activation=activation,
        )
        blocks: Any = (
            Mlp(keys.count("shared_expert_intermediate_size", 512), activation, gate=True),
            moe,
        )
    else:
        blocks = (Mlp(keys.count("intermediate_size", 12288), activation),)
    layers = tuple(
        Layer(attention if kind == "full_attention" else delta, *blocks)
        for kind in qwen3_next.layer_kinds(keys)
    )
    return model_config(keys, "qwen3_5_text", layers, keys.count("max_position_embeddings", 32768))


layer = partial(qwen3_next.layer, delta=qwen3_next.separate_sources)
sources = partial(model_sources, layer=layer, norm_offset=1.0)


def ignored(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is not loaded: the MTP layer."""
    return name.startswith("mtp.")
