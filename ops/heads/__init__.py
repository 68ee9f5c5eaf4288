"""From a layer's product to what attends: heads are normalised, rotated, and appended where a
kernel can.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ...sharding.device_axes import UNSPLIT, Axis
from ..attention import KVPages, QueryRows
from ..implementations import choose

# Tried in order; one that cannot serve a case declines by raising NotImplementedError with its
# reasons.
IMPLEMENTATIONS = {"mosaic_gpu": ".hopper", "native": ".cpu", "xla": ".xla"}


@dataclass(frozen=True)
class Heads:
    """What a product's heads are, queries first, then keys, then values, and what is done to
    them.
    """

    queries: int
    keys: int  # 0: the layer reads pages that another one fills
    cos_sin: Any = None  # each [T, pairs]; None: no rotation
    norm: str | None = (
        # of queries and keys: "all", over all heads; "head" or "plain", over each; "turned", over
        # each
        None
    )
    # after the rotation
    q_scale: Any = None
    k_scale: Any = None
    eps: float = 1e-6
    v_norm: bool = False  # of each value, without a scale
    tied: bool = False  # the values are the keys before their norm
    axis: Axis = UNSPLIT  # the devices that share the heads
    # float32: taken off each rotated key that pages keep as codes; None: nothing is
    k_shift_KH: Any = None

    def shifts(self, pages: KVPages) -> bool:
        """Whether keys are shifted before they go into these pages."""
        return self.k_shift_KH is not None and pages.k_scale_PKS is not None


def prepare(
    qkv_TGH, heads: Heads, pages: KVPages, rows: QueryRows, implementation: str | None = None
):
    """(q_TNH, k_TKH, v_TKH, pages) for `paged_attention`: keys and values are None where the pages
    hold them already.

    What is taken off all keys of a head alike adds one number to all scores of a row, which no
    softmax sees. `implementation` forces one of IMPLEMENTATIONS.
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
