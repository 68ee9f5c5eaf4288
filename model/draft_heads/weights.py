"""The weight tree of drafting heads: arrays, or `ArraySpec`s in the abstract tree."""

from typing import Any

import jax.numpy as jnp

from ...sharding import struct
from ...sharding.spec import ArraySpec
from ..matrix import matrix, norm
from ..weights import Array, LayerWeights, layer_spec
from .heads import DraftHeads


@struct.dataclass
class Block:
    weight_DE: Array  # E is D again
    bias_E: Array = None


@struct.dataclass
class MedusaHead:
    blocks: tuple[Block, ...]
    head_VD: Array = None  # None: the target's


@struct.dataclass
class DraftHeadsWeights:
    """What a kind does not have is None or empty."""

    heads: tuple[MedusaHead, ...] = ()
    layers: tuple[LayerWeights, ...] = ()
    join_FD: Array = None  # embedding and feature, side by side, to a row; eagle3: the target's three features to one
    join_bias_D: Array = None
    embed_norm_D: Array = None
    feature_norm_D: Array = None
    final_norm_D: Array = None
    embed_VD: Any = None  # None: the target's
    head_VD: Array = None  # None: the target's
    tokens_U: Array = None  # the token of each row of the head, where it has fewer than the target


def abstract(heads: DraftHeads) -> DraftHeadsWeights:
    """The weight tree with an `ArraySpec` in place of each array."""
    config, D = heads.model, heads.model.dim
    V = heads.vocab or config.vocab_size
    table = ArraySpec((V, D), jnp.dtype(config.dtype), ("vocab", "embed"), fan_in=D, inputs=(1,))
    tokens_U = ArraySpec((V,), jnp.int32, (None,), "zeros") if heads.vocab else None
    if heads.kind == "medusa":
        block = Block(matrix(config, (D,), (D,), ("embed", None)), bias(heads) if heads.bias else None)
        head = MedusaHead((block,) * heads.depth, table if heads.own_head else None)
        return DraftHeadsWeights(heads=(head,) * heads.count, tokens_U=tokens_U)
    layers = tuple(layer_spec(config, layer) for layer in config.layers)
    if heads.kind == "mtp":
        normed = {"embed_norm_D": norm(D), "feature_norm_D": norm(D), "final_norm_D": norm(D)}
        return DraftHeadsWeights(layers=layers, join_FD=join(heads, D + heads.feature_dim), **normed)
    first, *others = layers  # its norm would stand before the attention
    if heads.kind == "eagle":
        layers = (first.replace(pre_attention_norm_D=None), *others)
        width = D + heads.feature_dim
        return DraftHeadsWeights(
            layers=layers, join_FD=join(heads, width), join_bias_D=bias(heads) if heads.bias else None
        )
    qkv_DGH = first.attention.qkv_DGH
    wide = matrix(config, (2 * D,), qkv_DGH.shape[1:], qkv_DGH.axes)
    attention = first.attention.replace(qkv_DGH=wide)
    return DraftHeadsWeights(
        layers=(first.replace(pre_attention_norm_D=None, attention=attention), *others),
        join_FD=join(heads, heads.feature_dim * len(heads.features)),
        embed_norm_D=norm(D),
        feature_norm_D=norm(D),
        final_norm_D=norm(D),
        embed_VD=ArraySpec((config.vocab_size, D), table.dtype, table.axes, fan_in=D) if heads.own_embedding else None,
        head_VD=table,
        tokens_U=tokens_U,
    )


def join(heads: DraftHeads, width: int) -> Array:
    return matrix(heads.model, (width,), (heads.model.dim,), (None, "embed"))


def bias(heads: DraftHeads) -> ArraySpec:
    return ArraySpec((heads.model.dim,), jnp.dtype(heads.model.dtype), (None,), "zeros")
