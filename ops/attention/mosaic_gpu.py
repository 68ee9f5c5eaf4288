"""Paged attention on NVIDIA GPUs from Hopper on: the kernel is in `quire.ops.gpu`.

A row's result has the same bits in any batch and any chunk: blocks and spans lie at fixed places of its sequence.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..gpu.task import ROWS
from .xla import append

WIDTHS = 64, 128
PAGES = 16, 32, 64, 128


def paged_attention(
    q_TNH, k_TKH, v_TKH, pages, rows, *, scale, window, soft_cap, sinks_N, value_dim, interpret: Any = None
):
    """See `quire.ops.attention.paged_attention`. With `interpret` it runs in Pallas' interpreter, on a CPU."""
    if interpret is None and not has_gpu():
        raise NotImplementedError("there is no NVIDIA GPU of compute capability 9.0 or more")
    _, N, H = q_TNH.shape
    _, S, K, _ = pages.k_PSKH.shape
    held = pages.k_PSKH.dtype
    if q_TNH.dtype not in (jnp.bfloat16, jnp.float16) or held != q_TNH.dtype:
        raise NotImplementedError(f"queries and pages must both be bfloat16 or float16, not {q_TNH.dtype} and {held}")
    if value_dim is not None or H not in WIDTHS:
        raise NotImplementedError(f"keys and values must be of a width of {WIDTHS}, not {value_dim or H}")
    if S not in PAGES or N // K > ROWS:
        raise NotImplementedError(f"pages must have {PAGES} positions and KV heads at most {ROWS} query heads")
    from ..gpu.paged import attend  # only now: it brings a compiler with it

    if k_TKH is not None:
        pages = append(pages, k_TKH, v_TKH, rows.slots_T)
    processors = num_processors() if interpret is None else 3
    out_TNH = attend(
        q_TNH, pages, rows, sinks_N, window=window, scale=float(scale), soft_cap=soft_cap,
        processors=processors, interpret=interpret,
    )  # fmt: skip
    return out_TNH, pages


@functools.cache
def has_gpu() -> bool:
    device = jax.devices()[0]
    return device.platform == "gpu" and float(device.compute_capability) >= 9.0


def num_processors() -> int:
    return jax.devices()[0].core_count
