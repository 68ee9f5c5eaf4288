"""Preparation of queries, keys and values for attention: norm, rotation and, where a kernel
supports it, appending to the KV pages.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ...sharding.device_axes import UNSPLIT, Axis
from ..attention import KVPages, QueryRows
from ..implementations import choose

# Tried in order; one that does not support a case raises NotImplementedError with its reasons.
IMPLEMENTATIONS = {"mosaic_gpu": ".hopper", "native": ".cpu", "xla": ".xla"}


@dataclass(frozen=True)
class Heads:
    """The heads of a fused QKV projection: queries, then keys, then values."""

    queries: int  # number of query heads
    keys: int  # number of key heads; 0 if the layer reads the KV pages of another layer
    cos_sin: Any = None  # (cosines, sines), each [T, pairs]; None: no rotation
    # RMS norm of queries and keys. "all": over all heads; "head": over each; "plain": over each,
    # without a scale; "turned": over each, after the rotation.
    norm: str | None = None
    q_scale: Any = None  # the norm's scale for queries
    k_scale: Any = None
    eps: float = 1e-6
    v_norm: bool = False  # whether each value head is normalised, without a scale
    tied: bool = False  # the values are the keys before their norm
    axis: Axis = UNSPLIT  # the devices that the heads are split over
    k_shift_KH: Any = None  # float32, subtracted from rotated keys if the pages are quantised

    def shifts(self, pages: KVPages) -> bool:
        """Whether keys are shifted before they go into these pages."""
        return self.k_shift_KH is not None and pages.k_scale_PKS is not None


def prepare(
    qkv_TGH, heads: Heads, pages: KVPages, rows: QueryRows, implementation: str | None = None
):
    """Split a layer's QKV projection into heads, and normalise and rotate them.

    Keys of quantised pages are shifted by a constant per head and column, which makes them easier
    to quantise. The softmax cancels it: it changes all scores of a query by the same number.

    Args:
        qkv_TGH: the heads, see `Heads`.
        heads: how they are prepared.
        pages: the layer's KV pages.
        rows: the tokens' slots in the pages.
        implementation: the name in IMPLEMENTATIONS of the only one to try.

    Returns:
        (q_TNH, k_TKH, v_TKH, pages) for `paged_attention`. Keys and values are None if they were
        already appended to the pages or the layer has none.
    """
    q_TNH, k_TKH, v_TKH, pages = choose(
        IMPLEMENTATIONS,
        __name__,
        lambda module: module.prepare(qkv_TGH, heads, pages, rows),
        implementation,
    )
    if heads.shifts(pages):
        k_TKH = (k_TKH.astype(jnp.float32) - heads.k_shift_KH).astype(k_TKH.dtype)
    return q_TNH, k_TKH, v_TKH, pages
