"""The weight tree of a vision tower: arrays, or `ArraySpec`s in the abstract tree."""

from typing import Any

import jax.numpy as jnp

from ...sharding import struct
from ...sharding.spec import ArraySpec
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
    table_size = tower.positions_side**2
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
        layers=tuple(layer_spec(config, layer) for layer in config.layers),
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
        norm=rms_norm(size) if merger.rms_norm else norm_of(config, size),
        up_EF=matrix(config, (E,), (F,), ("embed", None)) if merger.dim else None,
        up_bias_F=vector(F) if merger.dim and merger.bias else None,
        down_FD=matrix(config, (F,), (merger.out,), (None, "embed")),
        down_bias_D=vector(merger.out) if merger.bias else None,
        join_JE=matrix(config, (J,), (E,), ("embed", None)) if merger.joined_dim else None,
    )
