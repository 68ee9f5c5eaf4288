"""Heads normalised, rotated and appended by one kernel on NVIDIA GPUs, which is in
`quire.ops.heads.hopper_kernel`.

It serves the kinds of heads in which it passed its trial on this card. A row's bits are the same in
any batch: each row is computed by itself.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from ..attention import KVPages, hopper_kernel
from ..attention.four_bits import is_packed
from ..gpu import TILE_SOURCE, device
from ..gpu.self_test import SelfTestedKernel, require_pass
from . import Heads

WIDTHS = 64, 128, 256
MOST = 256  # heads of a row: one copy brings them
ALIGNED = 128  # bytes in shared memory at a multiple of which a copy begins
USED = (Path(hopper_kernel.__file__).parent / f"{name}.py" for name in ("paged", "task"))
KERNEL = SelfTestedKernel(
    f"{__package__}.accuracy", "heads", (*Path(__file__).parent.glob("*.py"), *USED, TILE_SOURCE)
)


def prepare(qkv_TGH, heads: Heads, pages: KVPages, rows, *, interpret: Any = None):
    """See `quire.ops.heads.prepare`. With `interpret` it runs in Pallas' interpreter, on a CPU."""
    if interpret is None and (declined := device.no_hopper_reason()):
        raise NotImplementedError(declined)
    if reasons := refusals(qkv_TGH, heads, pages):
        raise NotImplementedError(", and ".join(reasons))
    if interpret is None:
        require_pass(KERNEL, kind(qkv_TGH, heads, pages))
    from .hopper_kernel import turn_and_append  # only now: it imports a compiler

    q_TNH, pages = turn_and_append(qkv_TGH, heads, pages, rows, interpret)
    return q_TNH, None, None, pages


def refusals(qkv_TGH, heads: Heads, pages: KVPages) -> list[str]:
    """All reasons for which the kernel cannot serve a case."""
    N = heads.queries
    K = heads.keys
    H = qkv_TGH.shape[2]
    held = pages.k_PSKH
    dtype = qkv_TGH.dtype
    scaled = pages.k_scale_PKS is not None
    rotated = 0 if heads.cos_sin is None else heads.cos_sin[0].shape[1]
    found = []
    if held is None or pages.v_PSKH is None:
        found.append("keys and values must lie in arrays of their own")
    elif is_packed(held):
        found.append("pages are int4, whose codes the kernel does not write")
    elif held.dtype != dtype and not (scaled and held.dtype in (jnp.int8, jnp.float8_e4m3fn)):
        found.append(f"pages must hold {dtype}, int8 or float8_e4m3fn, not {held.dtype}")
    elif any(first * H * held.dtype.itemsize % ALIGNED for first in (N, N + K)):
        found.append(
            f"{N} and {N + K} heads in the pages' dtype must be a multiple of {ALIGNED} bytes"
        )
    if dtype not in (jnp.bfloat16, jnp.float16):
        found.append(f"heads must be bfloat16 or float16, not {dtype}")
    if not K or heads.tied or heads.v_norm:
        found.append("the layer must have keys and values of its own, and values without a norm")
    if heads.shifts(pages):
        found.append("keys are shifted before they become codes, which the kernel does not do")
    if heads.norm not in (None, "head"):
        found.append("a norm must be over each head, with a scale, and before the rotation")
    if H not in WIDTHS or rotated % 8:
        found.append(
            f"heads must be of a width of {WIDTHS} with a multiple of 8 pairs rotated, not {H} "
            f"with {rotated}"
        )
    if N + 2 * K > MOST:
        found.append(f"a row must have at most {MOST} heads, not {N + 2 * K}")
    return found


def kind(qkv_TGH, heads: Heads, pages: KVPages) -> dict:
    """What the kernel is compiled for."""
    page = pages.k_PSKH
    return {
        "queries": heads.queries,
        "keys": heads.keys,
        "width": qkv_TGH.shape[2],
        "pairs": 0 if heads.cos_sin is None else heads.cos_sin[0].shape[1],
        "norm": heads.norm is not None,
        "page": page.shape[1],
        "codes": None if pages.k_scale_PKS is None else page.dtype.name,
        "dtype": qkv_TGH.dtype.name,
    }


def varies() -> None:
    """A row's bits are the same in any company."""
