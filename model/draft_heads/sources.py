"""The sources of draft heads' weights, by canonical tensor name."""

import re
from dataclasses import replace

import numpy as np

from ..config import Attention
from ..families import deepseek, qwen3_next
from ..families.common import Source, attention_sources, layer_sources, linear, scale, tensor
from .heads import DraftHeads
from .weights import Block, DraftHeadsWeights, MedusaHead


def weight_sources(heads: DraftHeads) -> DraftHeadsWeights:
    """A tree with a `Source` for each weight."""
    return {"medusa": medusa, "eagle": eagle, "eagle3": eagle3, "mtp": mtp}[heads.kind](heads)


def is_ignored(name: str, heads: DraftHeads) -> bool:
    """Whether a known tensor is not loaded: copies of the target's, or redundant ones."""
    if heads.kind == "mtp":
        suffixes = ("embed_tokens.weight", "shared_head.head.weight") if heads.place else ()
        is_later_layer = (
            not heads.place
            and name.startswith("mtp.layers.")
            and not name.startswith("mtp.layers.0.")
        )
        return not name.startswith(mtp_prefix(heads)) or name.endswith(suffixes) or is_later_layer
    if heads.kind == "medusa":
        block = re.match(r"blocks\.(\d+)\.", name)
        return name.startswith("lm_head") or (block is not None and int(block[1]) >= heads.count)
    return name in ("embed_tokens.weight", "lm_head.weight", "t2d", "d2t")


def matrix_source(name: str, out: int, into: int) -> Source:
    return tensor(name, (out, into), linear((out,), (into,)))


def medusa(heads: DraftHeads) -> DraftHeadsWeights:
    D = heads.model.dim
    V = heads.vocab or heads.model.vocab_size

    def block(c: int, j: int) -> Block:
        prefix = f"blocks.{c}.layers.{j}"
        bias = tensor(f"{prefix}.bias", (D,)) if heads.bias else None
        return Block(matrix_source(f"{prefix}.weight", D, D), bias)

    def head(c: int) -> MedusaHead:
        table = tensor(f"lm_heads.{c}.weight", (V, D)) if heads.own_head else None
        return MedusaHead(tuple(block(c, j) for j in range(heads.depth)), table)

    tokens = tensor("token_map", (V,)) if heads.vocab else None
    return DraftHeadsWeights(heads=tuple(map(head, range(heads.count))), tokens_U=tokens)


def eagle(heads: DraftHeads) -> DraftHeadsWeights:
    config = heads.model
    D = heads.model.dim
    first, *other_layers = (layer_sources(config, index, "") for index in range(len(config.layers)))
    return DraftHeadsWeights(
        layers=(first.replace(pre_attention_norm_D=None), *other_layers),
        join_FD=matrix_source("fc.weight", D, D + heads.feature_dim),
        join_bias_D=tensor("fc.bias", (D,)) if heads.bias else None,
    )


def eagle3(heads: DraftHeads) -> DraftHeadsWeights:
    config = heads.model
    D = heads.model.dim
    V = heads.vocab or heads.model.vocab_size
    first, *other_layers = (layer_sources(config, index, "") for index in range(len(config.layers)))
    a = config.layers[0].attention
    assert isinstance(a, Attention)
    wide_attention = attention_sources(a, 2 * D, "layers.0.self_attn")
    attention = first.attention.replace(qkv_DGH=wide_attention.qkv_DGH)
    tokens = tensor("d2t", (V,), lambda x: x + np.arange(V))  # stored as offsets
    return DraftHeadsWeights(
        layers=(first.replace(pre_attention_norm_D=None, attention=attention), *other_layers),
        join_FD=matrix_source("fc.weight", D, heads.feature_dim * len(heads.features)),
        embed_norm_D=scale("layers.0.input_layernorm.weight", D),
        feature_norm_D=scale("layers.0.hidden_norm.weight", D),
        final_norm_D=scale("norm.weight", D),
        embed_VD=tensor("embed_tokens.weight", (config.vocab_size, D))
        if heads.own_embedding
        else None,
        head_VD=tensor("lm_head.weight", (V, D)),
        tokens_U=tokens if heads.vocab else None,
    )


def mtp_prefix(heads: DraftHeads) -> str:
    return f"model.layers.{heads.place}." if heads.place else "mtp."


def mtp(heads: DraftHeads) -> DraftHeadsWeights:
    return deepseek_mtp(heads) if heads.place else qwen_mtp(heads)


def deepseek_mtp(heads: DraftHeads) -> DraftHeadsWeights:
    prefix = mtp_prefix(heads)
    D = heads.model.dim
    numbered_model = replace(heads.model, layers=heads.model.layers * (heads.place + 1))
    return DraftHeadsWeights(
        layers=(deepseek.layer(numbered_model, heads.place, "model."),),
        join_FD=matrix_source(f"{prefix}eh_proj.weight", D, D + heads.feature_dim),
        embed_norm_D=scale(f"{prefix}enorm.weight", D),
        feature_norm_D=scale(f"{prefix}hnorm.weight", D),
        final_norm_D=scale(f"{prefix}shared_head.norm.weight", D),
    )


def qwen_mtp(heads: DraftHeads) -> DraftHeadsWeights:
    """Qwen3-Next and Qwen3.5: a layer with attention, whose norm scales are stored less 1."""
    prefix = mtp_prefix(heads)
    D = heads.model.dim
    return DraftHeadsWeights(
        layers=(qwen3_next.layer(heads.model, 0, prefix),),
        join_FD=matrix_source(f"{prefix}fc.weight", D, D + heads.feature_dim),
        embed_norm_D=scale(f"{prefix}pre_fc_norm_embedding.weight", D, 1.0),
        feature_norm_D=scale(f"{prefix}pre_fc_norm_hidden.weight", D, 1.0),
        final_norm_D=scale(f"{prefix}norm.weight", D, 1.0),
    )
