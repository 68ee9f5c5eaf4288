"""Paged attention on NVIDIA GPUs by Triton, for the kinds of it in which it passed a trial on this card.

It needs nothing but JAX, and serves what the kernels before it decline: on cards other than Hopper, where FlashInfer is
not installed, everything.
"""

from pathlib import Path
from typing import Any

import jax

from ..gpu import device
from ..gpu.self_test import TRITON, TriedKernel, require_pass, warn_once
from ..quant import fp8
from .accuracy import AttentionCase, Trial
from .xla import append

DTYPES = "bfloat16", "float16"
CODES = "int8", "float8_e4m3fn"
WIDTHS = 64, 128, 256
WORK = "attention by Triton"
BEYOND = "of 2 to 4 GiB, which Triton's offsets do not reach"
HERE = Path(__file__).parent
SOURCES = (
    *(HERE / f"{name}.py" for name in ("triton", "triton_kernel", "accuracy", "xla")),
    Path(fp8.__file__),
)
KERNEL = TriedKernel(__spec__.name, WORK, SOURCES, compiler=TRITON)


def paged_attention(q_TNH, k_TKH, v_TKH, pages, rows, *, scale, window, soft_cap, sinks_N, value_dim):
    """See `quire.ops.attention.paged_attention`."""
    if not device.is_gpu():
        raise NotImplementedError("there is no NVIDIA GPU")
    try:
        require(q_TNH, pages, value_dim=value_dim)
    except NotImplementedError as reason:
        warn_once(WORK, str(reason))
        raise
    page = pages.k_PSKH
    kind = {
        "heads": q_TNH.shape[1], "kv_heads": page.shape[2], "width": q_TNH.shape[2], "window": window,
        "soft_cap": soft_cap, "sinks": sinks_N is not None, "page": page.shape[1],
        "codes": None if pages.k_scale_PKS is None else page.dtype.name, "dtype": q_TNH.dtype.name,
    }  # fmt: skip
    require_pass(KERNEL, kind, device.no_ampere_reason())
    return attend(
        q_TNH, k_TKH, v_TKH, pages, rows,
        scale=scale, window=window, soft_cap=soft_cap, sinks_N=sinks_N, value_dim=value_dim,
    )  # fmt: skip


def attend(
    q_TNH, k_TKH, v_TKH, pages, rows, *, scale, window, soft_cap, sinks_N, value_dim=None, interpret: bool = False
) -> tuple[jax.Array, Any]:
    """The same without a trial. With `interpret` it runs in Pallas' interpreter, on a CPU."""
    require(q_TNH, pages, value_dim=value_dim)
    from . import triton_kernel  # only now: it imports a compiler

    if k_TKH is not None:
        pages = append(pages, k_TKH, v_TKH, rows.slots_T)
    out_TNH = triton_kernel.attend(
        q_TNH, pages, rows, scale=scale, window=window, soft_cap=soft_cap, sinks_N=sinks_N, interpret=interpret
    )
    return out_TNH, pages


def require(q_TNH, pages, *, value_dim) -> None:
    """Declines what the kernel cannot serve on any card."""
    if pages.kv_PSYH is not None or value_dim is not None:
        raise NotImplementedError("keys and values must lie in arrays of their own, and none within the other (MLA)")
    held = pages.k_PSKH.dtype
    if q_TNH.dtype.name not in DTYPES:
        raise NotImplementedError(f"queries must be {' or '.join(DTYPES)}, not {q_TNH.dtype}")
    if held != q_TNH.dtype and (pages.k_scale_PKS is None or held.name not in CODES):
        raise NotImplementedError(f"pages must be {q_TNH.dtype} as queries are, or codes of {CODES}, not {held}")
    if beyond_offsets(pages.k_PSKH):
        raise NotImplementedError(f"pages of eight bits of a layer must not be {BEYOND}: give the cache less memory")
    if (width := q_TNH.shape[2]) not in WIDTHS or pages.v_PSKH.shape[3] != width:
        raise NotImplementedError(f"keys and values must be of one width of {WIDTHS}, not {width}")


def beyond_offsets(array) -> bool:
    """Whether Pallas reaches a part of an array by an offset that wraps around: up to 4 GiB they have 32 bits and a
    sign, which is enough for numbers of two bytes or more."""
    return array.dtype.itemsize == 1 and 2**31 < array.size <= 2**32


def cases(kind: dict) -> list[AttentionCase]:
    """What the process that tries runs."""
    return [AttentionCase(trial, attend) for trial in trials(kind)]


def varies() -> str:
    return "attention by Triton cuts a context into parts where a step has no prompts, and not beside prompts"


def trials(kind: dict) -> list[Trial]:
    """Trials of contexts of one span and of several, of rows alone and together, padding, sequences without rows, and
    layers of a step."""
    return [
        Trial("decoding", 100, 150, 1, 3, **kind),
        Trial("decoding over spans", 3, 8200, 1, 2, **kind),
        Trial("decoding over longer spans", 1, 33000, **kind),
        Trial("a few rows", 5, 700, 3, 1, **kind),
        Trial("layers of a step", 5, 1100, 1, 3, layers=6, **kind),
        Trial("a chunk", 3, 500, 200, 5, **kind),
        Trial("a longer chunk", 1, 4150, 100, **kind),
    ]
