"""Attention over a paged cache: append the new keys and values, then attend, in one call."""

from typing import Any

import jax
import jax.numpy as jnp

from ...sharding import struct
from ...sharding.device_axes import UNSPLIT, Axis
from ..implementations import choose

# Tried in order; one that cannot serve a case declines by raising NotImplementedError with the reason.
IMPLEMENTATIONS = {
    "native": ".cpu", "mosaic_tpu": ".tpu", "mosaic_gpu": ".hopper", "flashinfer": ".flashinfer",
    "triton": ".triton", "xla": ".xla",
}  # fmt: skip


@struct.dataclass
class KVPages:
    """The KV cache of one layer. Without `v_PSKH` the values are the first dimensions of the keys (MLA).

    Pages of uint16 hold the bits of bfloat16; pages of eight bits have a float32 scale for each head and position, and
    those of uint8 hold two codes a byte (`four_bits`).
    `kv_PSYH` replaces all the others: each head's value right after its key.
    """

    k_PSKH: Any = None
    v_PSKH: Any = None
    k_scale_PKS: Any = None
    v_scale_PKS: Any = None
    kv_PSYH: Any = None


@struct.dataclass
class QueryRows:
    """Which sequence each query row belongs to, and where keys and values lie in the pages of one cache group."""

    positions_T: Any
    starts_B1: Any  # sequence b has the rows starts[b] .. starts[b + 1]; padding rows come after the last
    tables_BM: Any  # page numbers of each sequence; page 0 is a dummy
    slots_T: Any  # page * S + offset: where each row's key and value are written; for padding page 0
    arrivals: Any = None  # a reference to zeros in which a kernel counts; they are zeros again after it


def new_arrivals():
    """`QueryRows.arrivals` for all layers of a step, which a layer alone makes for itself; None without a GPU."""
    if jax.default_backend() != "gpu":
        return None
    return jax.new_ref(jnp.zeros(jax.local_devices()[0].core_count, jnp.int32))


def page_dtype(dtype):
    """The dtype of page arrays: of int4 uint8, two codes a byte, and on a CPU of bfloat16 its bits in uint16.

    XLA cannot update bfloat16 in place there: it would convert the whole cache to float32 and back in every layer.
    """
    if dtype == jnp.int4:
        return jnp.dtype(jnp.uint8)
    return jnp.dtype(jnp.uint16 if dtype == jnp.bfloat16 and jax.default_backend() == "cpu" else dtype)


def pairs(dtype) -> bool:
    """Whether keys and values are kept in one array, `kv_PSYH`: the TPU kernel reads them so."""
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
    chunked: bool = False,
    ahead: int = 0,
    context: Axis = UNSPLIT,
    split_rows: bool = False,
    implementation: str | None = None,
):
    """(out_TNH, pages). `k_TKH` is None where the layer reads pages that another layer has already filled.

    A row sees the last `window` positions or, `chunked`, of those the ones since the last multiple of `window`;
    and `ahead` positions after its own, as far as its sequence has rows here. `value_dim` is the width of the values
    where they are a part of the keys. Each device of `context` has some of the positions of every page. All devices
    pass all rows; each gets the result of all rows, or with `split_rows` that of its own part of them.
    `implementation` forces one of IMPLEMENTATIONS.
    """

    def attend(module):
        spread = {"context": context, "split_rows": split_rows} if context.size > 1 else {}
        if spread and not getattr(module, "SPREADS", False):
            raise NotImplementedError(f"positions are spread over {context.size} devices")
        if chunked and not getattr(module, "CHUNKS", False):
            raise NotImplementedError("rows see a chunk of the context each")
        if ahead and not getattr(module, "AHEAD", False):
            raise NotImplementedError("rows see positions after their own")
        spread |= ({"chunked": True} if chunked else {}) | ({"ahead": ahead} if ahead else {})
        return module.paged_attention(
            q_TNH, k_TKH, v_TKH, pages, rows,
            scale=scale, window=window, soft_cap=soft_cap, sinks_N=sinks_N, value_dim=value_dim, **spread,
        )  # fmt: skip

    return choose(IMPLEMENTATIONS, __name__, attend, implementation)
