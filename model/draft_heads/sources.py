"""The tensors of published drafting heads, by the one name that `heads.canonical` gives each."""

import re
from dataclasses import replace

import numpy as np

from ..families import deepseek, qwen3_next
from ..families.common import Source, attention_sources, layer_sources, linear, scale, tensor
from .heads import DraftHeads
from .weights import Block, DraftHeadsWeights, MedusaHead


def sources(heads: DraftHeads) -> DraftHeadsWeights:
    """A tree with a `Source` for each leaf."""
    return {"medusa": medusa, "eagle": eagle, "eagle3": eagle3, "mtp": mtp}[heads.kind](heads)


def unread(name: str, heads: DraftHeads) -> bool:
    """Whether a tensor is known and not needed: a copy of the target's, or one that follows from others."""
    if heads.kind == "mtp":
        others = ("embed_tokens.weight", "shared_head.head.weight") if heads.place else ()
        further = not heads.place and name.startswith("mtp.layers.") and not name.startswith("mtp.layers.0.")
        return not name.startswith(mtp_prefix(heads)) or name.endswith(others) or further
    if heads.kind == "medusa":
        block = re.match(r"blocks\.(\d+)\.", name)
        return name.startswith("lm_head") or (block is not None and int(block[1]) >= heads.count)
    return name in ("embed_tokens.weight", "lm_head.weight", "t2d", "d2t")


def product(name: str, out: int, into: int) -> Source:
    return tensor(name, (out, into), linear((out,), (into,)))


def medusa(heads: DraftHeads) -> DraftHeadsWeights:
    D, V = heads.model.dim, heads.vocab or heads.model.vocab_size

    def block(c: int, j: int) -> Block:
        here = f"blocks.{c}.layers.{j}"
        bias = tensor(f"{here}.bias", (D,)) if heads.bias else None
        return Block(product(f"{here}.weight", D, D), bias)

    def head(c: int) -> MedusaHead:
        table = tensor(f"lm_heads.{c}.weight", (V, D)) if heads.own_head else None
        return MedusaHead(tuple(block(c, j) for j in range(heads.depth)), table)

    tokens = tensor("token_map", (V,)) if heads.vocab else None
    return DraftHeadsWeights(heads=tuple(map(head, range(heads.count))), tokens_U=tokens)


def eagle(heads: DraftHeads) -> DraftHeadsWeights:
    config, D = heads.model, heads.model.dim
    first, *others = (layer_sources(config, index, "") for index in range(len(config.layers)))
    return DraftHeadsWeights(
        layers=(first.replace(pre_attention_norm_D=None), *others),
        join_FD=product("fc.weight", D, D + heads.feature_dim),
        join_bias_D=tensor("fc.bias", (D,)) if heads.bias else None,
    )


def eagle3(heads: DraftHeads) -> DraftHeadsWeights:
    config, D, V = heads.model, heads.model.dim, heads.vocab or heads.model.vocab_size
    first, *others = (layer_sources(config, index, "") for index in range(len(config.layers)))
    wide = attention_sources(config.layers[0].attention, 2 * D, "layers.0.self_attn")
    attention = first.attention.replace(qkv_DGH=wide.qkv_DGH)
    tokens = tensor("d2t", (V,), lambda x: x + np.arange(V))  # how far each token stands before the target's
    return DraftHeadsWeights(
        layers=(first.replace(pre_attention_norm_D=None, attention=attention), *others),
        join_FD=product("fc.weight", D, heads.feature_dim * len(heads.features)),
        embed_norm_D=scale("layers.0.input_layernorm.weight", D),
        feature_norm_D=scale("layers.0.hidden_norm.weight", D),
        final_norm_D=scale("norm.weight", D),
        embed_VD=tensor("embed_tokens.weight", (config.vocab_size, D)) if heads.own_embedding else None,
        head_VD=tensor("lm_head.weight", (V, D)),
        tokens_U=tokens if heads.vocab else None,
    )


def mtp_prefix(heads: DraftHeads) -> str:
    return f"model.layers.{heads.place}." if heads.place else "mtp."


def mtp(heads: DraftHeads) -> DraftHeadsWeights:
    return deepseek_mtp(heads) if heads.place else qwen_mtp(heads)


def deepseek_mtp(heads: DraftHeads) -> DraftHeadsWeights:
    here, D = mtp_prefix(heads), heads.model.dim
    counted = replace(heads.model, layers=heads.model.layers * (heads.place + 1))
    return DraftHeadsWeights(
        layers=(deepseek.layer(counted, heads.place, "model."),),
        join_FD=product(f"{here}eh_proj.weight", D, D + heads.feature_dim),
        embed_norm_D=scale(f"{here}enorm.weight", D),
        feature_norm_D=scale(f"{here}hnorm.weight", D),
        final_norm_D=scale(f"{here}shared_head.norm.weight", D),
    )


def qwen_mtp(heads: DraftHeads) -> DraftHeadsWeights:
    """Of Qwen3-Next and Qwen3.5: a layer with attention, whose norms count from 1 as the model's."""
    here, D = mtp_prefix(heads), heads.model.dim
    return DraftHeadsWeights(
        layers=(qwen3_next.layer(heads.model, 0, here),),
        join_FD=product(f"{here}fc.weight", D, D + heads.feature_dim),
        embed_norm_D=scale(f"{here}pre_fc_norm_embedding.weight", D, 1.0),
        feature_norm_D=scale(f"{here}pre_fc_norm_hidden.weight", D, 1.0),
        final_norm_D=scale(f"{here}norm.weight", D, 1.0),
    )
