"""Paged attention by the C++ kernel: see attention.h in `ops/native`.

A row's bits are the same in any batch, in any chunk and on any number of threads.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ..native import target
from ..native.kernel_names import ATTENTION
from . import KVPages, four_bits
from .backend import AttentionBackend, AttentionParams, AttentionShape
from .xla import latent_int4

PAGES = {pages for pages, _ in ATTENTION}


def attend(q_TNH, k_TKH, v_TKH, pages, rows, params: AttentionParams, sinks_N=None):
    """See `quire.ops.attention.paged_attention`."""
    dtype, held = q_TNH.dtype, pages.k_PSKH.dtype
    if any(x is not None and x.dtype != dtype for x in (k_TKH, v_TKH)):
        raise NotImplementedError(
            f"queries, keys and values must all be bfloat16 or all float32, not {dtype}"
        )
    if pages.v_PSKH is not None and pages.v_PSKH.dtype != held:
        raise NotImplementedError(f"pages must be one of {', '.join(sorted(PAGES))}, not {held}")
    packed = four_bits.packed(pages.k_PSKH)
    kernel = target(ATTENTION[held.name, dtype.name])
    check_shapes(q_TNH, k_TKH, v_TKH, pages, rows, sinks_N, params.value_dim)

    def or_empty(x, dtype):
        return jnp.zeros(0, dtype) if x is None else x

    arrays = [pages.k_PSKH, pages.v_PSKH, pages.k_scale_PKS, pages.v_scale_PKS]
    operands = [
        q_TNH, or_empty(k_TKH, dtype), or_empty(v_TKH, dtype),
        *(or_empty(x, held if at < 2 else jnp.float32) for at, x in enumerate(arrays)),
        rows.positions_T, rows.starts_B1, rows.tables_BM, rows.slots_T,
        or_empty(None if sinks_N is None else sinks_N.astype(jnp.float32), jnp.float32),
    ]  # fmt: skip
    width = params.value_dim if pages.v_PSKH is None else pages.v_PSKH.shape[-1] * (1 + packed)
    written = [] if k_TKH is None else [at for at, x in enumerate(arrays) if x is not None]
    results = [jax.ShapeDtypeStruct((*q_TNH.shape[:2], width), dtype)]
    results += [jax.ShapeDtypeStruct(arrays[at].shape, arrays[at].dtype) for at in written]
    call = jax.ffi.ffi_call(
        kernel, results, input_output_aliases={3 + at: 1 + n for n, at in enumerate(written)}
    )
    out_TNH, *filled = call(
        *operands,
        scale=np.float32(params.scale),
        soft_cap=np.float32(params.soft_cap or 0),
        window=np.int32(params.window or 0),
        chunked=np.int32(params.chunked),
        ahead=np.int32(params.lookahead),
    )
    for at, x in zip(written, filled, strict=True):
        arrays[at] = x
    return out_TNH, KVPages(*arrays)


def limits(params: AttentionParams, shape: AttentionShape) -> str | None:
    """What the kernel does not serve, or why there is no kernel."""
    if shape.layout == "paired":
        return "keys and values must lie in arrays of their own"
    if shape.dtype not in ("bfloat16", "float32"):
        return f"queries, keys and values must all be bfloat16 or all float32, not {shape.dtype}"
    if (reason := latent_int4(shape)) is not None:
        return reason
    if shape.page_dtype not in PAGES:
        return f"pages must be one of {', '.join(sorted(PAGES))}, not {shape.page_dtype}"
    try:
        target(ATTENTION[shape.page_dtype, shape.dtype])
    except NotImplementedError as reason:
        return str(reason)
    return None


BACKEND = AttentionBackend(attend, limits, chunked=True, lookahead=True)


def varies() -> None:
    """A row's bits are the same in any company."""


def check_shapes(q_TNH, k_TKH, v_TKH, pages, rows, sinks_N, value_dim) -> None:
    """The kernel does not check shapes, so each array must have the shape that the others imply."""
    T, N, H = q_TNH.shape
    P, S, K, _ = pages.k_PSKH.shape
    each = 1 + four_bits.packed(pages.k_PSKH)  # codes of a byte
    B = rows.tables_BM.shape[0]
    V = value_dim if pages.v_PSKH is None else pages.v_PSKH.shape[-1] * each
    if V is None or (pages.v_PSKH is None and not 0 < V <= H):
        raise ValueError(f"attention: value_dim is {value_dim}; without v_PSKH it must be 1 to {H}")
    expected = {
        "k_PSKH": (pages.k_PSKH, (P, S, K, H // each)),
        "v_PSKH": (pages.v_PSKH, (P, S, K, V // each)),
        "k_scale_PKS": (pages.k_scale_PKS, (P, K, S)),
        "v_scale_PKS": (pages.v_scale_PKS, (P, K, S)),
        "k_TKH": (k_TKH, (T, K, H)),
        "v_TKH": (v_TKH, (T, K, V)),
        "positions_T": (rows.positions_T, (T,)),
        "starts_B1": (rows.starts_B1, (B + 1,)),
        "slots_T": (rows.slots_T, (T,)),
        "sinks_N": (sinks_N, (N,)),
    }
    for name, (x, shape) in expected.items():
        if x is not None and x.shape != shape:
            raise ValueError(
                f"attention: {name} has shape {x.shape}, but the other arrays say {shape}"
            )
    if N % K:
        raise ValueError(f"attention: {N} query heads do not share {K} key-value heads evenly")
    if (k_TKH is not None and pages.v_PSKH is not None) and v_TKH is None:
        raise ValueError("attention: there are new keys and pages for values, but v_TKH is None")
    scaled = [pages.k_scale_PKS is not None, pages.v_scale_PKS is not None or pages.v_PSKH is None]
    if H % each:
        raise ValueError(f"attention: heads of an odd width, {H}, have no codes of four bits")
    if pages.k_PSKH.dtype in (jnp.int8, jnp.uint8) and not all(scaled):
        raise ValueError(
            f"attention: pages of {pages.k_PSKH.dtype} need k_scale_PKS, and v_scale_PKS "
            "beside v_PSKH"
        )
