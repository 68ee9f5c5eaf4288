"""Kimi Delta Attention: the delta rule with a decay for each channel of a key, in most layers of
Kimi Linear.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ...ops.activation import ACTIVATIONS
from ...ops.delta_net import delta_rule
from ...ops.linear import add_up, einsum
from ...ops.residual import norm_alone
from ...ops.short_conv import short_conv
from ...sharding import struct
from ...sharding.device_axes import DeviceAxes
from ...sharding.spec import ArraySpec, Interleaved
from ..config import KimiDelta, ModelConfig
from ..matrix import matrix, norm
from . import LayerHooks
from .delta_net import normalize

Array = Any  # a jax.Array, an ArraySpec, or a quantised node in place of either


class KimiDeltaWeights(struct.PyTreeNode):
    in_DC: Array  # queries, keys, values (convolved); low-rank decays and gates; beta
    conv_CW: Array
    decay_RNH: Array
    gate_RNH: Array
    fading_N: Array  # logarithm of each head's decay rate
    fading_bias_NH: Array
    norm_H: Array
    out_NHD: Array


def spec(config: ModelConfig, a: KimiDelta) -> KimiDeltaWeights:
    D = config.dim
    N = a.heads
    H = a.dim
    R = a.rank
    input_axis = Interleaved("heads", (N, N, N, 1, 1, N), shared=(3, 4), widths=(H, H, H, R, R, 1))
    conv_axis = Interleaved("heads", (N, N, N), widths=(H, H, H))
    return KimiDeltaWeights(
        in_DC=matrix(config, (D,), (3 * a.size + 2 * R + N,), ("embed", input_axis)),
        conv_CW=ArraySpec((3 * a.size, a.width), jnp.float32, (conv_axis, None), fan_in=a.width),
        decay_RNH=matrix(config, (R,), (N, H), (None, "heads", None)),
        gate_RNH=matrix(config, (R,), (N, H), (None, "heads", None)),
        fading_N=ArraySpec((N,), jnp.float32, ("heads",), "zeros"),
        fading_bias_NH=ArraySpec((N, H), jnp.float32, ("heads", None), "ones"),
        norm_H=norm(H),
        out_NHD=matrix(config, (N, H), (D,), ("heads", None, "embed")),
    )


def reads(w: KimiDeltaWeights) -> Array:
    """The weight that multiplies the layer's input."""
    return w.in_DC


def mix(
    a: KimiDelta,
    w: KimiDeltaWeights,
    x_TD,
    rope,
    cache,
    hooks: LayerHooks,
    eps: float,
    axes: DeviceAxes,
):
    """Everything between the projections is in float32."""
    assert hooks.recur is not None, "there is no store of recurrent states"
    activation = ACTIVATIONS[a.activation]
    size = a.size
    R = a.rank

    def run(inputs, states, rows):
        x_TC, decay_TNH, beta_TN = inputs
        x_TC, tail = short_conv(x_TC, w.conv_CW, states["tail"], rows)
        q_TNH, k_TNH, v_TNH = jnp.moveaxis(activation(x_TC).reshape(-1, 3, a.heads, a.dim), 1, 0)
        rate_TNH = jax.nn.softplus(decay_TNH + w.fading_bias_NH)
        decay_TNH = jnp.exp(-jnp.exp(w.fading_N)[:, None] * rate_TNH)
        q_TNH = normalize(q_TNH) * a.dim**-0.5
        beta_TN = jax.nn.sigmoid(beta_TN)
        out_TNH, memory = delta_rule(
            q_TNH, normalize(k_TNH), v_TNH, decay_TNH, beta_TN, states["memory"], rows
        )
        return out_TNH, {"tail": tail, "memory": memory}

    in_TC = einsum("TD,DC->TC", x_TD, w.in_DC)
    x_TC, decay_TR, gate_TR, beta_TN = jnp.split(
        in_TC, (3 * size, 3 * size + R, 3 * size + 2 * R), axis=1
    )
    decay_TNH = einsum("TR,RNH->TNH", decay_TR, w.decay_RNH).astype(jnp.float32)
    out_TNH, cache = hooks.recur((x_TC, decay_TNH, beta_TN.astype(jnp.float32)), run, cache)
    gate_TNH = einsum("TR,RNH->TNH", gate_TR, w.gate_RNH).astype(jnp.float32)
    out_TNH = norm_alone(out_TNH, w.norm_H, eps) * jax.nn.sigmoid(gate_TNH)
    return add_up("TNH,NHD->TD", out_TNH.astype(in_TC.dtype), w.out_NHD, None, axes.tensor), cache
