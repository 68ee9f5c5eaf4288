"""Paged attention on NVIDIA GPUs of the Hopper generation, for the kinds of it in which it passed a trial on this card.

The kernel is in `quire.ops.attention.hopper_kernel`. A row's bits are the same in any batch and any chunk: blocks and
spans lie at fixed positions of its sequence.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from ..gpu import TILE_SOURCE, device
from ..gpu.self_test import TriedKernel, require_pass, warn_once
from . import hopper_kernel
from .accuracy import AttentionCase, Trial
from .four_bits import packed
from .hopper_kernel.task import ROWS
from .xla import append

HERE = Path(__file__).parent
SOURCES = (
    *(HERE / f"{name}.py" for name in ("hopper", "accuracy", "xla")),
    *Path(hopper_kernel.__file__).parent.glob("*.py"),
    TILE_SOURCE,
)
KERNEL = TriedKernel(__spec__.name, "attention", SOURCES)
WIDTHS = 64, 128, 256
LATENT = (576, 512), (320, 256)  # widths of keys and values
PAGES = 16, 32, 64, 128
TASKS = 400  # of a trial: about three for each processor, so that each runs several in turn


def paged_attention(q_TNH, k_TKH, v_TKH, pages, rows, *, scale, window, soft_cap, sinks_N, value_dim):
    """See `quire.ops.attention.paged_attention`."""
    declined = device.no_hopper_reason()
    if declined and not device.is_gpu():
        raise NotImplementedError(declined)
    try:
        require(q_TNH, pages, value_dim)
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
    return attend(
        q_TNH, k_TKH, v_TKH, pages, rows,
        scale=scale, window=window, soft_cap=soft_cap, sinks_N=sinks_N, value_dim=value_dim,
    )  # fmt: skip


def attend(
    q_TNH, k_TKH, v_TKH, pages, rows, *, scale, window, soft_cap, sinks_N, value_dim,
    interpret: Any = None,
):  # fmt: skip
    """The same without a trial. With `interpret` it runs in Pallas' interpreter, on a CPU."""
    if interpret is None and (declined := device.no_hopper_reason()):
        raise NotImplementedError(declined)
    require(q_TNH, pages, value_dim)
    from .hopper_kernel import paged  # only now: it imports a compiler

    if k_TKH is not None:
        pages = append(pages, k_TKH, v_TKH, rows.slots_T)
    processors = device.num_processors() if interpret is None else 3
    out_TNH = paged.attend(
        q_TNH, pages, rows, sinks_N, window=window, scale=float(scale), soft_cap=soft_cap, values=value_dim,
        processors=processors, interpret=interpret,
    )  # fmt: skip
    return out_TNH, pages


def require(q_TNH, pages, value_dim) -> None:
    """Declines what the kernel cannot serve on any card."""
    if pages.kv_PSYH is not None:
        raise NotImplementedError("keys and values must lie in arrays of their own")
    if packed(pages.k_PSKH):
        raise NotImplementedError("pages are int4, whose codes the kernel does not read")
    _, N, H = q_TNH.shape
    _, S, K, _ = pages.k_PSKH.shape
    group, held, scaled = N // K, pages.k_PSKH.dtype, pages.k_scale_PKS is not None
    if q_TNH.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"queries must be bfloat16 or float16, not {q_TNH.dtype}")
    if held != q_TNH.dtype and not (scaled and held in (jnp.int8, jnp.float8_e4m3fn)):
        raise NotImplementedError(f"pages must hold {q_TNH.dtype}, int8 or float8_e4m3fn, not {held}")
    if scaled and (value_dim is not None or S < 32):  # a copy brings at least 128 bytes, of scales too
        raise NotImplementedError("pages of eight bits must have 32 positions or more, and values beside their keys")
    if value_dim is None and H not in WIDTHS:
        raise NotImplementedError(f"keys must be of a width of {WIDTHS}, not {H}")
    if value_dim is not None and ((H, value_dim) not in LATENT or group % 8):
        raise NotImplementedError(f"keys that hold the values must be one of {LATENT}, for a multiple of 8 heads")
    if S not in PAGES or (group > ROWS and group % ROWS):
        raise NotImplementedError(
            f"pages must have {PAGES} positions, and KV heads up to or a multiple of {ROWS} heads"
        )


def cases(kind: dict) -> list[AttentionCase]:
    """What the process that tries runs."""
    return [AttentionCase(trial, attend) for trial in trials(kind)]


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
