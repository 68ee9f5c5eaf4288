"""Paged attention on NVIDIA Hopper GPUs, for kinds that pass their self-test.

The kernel is in `quire.ops.attention.hopper_kernel`. Results are batch-invariant and do not depend
on how prompts are cut into chunks: blocks and spans begin at fixed positions of a sequence.
"""

from pathlib import Path
from typing import Any

from ..gpu import TILE_SOURCE, device
from ..gpu.self_test import SelfTestedKernel
from . import hopper_kernel
from .accuracy import AttentionCase, Trial, self_tested
from .backend import AttentionBackend, AttentionParams, AttentionShape
from .hopper_kernel.task import ROWS
from .xla import append

HERE = Path(__file__).parent
SOURCES = (
    *(HERE / f"{name}.py" for name in ("hopper", "accuracy", "xla")),
    *Path(hopper_kernel.__file__).parent.glob("*.py"),
    TILE_SOURCE,
)
KERNEL = SelfTestedKernel(__spec__.name, "attention", SOURCES)
WIDTHS = 64, 128, 256  # of heads
LATENT = (576, 512), (320, 256)  # widths of keys and values for MLA
PAGES = 16, 32, 64, 128  # positions of a page
TASKS = 400  # of a trial: about three for each processor


def attend(
    q_TNH,
    k_TKH,
    v_TKH,
    pages,
    rows,
    params: AttentionParams,
    sinks_N=None,
    *,
    interpret: Any = None,
):
    """See `quire.ops.attention.paged_attention`; this needs no self-test.

    With `interpret` it runs in Mosaic GPU's interpreter, on a CPU.
    """
    reason = device.no_hopper_reason() if interpret is None else None
    if reason := reason or kernel_limits(
        params, AttentionShape.of(q_TNH, pages, rows, params, sinks_N)
    ):
        raise NotImplementedError(reason)
    from .hopper_kernel import paged  # imported on use, because it imports a compiler

    if k_TKH is not None:
        pages = append(pages, k_TKH, v_TKH, rows.slots_T)
    processors = device.num_processors() if interpret is None else 3
    out_TNH = paged.attend(
        q_TNH,
        pages,
        rows,
        sinks_N,
        window=params.window,
        scale=float(params.scale),
        soft_cap=params.soft_cap,
        values=params.value_dim,
        processors=processors,
        interpret=interpret,
    )
    return out_TNH, pages


def kernel_limits(params: AttentionParams, shape: AttentionShape) -> str | None:
    """Why the kernel does not support a call on any GPU; None if it does."""
    group = shape.heads // shape.kv_heads
    width = shape.head_dim
    dtype = shape.dtype
    latent = params.value_dim is not None
    if shape.layout == "paired":
        return "keys and values must lie in arrays of their own"
    if shape.page_dtype == "uint8":
        return "pages are int4, whose codes the kernel does not read"
    if dtype not in ("bfloat16", "float16"):
        return f"queries must be bfloat16 or float16, not {dtype}"
    if shape.page_dtype != dtype and not (
        shape.has_scales and shape.page_dtype in ("int8", "float8_e4m3fn")
    ):
        return f"pages must hold {dtype}, int8 or float8_e4m3fn, not {shape.page_dtype}"
    # a copy has at least 128 bytes, also of scales
    if shape.has_scales and (latent or shape.page_size < 32):
        return "pages of eight bits must have 32 positions or more, and values beside their keys"
    if not latent and width not in WIDTHS:
        return f"keys must be of a width of {WIDTHS}, not {width}"
    if latent and ((width, params.value_dim) not in LATENT or group % 8):
        return f"keys that hold the values must be one of {LATENT}, for a multiple of 8 heads"
    if shape.page_size not in PAGES or (group > ROWS and group % ROWS):
        return (
            f"pages must have {PAGES} positions, and KV heads up to or a multiple of {ROWS} heads"
        )
    return None


BACKEND = AttentionBackend(attend, self_tested(KERNEL, kernel_limits, device.no_hopper_reason))


def cases(kind: dict) -> list[AttentionCase]:
    """The self-test cases of a kind, for `ops/gpu/self_test.py`."""
    return [AttentionCase(trial, attend) for trial in trials(kind)]


def varies() -> None:
    """Batch-invariant: a row's result does not depend on the other rows."""


def trials(kind: dict) -> list[Trial]:
    """Trials of every compiled variant of the kernel for a kind, and of every path through it.

    They have contexts of one span and of several, contexts that are split over processors, more
    tasks than processors, padding rows, sequences without rows, and layers that append to pages.
    """
    tasks_per_row = max(kind["kv_heads"], kind["heads"] // 64)
    num_sequences = -(-TASKS // tasks_per_row)
    return [
        Trial("decoding", num_sequences, 150, 1, 3, **kind),
        Trial("decoding, with room for spans", num_sequences, 700, 1, 3, 9000, **kind),
        Trial("decoding over spans", 3, 8200, **kind),
        Trial("decoding over longer spans", 1, 33000, **kind),
        Trial("layers of a step", 5, 1100, 1, 3, layers=6, **kind),
        Trial("a chunk", 3, 500, 200, 5, **kind),
        Trial("a chunk over spans", 1, 4150, 100, **kind),
        Trial("chunks over spans", max(num_sequences // 4, 1), 1100, 100, **kind),
    ]
