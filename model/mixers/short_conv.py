"""A gated short convolution over the last few tokens, in most layers of LFM2."""

from typing import Any

import jax.numpy as jnp

from ...ops.linear import add_up, project
from ...ops.short_conv import short_conv
from ...sharding import struct
from ...sharding.device_axes import DeviceAxes
from ...sharding.spec import ArraySpec, Interleaved
from ..config import ModelConfig, ShortConv
from ..matrix import matrix
from . import LayerHooks

Array = Any  # a jax.Array, an ArraySpec, or a quantised node in place of either


class ShortConvWeights(struct.PyTreeNode):
    in_DC: Array  # input gates, output gates, inputs
    conv_CW: Array
    out_CD: Array
    in_bias_C: Array = None
    conv_bias_C: Array = None
    out_bias_D: Array = None


def spec(config: ModelConfig, a: ShortConv) -> ShortConvWeights:
    D = config.dim
    C = a.channels
    dtype = jnp.dtype(config.dtype)
    input_axis = Interleaved("heads", (C, C, C))
    return ShortConvWeights(
        in_DC=matrix(config, (D,), (3 * C,), ("embed", input_axis)),
        conv_CW=ArraySpec((C, a.width), jnp.float32, ("heads", None), fan_in=a.width),
        out_CD=matrix(config, (C,), (D,), ("heads", "embed")),
        in_bias_C=ArraySpec((3 * C,), dtype, (input_axis,), "zeros") if a.bias else None,
        conv_bias_C=ArraySpec((C,), jnp.float32, ("heads",), "zeros") if a.bias else None,
        out_bias_D=ArraySpec((D,), dtype, (None,), "zeros") if a.bias else None,
    )


def reads(w: ShortConvWeights) -> Array:
    """The weight that multiplies the layer's input."""
    return w.in_DC


def mix(
    a: ShortConv,
    w: ShortConvWeights,
    x_TD,
    rope,
    cache,
    hooks: LayerHooks,
    eps: float,
    axes: DeviceAxes,
):
    """Everything between the projections is in float32."""
    assert hooks.recur is not None, "there is no store of recurrent states"

    def run(inputs, states, rows):
        out_TC, tail = short_conv(inputs[0], w.conv_CW, states["tail"], rows)
        return out_TC, {"tail": tail}

    in_TC = project("TD,DC->TC", x_TD, w.in_DC, w.in_bias_C)
    gate_TC, out_gate_TC, x_TC = (x.astype(jnp.float32) for x in jnp.split(in_TC, 3, axis=1))
    out_TC, cache = hooks.recur((gate_TC * x_TC,), run, cache)
    if w.conv_bias_C is not None:
        out_TC = out_TC + w.conv_bias_C
    out_TC = (out_gate_TC * out_TC).astype(in_TC.dtype)
    return add_up("TC,CD->TD", out_TC, w.out_CD, w.out_bias_D, axes.tensor), cache
