"""Paged attention on NVIDIA GPUs by Triton kernels, for kinds that pass their self-test.

The kernels need no package beside JAX. They serve the calls that the kernels before them do not
support: on GPUs other than Hopper and without FlashInfer, all calls.
"""

from pathlib import Path
from typing import Any

import jax

from ..gpu import device
from ..gpu.self_test import TRITON, SelfTestedKernel
from ..quant import fp8
from .accuracy import AttentionCase, Trial, self_tested
from .backend import AttentionBackend, AttentionParams, AttentionShape
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
KERNEL = SelfTestedKernel(__spec__.name, WORK, SOURCES, compiler=TRITON)


def attend(
    q_TNH,
    k_TKH,
    v_TKH,
    pages,
    rows,
    params: AttentionParams,
    sinks_N=None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, Any]:
    """See `quire.ops.attention.paged_attention`; this needs no self-test.

    With `interpret` it runs in Pallas' interpreter, on a CPU.
    """
    if reason := kernel_limits(params, AttentionShape.of(q_TNH, pages, rows, params, sinks_N)):
        raise NotImplementedError(reason)
    from . import triton_kernel  # imported on use, because it imports a compiler

    if k_TKH is not None:
        pages = append(pages, k_TKH, v_TKH, rows.slots_T)
    out_TNH = triton_kernel.attend(
        q_TNH,
        pages,
        rows,
        scale=params.scale,
        window=params.window,
        soft_cap=params.soft_cap,
        sinks_N=sinks_N,
        interpret=interpret,
    )
    return out_TNH, pages


def kernel_limits(params: AttentionParams, shape: AttentionShape) -> str | None:
    """Why the kernel does not support a call on any GPU; None if it does."""
    if shape.layout == "paired" or params.value_dim is not None:
        return "keys and values must lie in arrays of their own, and none within the other (MLA)"
    if shape.dtype not in DTYPES:
        return f"queries must be {' or '.join(DTYPES)}, not {shape.dtype}"
    if shape.page_dtype != shape.dtype and not (shape.has_scales and shape.page_dtype in CODES):
        return (
            f"pages must be {shape.dtype} as queries are, or codes of {CODES}, not "
            f"{shape.page_dtype}"
        )
    page = shape.num_pages, shape.page_size, shape.kv_heads, shape.head_dim
    if beyond_offsets(jax.ShapeDtypeStruct(page, shape.page_dtype)):
        return f"pages of eight bits of a layer must not be {BEYOND}: give the cache less memory"
    if shape.head_dim not in WIDTHS or shape.value_dim != shape.head_dim:
        return f"keys and values must be of one width of {WIDTHS}, not {shape.head_dim}"
    return None


BACKEND = AttentionBackend(attend, self_tested(KERNEL, kernel_limits, device.no_ampere_reason))


def beyond_offsets(array) -> bool:
    """Whether Pallas' offsets into an array overflow.

    Arrays of up to 4 GiB are indexed with signed 32-bit element offsets, which do not suffice for
    elements of one byte.
    """
    return array.dtype.itemsize == 1 and 2**31 < array.size <= 2**32


def cases(kind: dict) -> list[AttentionCase]:
    """The self-test cases of a kind, for `ops/gpu/self_test.py`."""
    return [AttentionCase(trial, attend) for trial in trials(kind)]


def varies() -> str:
    return (
        "attention by Triton cuts a context into parts where a step has no prompts, and not "
        "beside prompts"
    )


def trials(kind: dict) -> list[Trial]:
    """Trials with one span and several, one row and several, padding, empty sequences, layers."""
    return [
        Trial("decoding", 100, 150, 1, 3, **kind),
        Trial("decoding over spans", 3, 8200, 1, 2, **kind),
        Trial("decoding over longer spans", 1, 33000, **kind),
        Trial("a few rows", 5, 700, 3, 1, **kind),
        Trial("layers of a step", 5, 1100, 1, 3, layers=6, **kind),
        Trial("a chunk", 3, 500, 200, 5, **kind),
        Trial("a longer chunk", 1, 4150, 100, **kind),
    ]
