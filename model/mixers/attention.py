"""Softmax attention over keys and values of each head."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...ops.attention.backend import AttentionParams
from ...ops.heads import Heads
from ...ops.heads.xla import split_heads
from ...ops.linear import add_up, project
from ...ops.rope import angles, rotate
from ...sharding import struct
from ...sharding.device_axes import DeviceAxes
from ...sharding.spec import ArraySpec, Interleaved
from ..config import Attention, ModelConfig, Rope
from ..matrix import matrix, norm
from . import LayerHooks

Array = Any  # a jax.Array, an ArraySpec, or a quantised node in place of either

# Positions over which a key's bias is averaged: more positions remove more of it in long contexts
# and less in short ones.
SHIFT_POSITIONS = 4096


class AttentionWeights(struct.PyTreeNode):
    qkv_DGH: Array  # output gates (if any), queries, keys, values (unless `kv_source`)
    out_NHD: Array
    qkv_bias_GH: Array = None
    out_bias_D: Array = None
    q_norm: Array = None
    k_norm: Array = None
    sinks_N: Array = None


def spec(config: ModelConfig, a: Attention) -> AttentionWeights:
    D = config.dim
    dtype = jnp.dtype(config.dtype)
    N = a.heads
    K = a.kv_heads
    H = a.head_dim
    sizes = (N,) if a.kv_source is not None else (N, K) if a.tied_kv else (N, K, K)
    sizes, shared = ((N, *sizes), (2, 3)) if a.out_gate else (sizes, (1, 2))
    G = sum(sizes)
    qkv_axis = Interleaved("heads", sizes, shared=shared[: len(sizes) - 1 - a.out_gate])
    # Several devices may hold the same keys, and therefore the same part of the scale.
    across_heads = (
        norm(N * H, Interleaved("heads", (N,))),
        norm(K * H, Interleaved("heads", (K,), shared=(0,))),
    )
    no_norms = (None, None)
    head_norms = (norm(H), norm(H))
    q_norm, k_norm = {
        None: no_norms,
        "plain": no_norms,
        "head": head_norms,
        "turned": head_norms,
        "all": across_heads,
    }[a.qk_norm]
    return AttentionWeights(
        qkv_DGH=matrix(config, (D,), (G, H), ("embed", qkv_axis, None)),
        out_NHD=matrix(config, (N, H), (D,), ("heads", None, "embed")),
        qkv_bias_GH=ArraySpec((G, H), dtype, (qkv_axis, None), "zeros") if a.bias else None,
        out_bias_D=ArraySpec((D,), dtype, (None,), "zeros") if a.out_bias else None,
        q_norm=q_norm,
        k_norm=None if a.kv_source is not None else k_norm,
        sinks_N=ArraySpec((N,), jnp.float32, ("heads",), "zeros") if a.sinks else None,
    )


def reads(w: AttentionWeights) -> Array:
    """The weight that multiplies the layer's input."""
    return w.qkv_DGH


def key_shift(a: Attention, bias_GH: Array) -> Array:
    """The mean of the keys' rotated bias, float32 [K, H], which quantised keys are stored without.

    Some models have key biases ten times as large as the rest of a key, in the pairs with the
    lowest frequencies: a quantised key would keep little else. A constant of all keys cancels in
    the softmax, so the mean is never added again. None if there is no bias, or if scores or keys
    are transformed by more than a softmax.
    """
    if (
        bias_GH is None
        or a.kv_source is not None
        or a.qk_norm is not None
        or a.soft_cap is not None
        or a.sinks
    ):
        return None
    bias_KH = key_bias(a, bias_GH)
    return bias_KH if a.rope is None else rotate(bias_KH[None], mean_rotation(a.rope))[0]


def key_bias(a: Attention, bias_GH: Array) -> Array:
    """The keys' part of a layer's bias, float32 [K, H]."""
    first = a.heads * (1 + a.out_gate)
    return bias_GH[first : first + a.kv_heads].astype(jnp.float32)


def bias_left(a: Attention, bias_GH: Array) -> float:
    """The bias that `key_shift` leaves in keys: the largest root mean square over a head."""
    bias_KH = key_bias(a, bias_GH)
    shift_KH = key_shift(a, bias_GH)
    rotated_TKH = bias_KH[None]
    if a.rope is not None:
        positions_T = jnp.arange(0, SHIFT_POSITIONS, 16)
        repeated_TKH = jnp.broadcast_to(bias_KH, (len(positions_T), *bias_KH.shape))
        rotated_TKH = rotate(repeated_TKH, angles(positions_T, a.rope.inv_freq, a.rope.factor))
    remaining_TKH = rotated_TKH if shift_KH is None else rotated_TKH - shift_KH
    return float(jnp.sqrt(jnp.mean(jnp.square(remaining_TKH), axis=-1)).max())


@cache
def mean_rotation(rope: Rope) -> tuple[np.ndarray, np.ndarray]:
    """The mean cosines and sines over the first SHIFT_POSITIONS positions, each [1, pairs]."""
    phase = np.arange(SHIFT_POSITIONS)[:, None] * np.asarray(rope.inv_freq)
    cos = np.cos(phase).mean(0, keepdims=True) * rope.factor
    sin = np.sin(phase).mean(0, keepdims=True) * rope.factor
    return cos.astype(np.float32), sin.astype(np.float32)


def mix(
    a: Attention,
    w: AttentionWeights,
    x_TD,
    rope,
    cache,
    hooks: LayerHooks,
    eps: float,
    axes: DeviceAxes,
):
    qkv_TGH = project("TD,DGH->TGH", x_TD, w.qkv_DGH, w.qkv_bias_GH)
    gate_TNH, qkv_TGH = (
        (qkv_TGH[:, : a.heads], qkv_TGH[:, a.heads :]) if a.out_gate else (None, qkv_TGH)
    )
    heads = Heads(
        a.heads,
        a.kv_heads if a.kv_source is None else 0,
        rope,
        a.qk_norm,
        w.q_norm,
        w.k_norm,
        eps,
        a.v_norm,
        a.tied_kv,
        axes.tensor,
        key_shift(a, w.qkv_bias_GH),
    )
    *qkv, cache = (
        (*split_heads(qkv_TGH, heads), cache)
        if hooks.prepare is None
        else hooks.prepare(qkv_TGH, heads, cache)
    )
    params = AttentionParams(
        a.scale,
        window=a.window,
        chunked=a.chunked,
        lookahead=a.ahead,
        spans=a.spans,
        soft_cap=a.soft_cap,
    )
    out_TNH, cache = hooks.attend(*qkv, cache, params, w.sinks_N)
    if gate_TNH is not None:
        out_TNH = (out_TNH * jax.nn.sigmoid(gate_TNH.astype(jnp.float32))).astype(out_TNH.dtype)
    return add_up("TNH,NHD->TD", out_TNH, w.out_NHD, w.out_bias_D, axes.tensor), cache
