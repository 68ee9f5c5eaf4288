"""Paged attention by the native C++ kernel, `ops/native/attention.h`.

Results do not depend on the rest of the batch, on how prompts are cut into chunks, or on the number
of threads.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ..native import target
from ..native.kernel_names import ATTENTION
from . import KVPages, four_bits
from .backend import AttentionBackend, AttentionParams, AttentionShape
from .xla import latent_int4

PAGES = {pages for pages, _ in ATTENTION}  # supported dtypes of pages


def attend(q_TNH, k_TKH, v_TKH, pages, rows, params: AttentionParams, sinks_N=None):
    """See `quire.ops.attention.paged_attention`."""
    dtype = q_TNH.dtype
    page_dtype = pages.k_PSKH.dtype
    if any(x is not None and x.dtype != dtype for x in (k_TKH, v_TKH)):
        raise NotImplementedError(
            f"queries, keys and values must all be bfloat16 or all float32, not {dtype}"
        )
    if pages.v_PSKH is not None and pages.v_PSKH.dtype != page_dtype:
        raise NotImplementedError(
            f"pages must be one of {', '.join(sorted(PAGES))}, not {page_dtype}"
        )
    is_int4 = four_bits.is_packed(pages.k_PSKH)
    kernel = target(ATTENTION[page_dtype.name, dtype.name])
    check_shapes(q_TNH, k_TKH, v_TKH, pages, rows, sinks_N, params.value_dim)

    def or_empty(x, dtype):
        return jnp.zeros(0, dtype) if x is None else x

    arrays = [pages.k_PSKH, pages.v_PSKH, pages.k_scale_PKS, pages.v_scale_PKS]
    operands = [
        q_TNH, or_empty(k_TKH, dtype), or_empty(v_TKH, dtype),
        *(or_empty(x, page_dtype if i < 2 else jnp.float32) for i, x in enumerate(arrays)),
        rows.positions_T, rows.starts_B1, rows.tables_BM, rows.slots_T,
        or_empty(None if sinks_N is None else sinks_N.astype(jnp.float32), jnp.float32),
        or_empty(rows.sees_T if params.spans else None, jnp.int32),
    ]  # fmt: skip
    width = params.value_dim if pages.v_PSKH is None else pages.v_PSKH.shape[-1] * (1 + is_int4)
    written_arrays = [] if k_TKH is None else [i for i, x in enumerate(arrays) if x is not None]
    results = [jax.ShapeDtypeStruct((*q_TNH.shape[:2], width), dtype)]
    results += [jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype) for i in written_arrays]
    call = jax.ffi.ffi_call(
        kernel, results, input_output_aliases={3 + i: 1 + n for n, i in enumerate(written_arrays)}
    )
    out_TNH, *new_pages = call(
        *operands,
        scale=np.float32(params.scale),
        soft_cap=np.float32(params.soft_cap or 0),
        window=np.int32(params.window or 0),
        chunked=np.int32(params.chunked),
        ahead=np.int32(params.lookahead),
    )
    for i, x in zip(written_arrays, new_pages, strict=True):
        arrays[i] = x
    return out_TNH, KVPages(*arrays)


def limits(params: AttentionParams, shape: AttentionShape) -> str | None:
    """Why the kernel does not support a call, or could not be built; None if it serves the call."""
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


BACKEND = AttentionBackend(attend, limits, chunked=True, lookahead=True, spans=True)


def varies() -> None:
    """Batch-invariant: a row's result does not depend on the other rows."""


def check_shapes(q_TNH, k_TKH, v_TKH, pages, rows, sinks_N, value_dim) -> None:
    """Raise ValueError unless the shapes of the arrays agree; the kernel does not check them."""
    T, N, H = q_TNH.shape
    P, S, K, _ = pages.k_PSKH.shape
    codes_per_byte = 1 + four_bits.is_packed(pages.k_PSKH)  # codes of a byte
    B = rows.tables_BM.shape[0]
    V = value_dim if pages.v_PSKH is None else pages.v_PSKH.shape[-1] * codes_per_byte
    if V is None or (pages.v_PSKH is None and not 0 < V <= H):
        raise ValueError(f"attention: value_dim is {value_dim}; without v_PSKH it must be 1 to {H}")
    expected = {
        "k_PSKH": (pages.k_PSKH, (P, S, K, H // codes_per_byte)),
        "v_PSKH": (pages.v_PSKH, (P, S, K, V // codes_per_byte)),
        "k_scale_PKS": (pages.k_scale_PKS, (P, K, S)),
        "v_scale_PKS": (pages.v_scale_PKS, (P, K, S)),
        "k_TKH": (k_TKH, (T, K, H)),
        "v_TKH": (v_TKH, (T, K, V)),
        "positions_T": (rows.positions_T, (T,)),
        "starts_B1": (rows.starts_B1, (B + 1,)),
        "slots_T": (rows.slots_T, (T,)),
        "sees_T": (rows.sees_T, (T,)),
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
    has_scales = [
        pages.k_scale_PKS is not None,
        pages.v_scale_PKS is not None or pages.v_PSKH is None,
    ]
    if H % codes_per_byte:
        raise ValueError(f"attention: heads of an odd width, {H}, have no codes of four bits")
    if pages.k_PSKH.dtype in (jnp.int8, jnp.uint8) and not all(has_scales):
        raise ValueError(
            f"attention: pages of {pages.k_PSKH.dtype} need k_scale_PKS, and v_scale_PKS "
            "beside v_PSKH"
        )
