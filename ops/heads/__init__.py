"""From a layer's product to what attends: heads are normalised, rotated, and appended where a kernel can."""

from dataclasses import dataclass
from typing import Any

from ...sharding.device_axes import UNSPLIT, Axis
from ..attention import KVPages, QueryRows
from ..implementations import choose

# Tried in order; one that cannot serve a case declines by raising NotImplementedError with its reasons.
IMPLEMENTATIONS = {"mosaic_gpu": ".mosaic_gpu", "native": ".native", "xla": ".xla"}


@dataclass(frozen=True)
class Heads:
    """What a product's heads are, queries first, then keys, then values, and what is done to them."""

    queries: int
    keys: int  # 0: the layer reads pages that another one fills
    cos_sin: Any = None  # each [T, pairs]; None: no rotation
    norm: str | None = (
        None  # of queries and keys: "all", over all heads; "head" or "plain", over each; "turned", over each
    )
    # after the rotation
    q_scale: Any = None
    k_scale: Any = None
    eps: float = 1e-6
    v_norm: bool = False  # of each value, without a scale
    tied: bool = False  # the values are the keys before their norm
    axis: Axis = UNSPLIT  # the devices that share the heads


def prepare(qkv_TGH, heads: Heads, pages: KVPages, rows: QueryRows, implementation: str | None = None):
    """(q_TNH, k_TKH, v_TKH, pages) for `paged_attention`: keys and values are None where the pages hold them already.

    `implementation` forces one of IMPLEMENTATIONS.
    """
    return choose(IMPLEMENTATIONS, __name__, lambda module: module.prepare(qkv_TGH, heads, pages, rows), implementation)
