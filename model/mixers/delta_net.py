"""Gated DeltaNet, in most layers of Qwen3-Next and Qwen3.5."""

from typing import Any

import jax
import jax.numpy as jnp

from ...ops.activation import ACTIVATIONS
from ...ops.delta_net import delta_rule
from ...ops.linear import add_up, einsum
from ...ops.linear.weight import plain
from ...ops.ordered_sum import sum_pairs
from ...ops.residual import norm_alone
from ...ops.short_conv import short_conv
from ...sharding import struct
from ...sharding.device_axes import DeviceAxes
from ...sharding.spec import ArraySpec, Interleaved
from ..config import DeltaNet, ModelConfig
from ..matrix import matrix, norm
from . import LayerHooks

Array = Any  # a jax.Array, an ArraySpec, or a quantised node in place of either


class DeltaNetWeights(struct.PyTreeNode):
    in_DC: Array  # queries, keys, values, output gates
    gates_DGN: Array  # G = 2: correction strength beta, then decay
    conv_CW: Array  # over queries, keys and values
    fading_N: Array  # logarithm of each head's decay rate
    fading_bias_N: Array
    norm_H: Array
    out_NHD: Array


def spec(config: ModelConfig, a: DeltaNet) -> DeltaNetWeights:
    D = config.dim
    dtype = jnp.dtype(config.dtype)
    N = a.heads
    V = a.value_dim
    keys, values = a.sizes
    input_axis, conv_axis = (
        Interleaved("heads", (keys, keys, values, *gate_sizes)) for gate_sizes in ((values,), ())
    )

    def by_head(init: str) -> ArraySpec:
        return ArraySpec((N,), jnp.float32, ("heads",), init)

    return DeltaNetWeights(
        in_DC=matrix(config, (D,), (2 * keys + 2 * values,), ("embed", input_axis)),
        gates_DGN=ArraySpec((D, 2, N), dtype, ("embed", None, "heads"), fan_in=D, inputs=(0,)),
        conv_CW=ArraySpec(
            (2 * keys + values, a.width), jnp.float32, (conv_axis, None), fan_in=a.width
        ),
        fading_N=by_head("zeros"),
        fading_bias_N=by_head("ones"),
        norm_H=norm(V),
        out_NHD=matrix(config, (N, V), (D,), ("heads", None, "embed")),
    )


def reads(w: DeltaNetWeights) -> Array:
    """The weight that multiplies the layer's input."""
    return w.in_DC


def mix(
    a: DeltaNet,
    w: DeltaNetWeights,
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
    keys, values = a.sizes

    def run(inputs, states, rows):
        x_TC, gates_TGN = inputs
        x_TC, tail = short_conv(x_TC, w.conv_CW, states["tail"], rows)
        x_TC = activation(x_TC)
        q_TKH, k_TKH = (
            x.reshape(-1, a.key_heads, a.key_dim)
            for x in (x_TC[:, :keys], x_TC[:, keys : 2 * keys])
        )
        q_TKH = normalize(q_TKH) * a.key_dim**-0.5
        k_TKH = normalize(k_TKH)
        v_TNH = x_TC[:, 2 * keys :].reshape(-1, a.heads, a.value_dim)
        rate_TN = jax.nn.softplus(gates_TGN[:, 1] + w.fading_bias_N)
        decay_TN = jnp.exp(-jnp.exp(w.fading_N) * rate_TN)
        beta_TN = jax.nn.sigmoid(gates_TGN[:, 0])
        beta_TN = 2 * beta_TN if a.overshoots else beta_TN
        out_TNH, memory = delta_rule(q_TKH, k_TKH, v_TNH, decay_TN, beta_TN, states["memory"], rows)
        return out_TNH, {"tail": tail, "memory": memory}

    in_TC = einsum("TD,DC->TC", x_TD, w.in_DC)
    gates_TGN = einsum("TD,DGN->TGN", plain(x_TD), w.gates_DGN, jnp.float32)
    out_TNH, cache = hooks.recur((in_TC[:, : 2 * keys + values], gates_TGN), run, cache)
    z_TNH = in_TC[:, 2 * keys + values :].reshape(out_TNH.shape).astype(jnp.float32)
    out_TNH = norm_alone(out_TNH, w.norm_H, a.norm_eps or eps) * activation(z_TNH)
    return add_up("TNH,NHD->TD", out_TNH.astype(in_TC.dtype), w.out_NHD, None, axes.tensor), cache


def normalize(x_TGH):
    """Scale vectors to length 1."""
    return x_TGH * jax.lax.rsqrt(sum_pairs(x_TGH * x_TGH)[..., None] + 1e-6)
