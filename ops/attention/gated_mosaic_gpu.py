"""The kernel for NVIDIA GPUs, for the kinds of attention in which it passed its trial on this card."""

from pathlib import Path

from ..kernel_trial import TriedKernel, require_pass, warn_once
from . import mosaic, mosaic_gpu
from .accuracy_trial import AttentionCase, Trial

HERE = Path(__file__).parent
SOURCES = (
    *(HERE / f"{name}.py" for name in ("gated_mosaic_gpu", "accuracy_trial", "mosaic_gpu", "xla")),
    *Path(mosaic.__file__).parent.glob("*.py"),
)
KERNEL = TriedKernel(__spec__.name, "attention", SOURCES)
TASKS = 400  # of a trial: about three for each processor, so that each runs several in turn


def paged_attention(q_TNH, k_TKH, v_TKH, pages, rows, *, scale, window, soft_cap, sinks_N, value_dim):
    """See `quire.ops.attention.paged_attention`."""
    declined = mosaic_gpu.card_declines()
    if declined and not mosaic_gpu.is_gpu():
        raise NotImplementedError(declined)
    try:
        mosaic_gpu.require(q_TNH, pages, value_dim)
    except NotImplementedError as reason:
        warn_once(KERNEL.work, str(reason))
        raise
    page = pages.k_PSKH
    kind = {
        "heads": q_TNH.shape[1], "kv_heads": page.shape[2], "width": q_TNH.shape[2], "window": window,
        "soft_cap": soft_cap, "sinks": sinks_N is not None, "page": page.shape[1],
        "codes": None if pages.k_scale_PKS is None else page.dtype.name, "values": value_dim,
        "dtype": q_TNH.dtype.name,
    }  # fmt: skip
    require_pass(KERNEL, kind, declined)
    return mosaic_gpu.paged_attention(
        q_TNH, k_TKH, v_TKH, pages, rows,
        scale=scale, window=window, soft_cap=soft_cap, sinks_N=sinks_N, value_dim=value_dim,
    )  # fmt: skip


def cases(kind: dict) -> list[AttentionCase]:
    """What the process that tries runs."""
    return [AttentionCase(trial, mosaic_gpu.paged_attention) for trial in trials(kind)]


def varies() -> None:
    """A row's bits are the same in any company."""


def trials(kind: dict) -> list[Trial]:
    """Trials of each way in which the kernel is compiled for a kind, and each path through it: whole contexts of one
    span and of several, and contexts that are cut, more tasks than processors, padding rows, sequences without rows,
    layers of a step that fill their pages."""
    parts = max(kind["kv_heads"], kind["heads"] // 64)  # tasks of a row
    many = -(-TASKS // parts)
    return [
        Trial("decoding", many, 150, 1, 3, **kind),
        Trial("decoding, with room for spans", many, 700, 1, 3, 9000, **kind),
        Trial("decoding over spans", 3, 8200, **kind),
        Trial("decoding over longer spans", 1, 33000, **kind),
        Trial("layers of a step", 5, 1100, 1, 3, layers=6, **kind),
        Trial("a chunk", 3, 500, 200, 5, **kind),
        Trial("a chunk over spans", 1, 4150, 100, **kind),
        Trial("chunks over spans", max(many // 4, 1), 1100, 100, **kind),
    ]
