"""The weight tree of a vision tower: arrays, or `ArraySpec`s in the abstract tree."""

from typing import Any

import jax.numpy as jnp

from ...ops.linear.clipped import Clipped
from ...sharding import struct
from ...sharding.spec import ArraySpec
from ..config import Attention, Layer, ModelConfig
from ..matrix import matrix
from ..weights import Array, LayerWeights, layer_spec, norm_of, vector
from ..weights import norm as rms_norm
from .config import Merger, Tower


class MergerWeights(struct.PyTreeNode):
    norm: Any
    down_FD: Array
    up_EF: Any = None
    up_bias_F: Any = None
    down_bias_D: Any = None
    join_JE: Any = None  # J: the values of a group's patches
    bias_D: Any = None  # of `Merger.standardizes`
    scale_D: Any = None


class TowerWeights(struct.PyTreeNode):
    patch_VD: Any  # V: the values of a patch, pixel by pixel
    patch_bias_D: Any
    layers: tuple[LayerWeights, ...]
    merger: Any  # MergerWeights
    position_embed_PD: Any = None
    entry_norm: Any = None
    exit_norm: Any = None
    deepstack: tuple[MergerWeights, ...] = ()


def abstract(tower: Tower) -> TowerWeights:
    """The weight tree of a tower with an `ArraySpec` in place of each array."""
    config = tower.model
    D = config.dim
    table_size = tower.positions_side**2 + 2 * tower.positions_per_axis
    return TowerWeights(
        patch_VD=matrix(config, (tower.patch_values,), (D,), (None, "embed")),
        patch_bias_D=vector(D) if tower.patch_bias else None,
        position_embed_PD=ArraySpec(
            (table_size, D), jnp.dtype(config.dtype), (None, None), fan_in=D
        )
        if table_size
        else None,
        entry_norm=norm_of(config, D) if tower.entry_norm else None,
        exit_norm=norm_of(config, D) if tower.exit_norm else None,
        layers=tuple(
            clipped_layer(config, layer) if tower.clips else layer_spec(config, layer)
            for layer in config.layers
        ),
        merger=merger_spec(tower, tower.merger),
        deepstack=tuple(
            merger_spec(tower, tower.deepstack_merger)
            for _ in tower.deepstack
            if tower.deepstack_merger is not None
        ),
    )


def merger_spec(tower: Tower, merger: Merger) -> MergerWeights:
    config = tower.model
    D = config.dim
    J = D if merger.pools else tower.group * D
    E = merger.joined_dim or J
    F = merger.dim or E
    size = J if merger.joins_first else D
    return MergerWeights(
        norm=merger_norm(config, merger, size),
        bias_D=vector(D) if merger.standardizes else None,
        scale_D=vector(D) if merger.standardizes else None,
        up_EF=matrix(config, (E,), (F,), ("embed", None)) if merger.dim else None,
        up_bias_F=vector(F) if merger.dim and merger.bias else None,
        down_FD=matrix(config, (F,), (merger.out,), (None, "embed")),
        down_bias_D=vector(merger.out) if merger.bias else None,
        join_JE=matrix(config, (J,), (E,), ("embed", None)) if merger.joined_dim else None,
    )


def merger_norm(config: ModelConfig, merger: Merger, size: int) -> Any:
    if not merger.scaled_norm:
        return None
    return rms_norm(size) if merger.rms_norm else norm_of(config, size)


def clipped_layer(config: ModelConfig, layer: Layer) -> LayerWeights:
    """The weights of a layer whose matrices clip their inputs and outputs."""
    weights = layer_spec(config, layer)
    a, block = layer.attention, layer.mlp
    assert isinstance(a, Attention) and block is not None
    heads = [(count, a.head_dim) for count in (a.heads, a.kv_heads, a.kv_heads)]
    D = config.dim
    return weights.replace(
        attention=weights.attention.replace(
            qkv_DGH=clipped(config, (D,), *heads), out_NHD=clipped(config, heads[0], (D,))
        ),
        mlp=weights.mlp.replace(
            up_DGF=clipped(config, (D,), (1, block.dim), (1, block.dim)),
            down_FD=clipped(config, (block.dim,), (D,)),
        ),
    )


def clipped(config: ModelConfig, into: tuple[int, ...], *outs: tuple[int, ...]) -> Clipped:
    matrices = tuple(matrix(config, into, out, (None,) * len(into + out)) for out in outs)
    bounds = ArraySpec((len(outs), 2, 2), jnp.dtype(jnp.float32), (None,) * 3, "zeros")
    return Clipped(matrices, bounds)
