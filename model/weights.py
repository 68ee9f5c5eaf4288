"""The weight tree: dataclasses (`sharding/struct.py`) whose leaves are arrays, or `ArraySpec`s in
the abstract tree.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ..ops.norm import LayerNorm
from ..ops.quant import head_format, packed, stacked
from ..sharding import struct
from ..sharding.spec import ArraySpec, Interleaved
from . import mixers
from .config import Dense, Layer, Mlp, ModelConfig, Moe
from .matrix import matrix, norm

Array = struct.Leaf  # or a quantised node in its place


class MlpWeights(struct.PyTreeNode):
    up_DGF: Array  # G = 2: gate, then up; 1 where there is no gate
    down_FD: Array
    up_bias_GF: Array = None
    down_bias_D: Array = None
    gate_D1: Array = None


class MoeWeights(struct.PyTreeNode):
    router_DE: Array
    up_EDGF: Array
    down_EFD: Array
    router_bias_E: Array = None
    choice_bias_E: Array = None
    up_bias_EGF: Array = None
    down_bias_ED: Array = None
    router_scale_D: Array = None
    expert_scale_E: Array = None
    pre_norm_D: Array = None
    post_norm_D: Array = None
    mlp_post_norm_D: Array = None
    copies_E: Array = None  # copies of each expert, with redundant experts
    slots_EC: Array = None  # and their slots


class PerLayerWeights(struct.PyTreeNode):
    gate_DA: Array
    up_AD: Array
    norm_D: Array


class LayerWeights(struct.PyTreeNode):
    attention: Any  # of the mixer
    mlp: Any = None  # MlpWeights
    moe: Any = None  # MoeWeights
    pre_attention_norm_D: Array = None
    post_attention_norm_D: Array = None
    pre_mlp_norm_D: Array = None
    post_mlp_norm_D: Array = None
    per_layer: PerLayerWeights | None = None
    scale: Array = None


class DenseWeights(struct.PyTreeNode):
    matrix_DF: Array
    bias_F: Array = None
    norm_F: Array = None


class ModelWeights(struct.PyTreeNode):
    embed_VD: Array
    layers: tuple[LayerWeights, ...]
    final_norm_D: Array
    head_VD: Array = None  # None: tied to the embedding
    head_bias_V: Array = None
    classes_DC: Array = None
    classes_bias_C: Array = None
    classes_up_DF: Array = None  # a product before that
    classes_up_bias_F: Array = None
    embed_norm_D: Array = None
    position_embed_PD: Array = None
    type_embed_ID: Array = None
    head: tuple[DenseWeights, ...] = ()  # of an encoder
    per_layer_embed_VLA: Array = None
    per_layer_proj_DLA: Array = None
    per_layer_norm_A: Array = None


def abstract(config: ModelConfig) -> ModelWeights:
    """The weight tree of a model with an `ArraySpec` in place of each array."""
    dtype = jnp.dtype(config.dtype)
    D = config.dim
    V = config.vocab_size
    L = len(config.layers)
    A = config.per_layer_dim
    embed_VD = ArraySpec((V, D), dtype, ("vocab", "embed"), fan_in=D)
    head_VD = packed(head_format(config.quant), replace(embed_VD, inputs=(1,)))
    weights = ModelWeights(
        embed_VD=head_VD if config.tied else embed_VD,
        layers=tuple(layer_spec(config, layer) for layer in config.layers),
        final_norm_D=norm_of(config, D) if config.final_norm else None,
        head_VD=None if config.tied else head_VD,
        head_bias_V=ArraySpec((V,), jnp.float32, ("vocab",), "zeros") if config.head_bias else None,
        classes_DC=config.classes and classes_spec(config, len(config.classes.labels)),
        **deep_specs(config),
        embed_norm_D=norm_of(config, D) if config.embed_norm else None,
        position_embed_PD=table(config, config.positions) if config.positions else None,
        type_embed_ID=table(config, config.types) if config.types else None,
        head=tuple(dense_spec(config, dense) for dense in config.head),
    )
    if not A:
        return weights
    return weights.replace(
        per_layer_embed_VLA=ArraySpec(
            (config.per_layer_vocab, L, A), dtype, ("vocab", None, None), fan_in=A
        ),
        per_layer_proj_DLA=ArraySpec(
            (D, L, A), dtype, ("embed", None, None), fan_in=D, inputs=(0,)
        ),
        per_layer_norm_A=norm(A),
    )


def classes_spec(config: ModelConfig, C: int) -> ArraySpec:
    return ArraySpec((config.width, C), jnp.float32, (None, None), fan_in=config.width, inputs=(0,))


def norm_of(config: ModelConfig, size: int) -> Any:
    """The weights of a norm of the model's kind."""
    if config.norm == "rms":
        return norm(size)
    return LayerNorm(norm(size), vector(size) if config.norm == "layer_bias" else None)


def vector(size: int) -> ArraySpec:
    """A bias of a small float32 product or of a norm."""
    return ArraySpec((size,), jnp.float32, (None,), "zeros")


def table(config: ModelConfig, rows: int) -> ArraySpec:
    """A further embedding; it is small."""
    return ArraySpec((rows, config.dim), jnp.dtype(config.dtype), (None, None), fan_in=config.dim)


def dense_spec(config: ModelConfig, dense: Dense) -> DenseWeights:
    return DenseWeights(
        matrix_DF=ArraySpec(
            (dense.into, dense.dim), jnp.float32, (None, None), fan_in=dense.into, inputs=(0,)
        ),
        bias_F=vector(dense.dim) if dense.bias else None,
        norm_F=norm_of(config, dense.dim) if dense.norm else None,
    )


def deep_specs(config: ModelConfig) -> dict[str, ArraySpec]:
    """The weights of a classification head beside its matrix."""
    if config.classes is None:
        return {}
    biases = {"classes_bias_C": vector(len(config.classes.labels))}
    if not config.classes.deep:
        return biases if config.classes.bias else {}
    return biases | {
        "classes_up_DF": classes_spec(config, config.dim),
        "classes_up_bias_F": vector(config.dim),
    }


def dense_specs(config: ModelConfig) -> ModelWeights:
    """The specs of the weights before quantisation."""
    return abstract(replace(config, quant=None))


def layer_spec(config: ModelConfig, layer: Layer) -> LayerWeights:
    D = config.dim
    A = config.per_layer_dim
    per_layer = None
    if A:
        per_layer = PerLayerWeights(
            gate_DA=matrix(config, (D,), (A,), ("embed", None)),
            up_AD=matrix(config, (A,), (D,), (None, "embed")),
            norm_D=norm(D),
        )
    return LayerWeights(
        attention=mixers.module_of(layer.attention).spec(config, layer.attention),
        mlp=layer.mlp and mlp_spec(config, layer.mlp),
        moe=layer.moe and moe_spec(config, layer.moe),
        pre_attention_norm_D=norm_of(config, D)
        if layer.pre_norm and not layer.reads_rows
        else None,
        post_attention_norm_D=norm_of(config, D) if layer.post_norm else None,
        pre_mlp_norm_D=norm_of(config, D)
        if layer.pre_norm and layer.feeds_forward and not layer.parallel
        else None,
        post_mlp_norm_D=norm_of(config, D) if layer.post_norm and layer.feeds_forward else None,
        per_layer=per_layer,
        scale=ArraySpec((), jnp.float32, (), "ones") if config.layer_scale else None,
    )


def mlp_spec(config: ModelConfig, mlp: Mlp) -> MlpWeights:
    D = config.dim
    G = 1 + mlp.gated
    dtype = jnp.dtype(config.dtype)
    return MlpWeights(
        up_DGF=matrix(config, (D,), (G, mlp.dim), ("embed", None, "ffn")),
        down_FD=matrix(config, (mlp.dim,), (D,), ("ffn", "embed")),
        up_bias_GF=ArraySpec((G, mlp.dim), dtype, (None, "ffn"), "zeros") if mlp.bias else None,
        down_bias_D=ArraySpec((D,), dtype, (None,), "zeros") if mlp.bias else None,
        gate_D1=ArraySpec((D, 1), jnp.float32, ("embed", None), fan_in=D, inputs=(0,))
        if mlp.gate
        else None,
    )


def moe_spec(config: ModelConfig, moe: Moe) -> MoeWeights:
    D = config.dim
    E = moe.experts
    F = moe.dim
    G = 1 + moe.gated
    dtype = jnp.dtype(config.dtype)
    router_dtype = jnp.dtype(jnp.float32) if moe.router_float32 else dtype
    own_norm = norm(D) if moe.own_norms else None
    stack = Interleaved("experts", (E,), repeated=moe.spare)
    up_EDGF = ArraySpec(
        (E, D, G, F), dtype, (stack, "embed", None, "ffn"), fan_in=D, inputs=(1,), stacked=True
    )
    down_EFD = ArraySpec(
        (E, F, D), dtype, (stack, "ffn", "embed"), fan_in=F, inputs=(1,), stacked=True
    )
    if moe.quant:  # as in the checkpoint
        up_EDGF = packed(moe.quant, up_EDGF)
        down_EFD = packed(moe.quant, down_EFD)
    else:
        up_EDGF = stacked(config.quant, up_EDGF)
        down_EFD = stacked(config.quant, down_EFD)
    return MoeWeights(
        router_DE=ArraySpec((D, E), router_dtype, ("embed", None), fan_in=D, inputs=(0,)),
        up_EDGF=up_EDGF,
        down_EFD=down_EFD,
        router_bias_E=ArraySpec((E,), jnp.float32, (None,), "zeros") if moe.router_bias else None,
        choice_bias_E=ArraySpec((E,), jnp.float32, (None,), "zeros") if moe.choice_bias else None,
        up_bias_EGF=ArraySpec((E, G, F), dtype, (stack, None, "ffn"), "zeros")
        if moe.bias
        else None,
        down_bias_ED=ArraySpec((E, D), dtype, (stack, "embed"), "zeros") if moe.bias else None,
        router_scale_D=own_norm,
        expert_scale_E=ArraySpec((E,), jnp.float32, (None,), "ones") if moe.own_norms else None,
        pre_norm_D=own_norm,
        post_norm_D=own_norm,
        mlp_post_norm_D=own_norm,
    )
