"""The weight tree: flax dataclasses whose leaves are arrays, or `ArraySpec`s in the abstract tree."""

from typing import Any

import jax.numpy as jnp
from flax import struct

from ..ops.quant import packed
from ..sharding.spec import ArraySpec
from .config import Attention, LatentAttention, Layer, Mlp, ModelConfig, Moe

Array = Any  # a jax.Array, an ArraySpec, or a quantised node in place of either


@struct.dataclass
class AttentionWeights:
    qkv_DGH: Array  # queries, then keys, then values; only queries where the layer reads another's cache
    out_NHD: Array
    qkv_bias_GH: Array = None
    out_bias_D: Array = None
    q_norm: Array = None
    k_norm: Array = None
    sinks_N: Array = None


@struct.dataclass
class LatentWeights:
    q_down_DA: Array  # None where the queries are projected in one step
    q_norm_A: Array
    q_up_ANH: Array
    kv_down_DA: Array  # the latent, then the rotary key
    kv_norm_A: Array
    k_up_ANH: Array
    v_up_ANH: Array
    out_NHD: Array
    q_down_bias_A: Array = None
    kv_down_bias_A: Array = None
    out_bias_D: Array = None


@struct.dataclass
class MlpWeights:
    up_DGF: Array  # G = 2: gate, then up
    down_FD: Array


@struct.dataclass
class MoeWeights:
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


@struct.dataclass
class PerLayerWeights:
    gate_DA: Array
    up_AD: Array
    norm_D: Array


@struct.dataclass
class LayerWeights:
    attention: AttentionWeights | LatentWeights
    mlp: Any = None  # MlpWeights
    moe: Any = None  # MoeWeights
    pre_attention_norm_D: Array = None
    post_attention_norm_D: Array = None
    pre_mlp_norm_D: Array = None
    post_mlp_norm_D: Array = None
    per_layer: PerLayerWeights | None = None
    scale: Array = None


@struct.dataclass
class ModelWeights:
    embed_VD: Array
    layers: tuple[LayerWeights, ...]
    final_norm_D: Array
    head_VD: Array = None  # None: tied to the embedding
    per_layer_embed_VLA: Array = None
    per_layer_proj_DLA: Array = None
    per_layer_norm_A: Array = None


def abstract(config: ModelConfig) -> ModelWeights:
    """The weight tree of a model with an `ArraySpec` in place of each array."""
    dtype, D, V, L, A = jnp.dtype(config.dtype), config.dim, config.vocab_size, len(config.layers), config.per_layer_dim
    weights = ModelWeights(
        embed_VD=ArraySpec((V, D), dtype, ("vocab", "embed"), fan_in=D),
        layers=tuple(layer_spec(config, layer) for layer in config.layers),
        final_norm_D=norm(D),
        head_VD=None if config.tied else ArraySpec((V, D), dtype, ("vocab", "embed"), fan_in=D),
    )
    if not A:
        return weights
    return weights.replace(
        per_layer_embed_VLA=ArraySpec((config.per_layer_vocab, L, A), dtype, ("vocab", None, None), fan_in=A),
        per_layer_proj_DLA=ArraySpec((D, L, A), dtype, ("embed", None, None), fan_in=D),
        per_layer_norm_A=norm(A),
    )


def norm(size: int, axis: str | None = None) -> ArraySpec:
    """A norm's scale: always float32, it is small and a rounded `1 + w` would cost accuracy."""
    return ArraySpec((size,), jnp.float32, (axis,), "ones")


def layer_spec(config: ModelConfig, layer: Layer) -> LayerWeights:
    D, A, dtype = config.dim, config.per_layer_dim, jnp.dtype(config.dtype)
    per_layer = None
    if A:
        per_layer = PerLayerWeights(
            gate_DA=ArraySpec((D, A), dtype, ("embed", None), fan_in=D),
            up_AD=ArraySpec((A, D), dtype, (None, "embed"), fan_in=A),
            norm_D=norm(D),
        )
    attention = latent_spec if isinstance(layer.attention, LatentAttention) else attention_spec
    return LayerWeights(
        attention=attention(layer.attention, D, dtype),
        mlp=layer.mlp and mlp_spec(layer.mlp, D, dtype),
        moe=layer.moe and moe_spec(layer.moe, D, dtype),
        pre_attention_norm_D=norm(D) if layer.pre_norm else None,
        post_attention_norm_D=norm(D) if layer.post_norm else None,
        pre_mlp_norm_D=norm(D) if layer.pre_norm else None,
        post_mlp_norm_D=norm(D) if layer.post_norm else None,
        per_layer=per_layer,
        scale=ArraySpec((), jnp.float32, (), "ones") if config.layer_scale else None,
    )


def attention_spec(a: Attention, D: int, dtype) -> AttentionWeights:
    N, K, H = a.heads, a.kv_heads, a.head_dim
    G = N + (0 if a.kv_source is not None else K if a.tied_kv else 2 * K)
    q_norm, k_norm = {None: (None, None), "head": (norm(H), norm(H)), "all": (norm(N * H), norm(K * H))}[a.qk_norm]
    return AttentionWeights(
        qkv_DGH=ArraySpec((D, G, H), dtype, ("embed", "qkv", None), fan_in=D),
        out_NHD=ArraySpec((N, H, D), dtype, ("heads", None, "embed"), fan_in=N * H),
        qkv_bias_GH=ArraySpec((G, H), dtype, ("qkv", None), "zeros") if a.bias else None,
        out_bias_D=ArraySpec((D,), dtype, (None,), "zeros") if a.out_bias else None,
        q_norm=q_norm,
        k_norm=None if a.kv_source is not None else k_norm,
        sinks_N=ArraySpec((N,), jnp.float32, ("heads",), "zeros") if a.sinks else None,
    )


def latent_spec(a: LatentAttention, D: int, dtype) -> LatentWeights:
    N, A, H = a.heads, a.kv_rank, a.nope_dim + a.rope_dim
    direct = a.q_rank is None
    rank = D if direct else a.q_rank
    wide = a.kv_rank + a.rope_dim
    return LatentWeights(
        q_down_DA=None if direct else ArraySpec((D, rank), dtype, ("embed", None), fan_in=D),
        q_norm_A=None if direct else norm(rank),
        q_up_ANH=ArraySpec((rank, N, H), dtype, (None, "heads", None), fan_in=rank),
        kv_down_DA=ArraySpec((D, wide), dtype, ("embed", None), fan_in=D),
        kv_norm_A=norm(A),
        k_up_ANH=ArraySpec((A, N, a.nope_dim), dtype, (None, "heads", None), fan_in=A),
        v_up_ANH=ArraySpec((A, N, a.v_dim), dtype, (None, "heads", None), fan_in=A),
        out_NHD=ArraySpec((N, a.v_dim, D), dtype, ("heads", None, "embed"), fan_in=N * a.v_dim),
        q_down_bias_A=ArraySpec((rank,), dtype, (None,), "zeros") if a.bias and not direct else None,
        kv_down_bias_A=ArraySpec((wide,), dtype, (None,), "zeros") if a.bias else None,
        out_bias_D=ArraySpec((D,), dtype, (None,), "zeros") if a.bias else None,
    )


def mlp_spec(mlp: Mlp, D: int, dtype) -> MlpWeights:
    return MlpWeights(
        up_DGF=ArraySpec((D, 2, mlp.dim), dtype, ("embed", None, "ffn"), fan_in=D),
        down_FD=ArraySpec((mlp.dim, D), dtype, ("ffn", "embed"), fan_in=mlp.dim),
    )


def moe_spec(moe: Moe, D: int, dtype) -> MoeWeights:
    E, F = moe.experts, moe.dim
    own = norm(D) if moe.own_norms else None
    return MoeWeights(
        router_DE=ArraySpec((D, E), jnp.float32, ("embed", None), fan_in=D),
        up_EDGF=packed(moe.quant, ArraySpec((E, D, 2, F), dtype, ("experts", "embed", None, "ffn"), fan_in=D)),
        down_EFD=packed(moe.quant, ArraySpec((E, F, D), dtype, ("experts", "ffn", "embed"), fan_in=F)),
        router_bias_E=ArraySpec((E,), jnp.float32, (None,), "zeros") if moe.router_bias else None,
        choice_bias_E=ArraySpec((E,), jnp.float32, (None,), "zeros") if moe.choice_bias else None,
        up_bias_EGF=ArraySpec((E, 2, F), dtype, ("experts", None, "ffn"), "zeros") if moe.bias else None,
        down_bias_ED=ArraySpec((E, D), dtype, ("experts", "embed"), "zeros") if moe.bias else None,
        router_scale_D=own,
        expert_scale_E=ArraySpec((E,), jnp.float32, (None,), "ones") if moe.own_norms else None,
        pre_norm_D=own,
        post_norm_D=own,
        mlp_post_norm_D=own,
    )
