"""Attention over a paged cache: append the new keys and values, then attend, in one call."""

from typing import Any

import jax
import jax.numpy as jnp

from ...sharding import struct
from ..implementations import choose
from .backend import AttentionParams

# Tried in order; one that cannot serve a case declines by raising NotImplementedError with the
# reason.
IMPLEMENTATIONS = {
    "native": ".cpu", "mosaic_tpu": ".tpu", "mosaic_gpu": ".hopper", "flashinfer": ".flashinfer",
    "triton": ".triton", "xla": ".xla",
}  # fmt: skip


@struct.dataclass
class KVPages:
    """The KV cache of one layer. Without `v_PSKH` the values are the first dimensions of the keys
    (MLA).

    Pages of uint16 hold the bits of bfloat16; pages of eight bits have a float32 scale for each
    head and position, and those of uint8 hold two codes a byte (`four_bits`). `kv_PSYH` replaces
    all the others: each head's value right after its key.
    """

    k_PSKH: Any = None
    v_PSKH: Any = None
    k_scale_PKS: Any = None
    v_scale_PKS: Any = None
    kv_PSYH: Any = None


@struct.dataclass
class QueryRows:
    """Which sequence each query row belongs to, and where keys and values lie in the pages of one
    cache group.
    """

    positions_T: Any
    # sequence b has the rows starts[b] .. starts[b + 1]; padding rows come after the last
    starts_B1: Any
    tables_BM: Any  # page numbers of each sequence; page 0 is a dummy
    # page * S + offset: where each row's key and value are written; for padding page 0
    slots_T: Any
    # a reference to zeros in which a kernel counts; they are zeros again after it
    arrivals: Any = None


def new_arrivals():
    """`QueryRows.arrivals` for all layers of a step, which a layer alone makes for itself; None
    without a GPU.
    """
    if jax.default_backend() != "gpu":
        return None
    return jax.new_ref(jnp.zeros(jax.local_devices()[0].core_count, jnp.int32))


def page_dtype(dtype):
    """The dtype of page arrays: of int4 uint8, two codes a byte, and on a CPU of bfloat16 its bits
    in uint16.

    XLA cannot update bfloat16 in place there: it would convert the whole cache to float32 and back
    in every layer.
    """
    if dtype == jnp.int4:
        return jnp.dtype(jnp.uint8)
    return jnp.dtype(
        jnp.uint16 if dtype == jnp.bfloat16 and jax.default_backend() == "cpu" else dtype
    )


def pairs(dtype) -> bool:
    """Whether keys and values are kept in one array, `kv_PSYH`: the TPU kernel reads them so."""
    return dtype == jnp.bfloat16 and jax.default_backend() == "tpu"


def paged_attention(
    q_TNH,
    k_TKH,
    v_TKH,
    pages: KVPages,
    rows: QueryRows,
    params: AttentionParams,
    sinks_N=None,
    implementation: str | None = None,
):
    """Append the step's keys and values to the pages, and attend.

    Args:
        k_TKH: None where the layer reads pages that another layer has already filled.
        sinks_N: a score of each head without a value.
        implementation: forces one of IMPLEMENTATIONS.

    Returns:
        (out_TNH, pages). All devices of `params.context` pass all rows, and get the results of all
        or, with `split_rows`, those of their own part of them.
    """

    def attend(module):
        return module.BACKEND(q_TNH, k_TKH, v_TKH, pages, rows, params, sinks_N)

    return choose(IMPLEMENTATIONS, __name__, attend, implementation)
