"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 whose rows read the part of a long context that an indexer picks."""

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
from .common import Keys, linear, model_config, model_sources, part_pairs, tensor
from .deepseek import latent_attention, sigmoid_experts

MISSING = {  # what a config.json without these keys means
    "deepseek_v32": {
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
    },
    "glm_moe_dsa": {
        "kv_lora_rank": 512, "q_lora_rank": 2048, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys, kind = Keys(MISSING[hf["model_type"]] | hf), hf["model_type"]
    longest, L = keys.count("max_position_embeddings"), keys.count("num_hidden_layers")
    attention, activation = latent_attention(keys, max_len or longest), keys.activation("hidden_act")
    indexers = indexers_of(keys, kind, L)
    if (max_len or longest) <= indexers[0].count:  # it would pick all of them
        indexers = [None] * L
    moe = sigmoid_experts(keys, activation)
    blocks = {"dense": (keys.mlp(), None), "sparse": (Mlp(keys.count("n_shared_experts") * moe.dim, activation), moe)}
    first = keys("first_k_dense_replace", 3)
    keys.refuse("moe_layer_freq", 1)
    keys.ignore("layer_types")
    kinds = keys("mlp_layer_types", ["dense" if i < first else "sparse" for i in range(L)])
    if len(kinds) != L or {*map(str, kinds)} - {*blocks}:
        raise ModelError(f"config.json: mlp_layer_types must have {L} entries, each dense or sparse")
    layers = tuple(
        Layer(replace(attention, indexer=own), *blocks[kind]) for own, kind in zip(indexers, kinds, strict=True)
    )
    return model_config(keys, kind, layers, longest)


def indexers_of(keys: Keys, kind: str, L: int) -> list[Any]:
    """Each layer's; GLM-5's may read what the layer before has picked."""
    glm = kind == "glm_moe_dsa"
    own = Indexer(
        count=keys.count("index_topk", 2048),
        heads=keys.count("index_n_heads", 32 if glm else 64),
        dim=keys.count("index_head_dim", 128),
        interleaved=keys("indexer_rope_interleave", glm),
    )
    if not glm:
        return [own] * L
    every, offset = keys.count("index_topk_freq", 1), keys("index_skip_topk_offset", 2)
    pattern = keys("index_topk_pattern", None) or ["FS"[max(index - offset + 1, 0) % every > 0] for index in range(L)]
    kinds = keys("indexer_types", None) or [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    if len(kinds) != L or {*map(str, kinds)} - {"full", "shared"} or kinds[0] != "full":
        raise ModelError(f"config.json: indexer_types must have {L} entries, each full or shared, and the first full")
    return [own if kind == "full" else Indexer(own.count) for kind in kinds]


def indexer_sources(a: LatentAttention, D: int, here: str) -> IndexerWeights | None:
    own = a.indexer
    if own is None or not own.heads:
        return None
    rank = a.q_rank or D

    def parted(x: np.ndarray) -> np.ndarray:
        """With the rotary pairs, which are at the beginning of the last axis, parted."""
        return part_pairs(x, 0, a.rope_dim) if own.interleaved else x

    def turned(out: tuple[int, ...], into: int):
        turn = linear(out, (into,))
        return lambda x: parted(turn(x))

    def numbers(name: str):
        return tensor(f"{here}.k_norm.{name}", (own.dim,), lambda x: parted(x.astype(np.float32)))

    return IndexerWeights(
        q_up_AIH=tensor(f"{here}.wq_b.weight", (own.heads * own.dim, rank), turned((own.heads, own.dim), rank)),
        key_DH=tensor(f"{here}.wk.weight", (own.dim, D), turned((own.dim,), D)),
        key_norm_H=numbers("weight"),
        key_norm_bias_H=numbers("bias"),
        weigh_DI=tensor(f"{here}.weights_proj.weight", (own.heads, D), linear((own.heads,), (D,))),
    )


def layer(config: ModelConfig, index: int, prefix: str) -> LayerWeights:
    found, a = deepseek.layer(config, index, prefix), config.layers[index].attention
    own = indexer_sources(a, config.dim, f"{prefix}layers.{index}.self_attn.indexer")
    return found.replace(attention=found.attention.replace(indexer=own))


sources = partial(model_sources, layer=layer)


def ignored(name: str, config: ModelConfig) -> bool:
    """The layers past the last, and indexers where contexts are no longer than what they would pick."""
    if deepseek.ignored(name, config):
        return True
    found = re.match(r"model\.layers\.(\d+)\.self_attn\.indexer\.", name)
    own = found and config.layers[int(found[1])].attention.indexer
    return bool(found) and not (own and own.heads)
