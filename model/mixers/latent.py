"""Multi-head latent attention (MLA) of DeepSeek."""

from typing import Any

import jax.numpy as jnp

from ...ops.attention.backend import AttentionParams
from ...ops.linear import add_up, einsum, project, rounds
from ...ops.residual import norm_alone
from ...ops.rope import rotate
from ...sharding import struct
from ...sharding.device_axes import DeviceAxes
from ...sharding.spec import ArraySpec
from ..config import LatentAttention, ModelConfig
from ..matrix import matrix, norm
from . import LayerHooks
from .indexer import IndexerWeights, indexer_spec, picks_of

Array = Any  # a jax.Array, an ArraySpec, or a quantised node in place of either


class LatentWeights(struct.PyTreeNode):
    q_down_DA: Array  # None if queries are projected in one step
    q_norm_A: Array
    q_up_ANH: Array
    kv_down_DA: Array  # the latent, then the rotary key
    kv_norm_A: Array
    k_up_NAH: Array
    v_up_NHA: Array
    out_NHD: Array
    q_down_bias_A: Array = None
    kv_down_bias_A: Array = None
    out_bias_D: Array = None
    indexer: IndexerWeights | None = None


def spec(config: ModelConfig, a: LatentAttention) -> LatentWeights:
    D = config.dim
    dtype = jnp.dtype(config.dtype)
    N = a.heads
    A = a.kv_rank
    H = a.nope_dim + a.rope_dim
    direct = a.q_rank is None
    rank = D if a.q_rank is None else a.q_rank
    kv_width = a.kv_rank + a.rope_dim
    return LatentWeights(
        q_down_DA=None if direct else matrix(config, (D,), (rank,), ("embed", None)),
        q_norm_A=None if direct else norm(rank),
        q_up_ANH=matrix(config, (rank,), (N, H), (None, "heads", None)),
        kv_down_DA=matrix(config, (D,), (kv_width,), ("embed", None)),
        kv_norm_A=norm(A),
        k_up_NAH=ArraySpec(
            (N, A, a.nope_dim), dtype, ("heads", None, None), fan_in=A, inputs=(2,), stacked=True
        ),
        v_up_NHA=ArraySpec(
            (N, a.v_dim, A), dtype, ("heads", None, None), fan_in=A, inputs=(2,), stacked=True
        ),
        out_NHD=matrix(config, (N, a.v_dim), (D,), ("heads", None, "embed")),
        q_down_bias_A=ArraySpec((rank,), dtype, (None,), "zeros")
        if a.bias and not direct
        else None,
        kv_down_bias_A=ArraySpec((kv_width,), dtype, (None,), "zeros") if a.bias else None,
        out_bias_D=ArraySpec((D,), dtype, (None,), "zeros") if a.bias else None,
        indexer=indexer_spec(config, a),
    )


def reads(w: LatentWeights) -> Array:
    """The weight that multiplies the layer's input."""
    return w.kv_down_DA


def mix(
    a: LatentAttention,
    w: LatentWeights,
    x_TD,
    rope,
    cache,
    hooks: LayerHooks,
    eps: float,
    axes: DeviceAxes,
):
    """MLA with absorbed up-projections: queries attend to the latents, which act as one shared KV
    head.

    Its norms have an epsilon of their own instead of `eps`.
    """
    if w.q_down_DA is None:
        q_TA = x_TD
    else:
        q_TA = project("TD,DA->TA", x_TD, w.q_down_DA, w.q_down_bias_A)
        q_TA = norm_alone(q_TA, w.q_norm_A, a.norm_eps, rounds(w.q_up_ANH))
    q_TNH = einsum("TA,ANH->TNH", q_TA, w.q_up_ANH)
    kv_TA = project("TD,DA->TA", x_TD, w.kv_down_DA, w.kv_down_bias_A)
    latent_TA = norm_alone(kv_TA[:, : a.kv_rank], w.kv_norm_A, a.norm_eps)
    k_rope_T1H = apply_rope(kv_TA[:, None, a.kv_rank :], rope)
    q_latent_TNA = einsum("TNH,NAH->TNA", q_TNH[..., : a.nope_dim], w.k_up_NAH)
    q_TNA = jnp.concatenate([q_latent_TNA, apply_rope(q_TNH[..., a.nope_dim :], rope)], axis=-1)
    k_T1A = jnp.concatenate([latent_TA[:, None], k_rope_T1H], axis=-1)
    options = {}
    if a.indexer is not None:
        options["picks"], key_T1H = picks_of(a.indexer, w.indexer, x_TD, q_TA, rope)
        k_T1A = k_T1A if key_T1H is None else jnp.concatenate([k_T1A, key_T1H], axis=-1)
    params = AttentionParams(a.scale, value_dim=a.kv_rank)
    out_TNA, cache = hooks.attend(q_TNA, k_T1A, None, cache, params, **options)
    out_TNH = einsum("TNA,NHA->TNH", out_TNA, w.v_up_NHA)
    return add_up("TNH,NHD->TD", out_TNH, w.out_NHD, w.out_bias_D, axes.tensor), cache


def apply_rope(x_TNH, rope):
    """Apply the rotary embedding, if there is one."""
    return x_TNH if rope is None else rotate(x_TNH, rope)
