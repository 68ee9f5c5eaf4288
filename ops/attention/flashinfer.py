"""Paged attention on NVIDIA GPUs by FlashInfer's kernel, for kinds that pass their self-test.

It is FlashInfer's FlashAttention-2 kernel for batches of prefills and decodes, with mma
instructions, which all GPUs since Ampere have. Contexts are split (split-KV) if the batch leaves
processors idle, so results are not batch-invariant.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ..gpu import device
from ..gpu.self_test import SelfTestedKernel
from . import flashinfer_kernel
from .accuracy import AttentionCase, Trial, self_tested
from .backend import AttentionBackend, AttentionParams, AttentionShape
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


def attend(q_TNH, k_TKH, v_TKH, pages, rows, params: AttentionParams, sinks_N=None):
    """See `quire.ops.attention.paged_attention`; this needs no self-test."""
    T, N, H = q_TNH.shape
    _, S, K, _ = pages.k_PSKH.shape
    B, M = rows.tables_BM.shape
    if k_TKH is not None:
        pages = append(pages, k_TKH, v_TKH, rows.slots_T)
    shape = PlanShape(T, B, N, K, H, S, M, params.window, device.num_processors())
    sinks = [] if sinks_N is None else [sinks_N.astype(jnp.float32)]
    out_TNH, _ = jax.ffi.ffi_call(
        library.target(
            kernel_for(q_TNH.dtype.name, H, params.window, params.soft_cap, sinks_N is not None)
        ),
        [
            jax.ShapeDtypeStruct(q_TNH.shape, q_TNH.dtype),
            jax.ShapeDtypeStruct((shape.scratch,), jnp.float32),
        ],
    )(
        q_TNH,
        pages.k_PSKH,
        pages.v_PSKH,
        *make_plan(shape, rows),
        *sinks,
        info=shape.info,
        window_left=np.int64(shape.window_left),
        soft_cap=np.float64(params.soft_cap or 0),
        scale=np.float64(params.scale),
    )
    is_owned_T = jnp.arange(T) < rows.starts_B1[-1]  # the kernel leaves other rows undefined
    return jnp.where(is_owned_T[:, None, None], out_TNH, 0), pages


def kernel_limits(params: AttentionParams, shape: AttentionShape) -> str | None:
    """Why the kernel does not support a call on any GPU; None if it does."""
    if shape.layout == "paired" or params.value_dim is not None:
        return "keys and values must lie in arrays of their own, and none within the other (MLA)"
    if shape.has_scales:
        return "pages must hold numbers, not codes with a scale for each position"
    if shape.dtype not in DTYPES or shape.page_dtype != shape.dtype:
        return (
            f"queries and pages must both be {' or '.join(DTYPES)}, not {shape.dtype} and "
            f"{shape.page_dtype}"
        )
    if shape.head_dim not in WIDTHS or shape.value_dim != shape.head_dim:
        return f"keys and values must be of one width of {WIDTHS}, not {shape.head_dim}"
    if params.soft_cap is not None and shape.has_sinks:
        return "FlashInfer has no kernel with both sinks and a soft cap"
    return None


def kernel_for(dtype: str, width: int, window, soft_cap, sinks: bool) -> library.Kernel:
    return library.Kernel(
        dtype, width, window is not None, soft_cap is not None, sinks, device.capability()
    )


def ready(kind: dict) -> str | None:
    """Build the kernel of a kind; why that failed, or None."""
    names = "dtype", "width", "window", "soft_cap", "sinks"
    return library.built(kernel_for(*(kind[name] for name in names)))[1]


KERNEL = SelfTestedKernel(__spec__.name, WORK, SOURCES, ready, compiler=None)
BACKEND = AttentionBackend(
    attend,
    self_tested(KERNEL, kernel_limits, lambda: device.no_ampere_reason() or library.missing()),
)


def cases(kind: dict) -> list[AttentionCase]:
    """The self-test cases of a kind, for `ops/gpu/self_test.py`."""
    return [AttentionCase(trial, attend) for trial in trials(kind)]


def varies() -> str:
    return (
        "attention by FlashInfer cuts a context into as many parts as the batch leaves "
        "processors for"
    )


def trials(kind: dict) -> list[Trial]:
    """Trials of each tile size: whole and split contexts, padding, empty sequences, layers."""
    group = kind["heads"] // kind["kv_heads"]
    rows_per_sequence = max(32 // group, 2)  # rows of a sequence for the tile of 64
    return [
        Trial("decoding", 100, 150, 1, 3, **kind),
        Trial("decoding, cut", 3, 8200, 1, 2, **kind),
        Trial("decoding, one long", 1, 33000, **kind),
        Trial("a few rows", 5, 700, rows_per_sequence, 1, **kind),
        Trial("layers of a step", 5, 1100, 1, 3, layers=6, **kind),
        Trial("a chunk", 3, 500, 200, 5, **kind),
        Trial("a chunk, cut", 1, 4150, 100, **kind),
    ]
