"""Attention and Mamba 2 on the same input, outputs added, in every layer of Falcon-H1."""

from typing import Any

from ...sharding import struct
from ...sharding.device_axes import DeviceAxes
from ..config import ModelConfig, SideBySide
from . import LayerHooks, attention, mamba2


class SideBySideWeights(struct.PyTreeNode):
    attention: attention.AttentionWeights
    mamba: mamba2.Mamba2Weights


def spec(config: ModelConfig, a: SideBySide) -> SideBySideWeights:
    return SideBySideWeights(attention.spec(config, a.attention), mamba2.spec(config, a.mamba))


def reads(w: SideBySideWeights) -> Any:
    """The weight that multiplies the layer's input."""
    return attention.reads(w.attention)


def mix(
    a: SideBySide,
    w: SideBySideWeights,
    x_TD,
    rope,
    cache,
    hooks: LayerHooks,
    eps: float,
    axes: DeviceAxes,
):
    attention_TD, cache = attention.mix(
        a.attention, w.attention, x_TD, rope, cache, hooks, eps, axes
    )
    mamba_TD, cache = mamba2.mix(a.mamba, w.mamba, x_TD, rope, cache, hooks, eps, axes)
    return attention_TD * a.scales[0] + mamba_TD * a.scales[1], cache
