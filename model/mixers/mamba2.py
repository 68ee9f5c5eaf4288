"""Mamba 2, in most layers of Granite 4 and Nemotron-H."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...ops.activation import ACTIVATIONS
from ...ops.delta_net import delta_rule
from ...ops.linear import add_up, project
from ...ops.residual import norm_alone
from ...ops.short_conv import short_conv
from ...sharding import struct
from ...sharding.device_axes import UNSPLIT, DeviceAxes
from ...sharding.spec import ArraySpec, Interleaved
from ..config import Mamba2, ModelConfig
from ..matrix import matrix, norm
from . import LayerHooks

Array = Any  # a jax.Array, an ArraySpec, or a quantised node in place of either


class Mamba2Weights(struct.PyTreeNode):
    in_DC: Array  # output gates; values, keys, queries (convolved); time steps
    conv_CW: Array
    rate_N: Array  # logarithm of each head's decay rate
    step_bias_N: Array
    direct_N: Array  # weight of the skip connection from values
    norm_C: Array  # None without a norm
    out_CD: Array
    conv_bias_C: Array = None
    in_bias_C: Array = None
    out_bias_D: Array = None


def spec(config: ModelConfig, a: Mamba2) -> Mamba2Weights:
    D = config.dim
    N = a.heads
    G = a.groups
    H = a.value_dim
    K = a.key_dim
    dtype = jnp.dtype(config.dtype)
    values, convolved = a.sizes
    head_axis = Interleaved("heads", (N,))
    conv_axis = Interleaved("heads", (N, G, G), shared=(1, 2), widths=(H, K, K))
    input_axis = Interleaved("heads", (N, N, G, G, N), shared=(2, 3), widths=(H, H, K, K, 1))

    def small(size: int, axis, init: str, dtype=jnp.float32) -> ArraySpec:
        return ArraySpec((size,), dtype, (axis,), init, fan_in=size)

    width = values + convolved + N
    return Mamba2Weights(
        in_DC=matrix(config, (D,), (width,), ("embed", input_axis)),
        conv_CW=ArraySpec((convolved, a.width), jnp.float32, (conv_axis, None), fan_in=a.width),
        rate_N=small(N, head_axis, "zeros"),
        step_bias_N=small(N, head_axis, "ones"),
        direct_N=small(N, head_axis, "ones"),
        norm_C=norm(values, head_axis) if a.normed else None,
        out_CD=matrix(config, (values,), (D,), (head_axis, "embed")),
        conv_bias_C=small(convolved, conv_axis, "zeros") if a.conv_bias else None,
        in_bias_C=small(width, input_axis, "zeros", dtype) if a.bias else None,
        out_bias_D=small(D, None, "zeros", dtype) if a.bias else None,
    )


def reads(w: Mamba2Weights) -> Array:
    """The weight that multiplies the layer's input."""
    return w.in_DC


def mix(
    a: Mamba2, w: Mamba2Weights, x_TD, rope, cache, hooks: LayerHooks, eps: float, axes: DeviceAxes
):
    """Everything between the projections is in float32."""
    assert hooks.recur is not None, "there is no store of recurrent states"
    activation = ACTIVATIONS[a.activation]
    values, convolved = a.sizes
    keys = a.groups * a.key_dim

    def run(inputs, states, rows):
        x_TC, step_TN = inputs
        # Inside, so that replayed draft tokens have the same arithmetic.
        if a.multipliers is not None:
            mixed_C = np.repeat(np.array(a.multipliers[1:4], np.float32), (values, keys, keys))
            x_TC = x_TC.astype(jnp.float32) * mixed_C
            step_TN = step_TN * a.multipliers[4]
        x_TC, tail = short_conv(x_TC, w.conv_CW, states["tail"], rows)
        x_TC = activation(x_TC if w.conv_bias_C is None else x_TC + w.conv_bias_C)
        v_TNH = x_TC[:, :values].reshape(-1, a.heads, a.value_dim)
        k_TGH, q_TGH = (
            x_TC[:, at : at + keys].reshape(-1, a.groups, a.key_dim)
            for at in (values, values + keys)
        )
        step_TN = jnp.maximum(jax.nn.softplus(step_TN + w.step_bias_N), a.least_step)
        decay_TN = jnp.exp(-jnp.exp(w.rate_N) * step_TN)
        out_TNH, memory = delta_rule(
            q_TGH, k_TGH, v_TNH, decay_TN, step_TN, states["memory"], rows, corrects=False
        )
        return out_TNH + w.direct_N[:, None] * v_TNH, {"tail": tail, "memory": memory}

    in_TC = project("TD,DC->TC", x_TD, w.in_DC, w.in_bias_C)
    gate_TC, x_TC, step_TN = jnp.split(in_TC, (values, values + convolved), axis=1)
    if a.multipliers is not None:
        gate_TC = gate_TC.astype(jnp.float32) * a.multipliers[0]
    out_TNH, cache = hooks.recur((x_TC, step_TN.astype(jnp.float32)), run, cache)
    out_TC = out_TNH.reshape(-1, values) * activation(gate_TC.astype(jnp.float32))
    if w.norm_C is not None:
        norm_axis = axes.tensor if a.spread else UNSPLIT
        out_TGC = norm_alone(
            out_TC.reshape(-1, a.groups, values // a.groups), None, eps, axis=norm_axis
        )
        out_TC = out_TGC.reshape(-1, values) * w.norm_C
    return add_up(
        "TC,CD->TD", out_TC.astype(in_TC.dtype), w.out_CD, w.out_bias_D, axes.tensor
    ), cache
