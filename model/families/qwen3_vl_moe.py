"""The text part of Qwen3-VL with experts: Qwen3-MoE with stacked experts in another layout."""

from dataclasses import replace
from functools import partial

from ..config import ModelConfig
from ..weights import LayerWeights
from . import qwen3_moe
from .common import SourceTensor, model_sources, sparse_layer_sources, without_mrope


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    defaults = {"rope_theta": 500000.0, "num_local_experts": 60, "num_experts_per_tok": 4}
    defaults |= {"moe_intermediate_size": 1408, "intermediate_size": 5632}
    defaults |= {"max_position_embeddings": 128000, "num_key_value_heads": 16}
    always = {"norm_topk_prob": True}
    config = qwen3_moe.config(defaults | without_mrope(hf) | always, max_len)
    return replace(config, family="qwen3_vl_moe_text")


def layer_sources(config: ModelConfig, index: int, prefix: str) -> LayerWeights:
    """Layers of Qwen3-MoE whose stacked experts may also be [experts, inputs, outputs], as in the
    published checkpoints.
    """
    weights = sparse_layer_sources(config, index, prefix)
    moe = config.layers[index].moe
    if moe is None:
        return weights
    E = moe.experts
    F = moe.dim
    D = config.dim
    experts = f"{prefix}layers.{index}.mlp.experts"
    up = SourceTensor(f"{experts}.gate_up_proj", (E, D, 2 * F), lambda x: x.reshape(-1, D, 2, F))
    down = SourceTensor(f"{experts}.down_proj", (E, F, D))
    return weights.replace(
        moe=weights.moe.replace(
            up_EDGF=replace(weights.moe.up_EDGF, whole=(*weights.moe.up_EDGF.whole, up)),
            down_EFD=replace(weights.moe.down_EFD, whole=(*weights.moe.down_EFD.whole, down)),
        )
    )


sources = partial(model_sources, layer=layer_sources)
