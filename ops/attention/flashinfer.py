"""Paged attention on NVIDIA GPUs by FlashInfer's kernel, for the kinds of it in which it passed a trial on this card.

It is the kernel for prompts and for decoding alike, of the second FlashAttention, with mma instructions that every card
since Ampere has. A context is cut where the whole batch has processors to spare, so a row's bits depend on its company.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ..gpu import device
from ..gpu.self_test import TriedKernel, require_pass, warn_once
from . import flashinfer_kernel
from .accuracy import AttentionCase, Trial
from .flashinfer_kernel import library
from .flashinfer_kernel.plan import PlanShape, make_plan
from .xla import append

DTYPES = "bfloat16", "float16"
WIDTHS = 64, 128, 256
WORK = "attention by FlashInfer"
HERE = Path(__file__).parent
SOURCES = (
    *(HERE / f"{name}.py" for name in ("flashinfer", "accuracy", "xla")),
    *Path(flashinfer_kernel.__file__).parent.glob("*.py"),
)


def paged_attention(q_TNH, k_TKH, v_TKH, pages, rows, *, scale, window, soft_cap, sinks_N, value_dim):
    """See `quire.ops.attention.paged_attention`."""
    if not device.is_gpu():
        raise NotImplementedError("there is no NVIDIA GPU")
    try:
        require(q_TNH, pages, soft_cap=soft_cap, sinks_N=sinks_N, value_dim=value_dim)
    except NotImplementedError as reason:
        warn_once(WORK, str(reason))
        raise
    kind = {
        "heads": q_TNH.shape[1], "kv_heads": pages.k_PSKH.shape[2], "width": q_TNH.shape[2], "window": window,
        "soft_cap": soft_cap, "sinks": sinks_N is not None, "page": pages.k_PSKH.shape[1], "dtype": q_TNH.dtype.name,
    }  # fmt: skip
    require_pass(KERNEL, kind, device.no_ampere_reason() or library.missing())
    return attend(
        q_TNH, k_TKH, v_TKH, pages, rows,
        scale=scale, window=window, soft_cap=soft_cap, sinks_N=sinks_N, value_dim=value_dim,
    )  # fmt: skip


def attend(q_TNH, k_TKH, v_TKH, pages, rows, *, scale, window, soft_cap, sinks_N, value_dim=None):
    """The same without a trial."""
    T, N, H = q_TNH.shape
    _, S, K, _ = pages.k_PSKH.shape
    B, M = rows.tables_BM.shape
    if k_TKH is not None:
        pages = append(pages, k_TKH, v_TKH, rows.slots_T)
    shape = PlanShape(T, B, N, K, H, S, M, window, device.num_processors())
    sinks = [] if sinks_N is None else [sinks_N.astype(jnp.float32)]
    out_TNH, _ = jax.ffi.ffi_call(
        library.target(kernel_for(q_TNH.dtype.name, H, window, soft_cap, sinks_N is not None)),
        [jax.ShapeDtypeStruct(q_TNH.shape, q_TNH.dtype), jax.ShapeDtypeStruct((shape.scratch,), jnp.float32)],
    )(
        q_TNH, pages.k_PSKH, pages.v_PSKH, *make_plan(shape, rows), *sinks,
        info=shape.info, window_left=np.int64(shape.window_left), soft_cap=np.float64(soft_cap or 0),
        scale=np.float64(scale),
    )  # fmt: skip
    owned_T = jnp.arange(T) < rows.starts_B1[-1]  # the kernel leaves other rows undefined
    return jnp.where(owned_T[:, None, None], out_TNH, 0), pages


def require(q_TNH, pages, *, soft_cap, sinks_N, value_dim) -> None:
    """Declines what the kernel cannot serve on any card."""
    if pages.kv_PSYH is not None or value_dim is not None:
        raise NotImplementedError("keys and values must lie in arrays of their own, and none within the other (MLA)")
    if pages.k_scale_PKS is not None:
        raise NotImplementedError("pages must hold numbers, not codes with a scale for each position")
    held = pages.k_PSKH.dtype
    if q_TNH.dtype.name not in DTYPES or held != q_TNH.dtype:
        raise NotImplementedError(f"queries and pages must both be {' or '.join(DTYPES)}, not {q_TNH.dtype} and {held}")
    if (width := q_TNH.shape[2]) not in WIDTHS or pages.v_PSKH.shape[3] != width:
        raise NotImplementedError(f"keys and values must be of one width of {WIDTHS}, not {width}")
    if soft_cap is not None and sinks_N is not None:
        raise NotImplementedError("FlashInfer has no kernel with both sinks and a soft cap")


def kernel_for(dtype: str, width: int, window, soft_cap, sinks: bool) -> library.Kernel:
    return library.Kernel(dtype, width, window is not None, soft_cap is not None, sinks, device.capability())


def ready(kind: dict) -> str | None:
    """Why the kernel of a kind is not there, once it was built."""
    names = "dtype", "width", "window", "soft_cap", "sinks"
    return library.built(kernel_for(*(kind[name] for name in names)))[1]


KERNEL = TriedKernel(__spec__.name, WORK, SOURCES, ready, compiler=None)


def cases(kind: dict) -> list[AttentionCase]:
    """What the process that tries runs."""
    return [AttentionCase(trial, attend) for trial in trials(kind)]


def varies() -> str:
    return "attention by FlashInfer cuts a context into as many parts as the batch leaves processors for"


def trials(kind: dict) -> list[Trial]:
    """Trials of each size of tile, of contexts whole and cut, padding, sequences without rows, and layers of a step."""
    group = kind["heads"] // kind["kv_heads"]
    few = max(32 // group, 2)  # rows of a sequence for the tile of 64
    return [
        Trial("decoding", 100, 150, 1, 3, **kind),
        Trial("decoding, cut", 3, 8200, 1, 2, **kind),
        Trial("decoding, one long", 1, 33000, **kind),
        Trial("a few rows", 5, 700, few, 1, **kind),
        Trial("layers of a step", 5, 1100, 1, 3, layers=6, **kind),
        Trial("a chunk", 3, 500, 200, 5, **kind),
        Trial("a chunk, cut", 1, 4150, 100, **kind),
    ]
