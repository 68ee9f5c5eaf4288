"""Attention over a paged KV cache: one call appends the new keys and values, and attends."""

from typing import Any

import jax
import jax.numpy as jnp

from ...sharding import struct
from ..implementations import choose
from .backend import AttentionParams

# Tried in order: an implementation raises NotImplementedError with the reason if it does not
# support a call.
IMPLEMENTATIONS = {
    "native": ".cpu", "mosaic_tpu": ".tpu", "mosaic_gpu": ".hopper", "flashinfer": ".flashinfer",
    "triton": ".triton", "xla": ".xla",
}  # fmt: skip


class KVPages(struct.PyTreeNode):
    """The KV cache of one layer, in one of these layouts.

    Separate arrays of keys and values; keys alone, if the values are the first dimensions of the
    keys (MLA); or `kv_PSYH` alone, in which each head's value follows its key.

    uint16 pages hold the bits of bfloat16. int8 and float8 pages have a float32 scale for each head
    and position, and so have uint8 pages, which hold two four-bit codes a byte (`four_bits`).
    """

    k_PSKH: Any = None
    v_PSKH: Any = None
    k_scale_PKS: Any = None
    v_scale_PKS: Any = None
    kv_PSYH: Any = None


class QueryRows(struct.PyTreeNode):
    """Maps the rows (tokens) of a step to sequences, and to the pages of one cache group."""

    positions_T: Any
    # sequence b has the rows starts[b] to starts[b + 1]; padding rows come after the last sequence
    starts_B1: Any
    tables_BM: Any  # page numbers of each sequence; page 0 is a dummy
    # page * S + offset: where each row's key and value are written; in page 0 for padding
    slots_T: Any
    # a reference to counters of the GPU kernel; they are zero before and after each call
    arrivals: Any = None
    # the last position that each row attends to, for `AttentionParams.spans`; None: its own
    sees_T: Any = None


def new_arrivals():
    """Counters for `QueryRows.arrivals`, which the layers of a step share; None without a GPU.

    If `QueryRows.arrivals` is None, the kernel allocates counters for each layer.
    """
    if jax.default_backend() != "gpu":
        return None
    return jax.new_ref(jnp.zeros(jax.local_devices()[0].core_count, jnp.int32))


def page_dtype(dtype):
    """The dtype of page arrays for a cache dtype.

    int4 is stored as uint8, two codes a byte. On CPUs bfloat16 is stored as its bits in uint16:
    XLA cannot update bfloat16 in place there, and would convert the whole cache to float32 and
    back in every layer.
    """
    if dtype == jnp.int4:
        return jnp.dtype(jnp.uint8)
    return jnp.dtype(
        jnp.uint16 if dtype == jnp.bfloat16 and jax.default_backend() == "cpu" else dtype
    )


def uses_paired_pages(dtype) -> bool:
    """Whether keys and values are stored in one array, `kv_PSYH`, as the TPU kernel needs them."""
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

    All devices of `params.context` pass all rows.

    Args:
        k_TKH: New keys; None if the layer reads pages that another layer has filled.
        sinks_N: For each head an additional score in the softmax, without a value.
        implementation: Forces one of IMPLEMENTATIONS.

    Returns:
        (out_TNH, pages): the results of all rows or, with `params.split_rows`, of this device's
        part of the rows.
    """

    def attend(module):
        return module.BACKEND(q_TNH, k_TKH, v_TKH, pages, rows, params, sinks_N)

    return choose(IMPLEMENTATIONS, __name__, attend, implementation)
