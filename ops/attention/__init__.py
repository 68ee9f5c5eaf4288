"""Attention over a paged cache: append the new keys and values, then attend, in one call."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from ...sharding.device_axes import UNSPLIT, Axis

# Tried in order; one that cannot serve a case raises NotImplementedError.
IMPLEMENTATIONS = {"native": ".native", "mosaic_tpu": ".mosaic_tpu", "mosaic_gpu": ".gated_mosaic_gpu", "xla": ".xla"}


@struct.dataclass
class KVPages:
    """The cache of one layer. Without `v_PSKH` the values are the first dimensions of the keys (MLA).

    Pages of uint16 hold the bits of bfloat16, pages of eight bits come with a float32 scale a head and position. Where
    `kv_PSYH` is there, it holds what the others would, each head's value right after its key.
    """

    k_PSKH: Any = None
    v_PSKH: Any = None
    k_scale_PKS: Any = None
    v_scale_PKS: Any = None
    kv_PSYH: Any = None


@struct.dataclass
class QueryRows:
    """Which sequence each query row belongs to, and where the keys and values of one cache group lie."""

    positions_T: Any
    starts_B1: Any  # rows starts[b] .. starts[b + 1] are those of sequence b; padding rows come after the last
    tables_BM: Any  # page numbers of each sequence; page 0 is a dummy
    slots_T: Any  # page * S + offset where each row's key and value go; padding goes to page 0


def page_dtype(dtype):
    """What pages are made of: on a CPU the bits of bfloat16, which XLA could not write or read in place there.

    It would turn the whole cache to float32 and back in every layer.
    """
    return jnp.dtype(jnp.uint16 if dtype == jnp.bfloat16 and jax.default_backend() == "cpu" else dtype)


def pairs(dtype) -> bool:
    """Whether keys and values lie in one array: the kernel for TPUs reads `kv_PSYH`, and has no room for a copy."""
    return dtype == jnp.bfloat16 and jax.default_backend() == "tpu"


def paged_attention(
    q_TNH,
    k_TKH,
    v_TKH,
    pages: KVPages,
    rows: QueryRows,
    *,
    scale,
    window=None,
    soft_cap=None,
    sinks_N=None,
    value_dim=None,
    context: Axis = UNSPLIT,
    deal: bool = False,
):
    """(out_TNH, pages): `k` is None where the layer reads pages that another layer has already filled.

    `value_dim` is the width of the values where they are a part of the keys. The devices of `context` each have some of
    the positions of every page; all bring all rows, and get what belongs to all of them or, with `deal`, to their part.
    """
    reasons = []
    for name, module in IMPLEMENTATIONS.items():
        if context.size > 1 and name != "xla":
            reasons.append(f"{name}: positions are spread over {context.size} devices")
            continue
        spread = {"context": context, "deal": deal} if context.size > 1 else {}
        try:
            attend = importlib.import_module(module, __name__).paged_attention
            return attend(
                q_TNH, k_TKH, v_TKH, pages, rows,
                scale=scale, window=window, soft_cap=soft_cap, sinks_N=sinks_N, value_dim=value_dim, **spread,
            )  # fmt: skip
        except NotImplementedError as reason:
            reasons.append(f"{name}: {reason}")
    raise NotImplementedError("no attention implementation serves this case: " + "; ".join(reasons))
