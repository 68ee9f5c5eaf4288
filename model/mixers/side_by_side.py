"""Attention and Mamba 2 that read the same rows; what they give is added, as Falcon-H1 has it in every layer."""

from typing import Any

from ...sharding import struct
from ...sharding.device_axes import DeviceAxes
from ..config import ModelConfig, SideBySide
from . import LayerHooks, attention, mamba2


@struct.dataclass
class SideBySideWeights:
    attention: attention.AttentionWeights
    mamba: mamba2.Mamba2Weights


def spec(config: ModelConfig, a: SideBySide) -> SideBySideWeights:
    return SideBySideWeights(attention.spec(config, a.attention), mamba2.spec(config, a.mamba))


def reads(w: SideBySideWeights) -> Any:
    """The weight that the rows meet first."""
    return attention.reads(w.attention)


def mix(a: SideBySide, w: SideBySideWeights, x_TD, rope, cache, hooks: LayerHooks, eps: float, axes: DeviceAxes):
    seen_TD, cache = attention.mix(a.attention, w.attention, x_TD, rope, cache, hooks, eps, axes)
    kept_TD, cache = mamba2.mix(a.mamba, w.mamba, x_TD, rope, cache, hooks, eps, axes)
    return seen_TD * a.scales[0] + kept_TD * a.scales[1], cache
