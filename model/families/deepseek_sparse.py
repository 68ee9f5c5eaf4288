"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with sparse attention to the tokens that an indexer
selects.
"""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..config import LatentAttention, Layer, Mlp, ModelConfig, ModelError
from ..indexer import Indexer
from ..mixers.indexer import IndexerWeights
from ..weights import LayerWeights
from . import deepseek
from .common import Keys, deinterleave_rotary, linear, model_config, model_sources, tensor
from .deepseek import latent_attention, sigmoid_experts

MISSING = {  # defaults
    "deepseek_v32": {
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
    },
    "glm_moe_dsa": {
        "kv_lora_rank": 512,
        "q_lora_rank": 2048,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "n_group": 1,
        "topk_group": 1,
    },
}


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(MISSING[hf["model_type"]] | hf)
    kind = hf["model_type"]
    context_length = keys.count("max_position_embeddings")
    L = keys.count("num_hidden_layers")
    attention = latent_attention(keys, max_len or context_length)
    activation = keys.activation("hidden_act")
    indexers = layer_indexers(keys, kind, L)
    if (max_len or context_length) <= indexers[0].count:  # it would select every token
        indexers = [None] * L
    moe = sigmoid_experts(keys, activation)
    blocks = {
        "dense": (keys.mlp(), None),
        "sparse": (Mlp(keys.count("n_shared_experts") * moe.dim, activation), moe),
    }
    first_sparse = keys("first_k_dense_replace", 3)
    keys.refuse("moe_layer_freq", 1)
    keys.ignore("layer_types")
    kinds = keys("mlp_layer_types", ["dense" if i < first_sparse else "sparse" for i in range(L)])
    if len(kinds) != L or {*map(str, kinds)} - {*blocks}:
        raise ModelError(
            f"config.json: mlp_layer_types must have {L} entries, each dense or sparse"
        )
    layers = tuple(
        Layer(replace(attention, indexer=indexer), *blocks[kind])
        for indexer, kind in zip(indexers, kinds, strict=True)
    )
    return model_config(keys, kind, layers, context_length)


def layer_indexers(keys: Keys, kind: str, L: int) -> list[Any]:
    """The indexer of each layer; GLM-5's layers may reuse the previous layer's selection."""
    is_glm = kind == "glm_moe_dsa"
    indexer = Indexer(
        count=keys.count("index_topk", 2048),
        heads=keys.count("index_n_heads", 32 if is_glm else 64),
        dim=keys.count("index_head_dim", 128),
        interleaved=keys("indexer_rope_interleave", is_glm),
    )
    if not is_glm:
        return [indexer] * L
    period = keys.count("index_topk_freq", 1)
    offset = keys("index_skip_topk_offset", 2)
    pattern = keys("index_topk_pattern", None) or [
        "FS"[max(index - offset + 1, 0) % period > 0] for index in range(L)
    ]
    kinds = keys("indexer_types", None) or [
        {"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern
    ]
    if len(kinds) != L or {*map(str, kinds)} - {"full", "shared"} or kinds[0] != "full":
        raise ModelError(
            f"config.json: indexer_types must have {L} entries, each full or shared, and the "
            "first full"
        )
    return [indexer if kind == "full" else Indexer(indexer.count) for kind in kinds]


def indexer_sources(a: LatentAttention, D: int, prefix: str) -> IndexerWeights | None:
    indexer = a.indexer
    if indexer is None or not indexer.heads:
        return None
    rank = a.q_rank or D

    def split_pairs(x: np.ndarray) -> np.ndarray:
        """Deinterleave the rotary pairs, which are at the beginning of the last axis."""
        return deinterleave_rotary(x, 0, a.rope_dim) if indexer.interleaved else x

    def from_linear(out: tuple[int, ...], into: int):
        transform = linear(out, (into,))
        return lambda x: split_pairs(transform(x))

    def norm_source(name: str):
        return tensor(
            f"{prefix}.k_norm.{name}", (indexer.dim,), lambda x: split_pairs(x.astype(np.float32))
        )

    return IndexerWeights(
        q_up_AIH=tensor(
            f"{prefix}.wq_b.weight",
            (indexer.heads * indexer.dim, rank),
            from_linear((indexer.heads, indexer.dim), rank),
        ),
        key_DH=tensor(f"{prefix}.wk.weight", (indexer.dim, D), from_linear((indexer.dim,), D)),
        key_norm_H=norm_source("weight"),
        key_norm_bias_H=norm_source("bias"),
        weigh_DI=tensor(
            f"{prefix}.weights_proj.weight", (indexer.heads, D), linear((indexer.heads,), (D,))
        ),
    )


def layer(config: ModelConfig, index: int, prefix: str) -> LayerWeights:
    weights = deepseek.layer(config, index, prefix)
    a = config.layers[index].attention
    assert isinstance(a, LatentAttention)
    indexer = indexer_sources(a, config.dim, f"{prefix}layers.{index}.self_attn.indexer")
    return weights.replace(attention=weights.attention.replace(indexer=indexer))


sources = partial(model_sources, layer=layer)


def ignored(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is not loaded: MTP layers, and indexers if the maximum length is so short
    that they would select every token.
    """
    if deepseek.ignored(name, config):
        return True
    match = re.match(r"model\.layers\.(\d+)\.self_attn\.indexer\.", name)
    if match is None:
        return False
    a = config.layers[int(match[1])].attention
    assert isinstance(a, LatentAttention)
    return a.indexer is None or not a.indexer.heads
