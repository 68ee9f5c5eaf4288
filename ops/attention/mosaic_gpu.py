"""Paged attention on NVIDIA GPUs of the Hopper generation. The kernel is in `quire.ops.attention.mosaic`.

A row's bits are the same in any batch and any chunk: blocks and spans lie at fixed positions of its sequence.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .four_bits import packed
from .mosaic.task import ROWS
from .xla import append

AMPERE = 8  # its compute capability
WIDTHS = 64, 128, 256
LATENT = (576, 512), (320, 256)  # widths of keys and values
PAGES = 16, 32, 64, 128


def paged_attention(
    q_TNH, k_TKH, v_TKH, pages, rows, *, scale, window, soft_cap, sinks_N, value_dim,
    interpret: Any = None,
):  # fmt: skip
    """See `quire.ops.attention.paged_attention`. With `interpret` it runs in Pallas' interpreter, on a CPU."""
    if interpret is None and (declined := card_declines()):
        raise NotImplementedError(declined)
    require(q_TNH, pages, value_dim)
    from .mosaic.paged import attend  # only now: it imports a compiler

    if k_TKH is not None:
        pages = append(pages, k_TKH, v_TKH, rows.slots_T)
    processors = num_processors() if interpret is None else 3
    out_TNH = attend(
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


@functools.cache
def is_gpu() -> bool:
    return jax.local_devices()[0].platform == "gpu"


@functools.cache
def has_gpu() -> bool:
    """Whether this process's card is one that the kernel is for."""
    return is_gpu() and capability().partition(".")[0] == "9"


def capability() -> str:
    return str(jax.local_devices()[0].compute_capability)  # those of other makers have names


def card_declines() -> str | None:
    """Why this process's card cannot run the kernel; None if it can."""
    if has_gpu():
        return None
    if not is_gpu():
        return "there is no NVIDIA GPU"
    return f"the kernel's instructions are those of compute capability 9.x (Hopper), and this GPU's is {capability()}"


def before_ampere() -> str | None:
    """Why this card is too old for kernels that are compiled for all later generations; None if it is not."""
    major = capability().partition(".")[0]
    if major.isdecimal() and int(major) >= AMPERE:
        return None
    return f"the kernel needs compute capability {AMPERE}.0 (Ampere) or later, and this GPU's is {capability()}"


def num_processors() -> int:
    return jax.local_devices()[0].core_count
