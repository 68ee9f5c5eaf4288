"""The weight tree of draft heads: arrays, or `ArraySpec`s in the abstract tree."""

from typing import Any

import jax.numpy as jnp

from ...sharding import struct
from ...sharding.spec import ArraySpec
from ..matrix import matrix, norm
from ..weights import Array, LayerWeights, layer_spec
from .heads import DraftHeads


class Block(struct.PyTreeNode):
    weight_DE: Array  # E = D
    bias_E: Array = None


class MedusaHead(struct.PyTreeNode):
    blocks: tuple[Block, ...]
    head_VD: Array = None  # None: the target's


class DraftHeadsWeights(struct.PyTreeNode):
    """The weights of all kinds; those that a kind lacks are None or empty."""

    heads: tuple[MedusaHead, ...] = ()
    layers: tuple[LayerWeights, ...] = ()
    join_FD: Array = None  # projects (embedding, feature); eagle3: three concatenated features
    join_bias_D: Array = None
    embed_norm_D: Array = None
    feature_norm_D: Array = None
    final_norm_D: Array = None
    embed_VD: Any = None  # None: the target's is used
    head_VD: Array = None  # None: the target's is used
    tokens_U: Array = None  # the target's token id for each row of a reduced vocabulary


def abstract(heads: DraftHeads) -> DraftHeadsWeights:
    """The weight tree with an `ArraySpec` in place of each array."""
    config = heads.model
    D = heads.model.dim
    V = heads.vocab or config.vocab_size
    table = ArraySpec((V, D), jnp.dtype(config.dtype), ("vocab", "embed"), fan_in=D, inputs=(1,))
    tokens_U = ArraySpec((V,), jnp.int32, (None,), "zeros") if heads.vocab else None
    if heads.kind == "medusa":
        block = Block(
            matrix(config, (D,), (D,), ("embed", None)), bias(heads) if heads.bias else None
        )
        head = MedusaHead((block,) * heads.depth, table if heads.own_head else None)
        return DraftHeadsWeights(heads=(head,) * heads.count, tokens_U=tokens_U)
    layers = tuple(layer_spec(config, layer) for layer in config.layers)
    if heads.kind == "mtp":
        return DraftHeadsWeights(
            layers=layers,
            join_FD=join(heads, D + heads.feature_dim),
            embed_norm_D=norm(D),
            feature_norm_D=norm(D),
            final_norm_D=norm(D),
        )
    first, *other_layers = layers  # its attention input is normed before the layer

    if heads.kind == "eagle":
        layers = (first.replace(pre_attention_norm_D=None), *other_layers)
        width = D + heads.feature_dim
        return DraftHeadsWeights(
            layers=layers,
            join_FD=join(heads, width),
            join_bias_D=bias(heads) if heads.bias else None,
        )
    qkv_DGH = first.attention.qkv_DGH
    joined_qkv_DGH = matrix(config, (2 * D,), qkv_DGH.shape[1:], qkv_DGH.axes)
    attention = first.attention.replace(qkv_DGH=joined_qkv_DGH)
    return DraftHeadsWeights(
        layers=(first.replace(pre_attention_norm_D=None, attention=attention), *other_layers),
        join_FD=join(heads, heads.feature_dim * len(heads.features)),
        embed_norm_D=norm(D),
        feature_norm_D=norm(D),
        final_norm_D=norm(D),
        embed_VD=ArraySpec((config.vocab_size, D), table.dtype, table.axes, fan_in=D)
        if heads.own_embedding
        else None,
        head_VD=table,
        tokens_U=tokens_U,
    )


def join(heads: DraftHeads, width: int) -> Array:
    return matrix(heads.model, (width,), (heads.model.dim,), (None, "embed"))


def bias(heads: DraftHeads) -> ArraySpec:
    return ArraySpec((heads.model.dim,), jnp.dtype(heads.model.dtype), (None,), "zeros")
