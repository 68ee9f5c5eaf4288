"""Paged attention on NVIDIA GPUs (Hopper and later). The kernel is in `quire.ops.attention.mosaic`.

A row's bits are the same in any batch and any chunk: blocks and spans lie at fixed positions of its sequence.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .mosaic.task import ROWS
from .xla import append

WIDTHS = 64, 128, 256
LATENT = (576, 512), (320, 256)  # widths of keys and values
PAGES = 16, 32, 64, 128


def paged_attention(
    q_TNH, k_TKH, v_TKH, pages, rows, *, scale, window, soft_cap, sinks_N, value_dim,
    interpret: Any = None,
):  # fmt: skip
    """See `quire.ops.attention.paged_attention`. With `interpret` it runs in Pallas' interpreter, on a CPU."""
    require(q_TNH, pages, value_dim, interpret)
    from .mosaic.paged import attend  # only now: it imports a compiler

    if k_TKH is not None:
        pages = append(pages, k_TKH, v_TKH, rows.slots_T)
    processors = num_processors() if interpret is None else 3
    out_TNH = attend(
        q_TNH, pages, rows, sinks_N, window=window, scale=float(scale), soft_cap=soft_cap, values=value_dim,
        processors=processors, interpret=interpret,
    )  # fmt: skip
    return out_TNH, pages


def require(q_TNH, pages, value_dim, interpret: Any = None) -> None:
    """Declines what the kernel cannot serve."""
    if interpret is None and not has_gpu():
        raise NotImplementedError("there is no NVIDIA GPU of compute capability 9.0 or more")
    if pages.kv_PSYH is not None:
        raise NotImplementedError("keys and values must lie in arrays of their own")
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
def has_gpu() -> bool:
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return False
    generation = str(device.compute_capability).partition(".")[0]
    return generation.isdigit() and int(generation) >= 9  # those of other makers have names


def num_processors() -> int:
    return jax.local_devices()[0].core_count
