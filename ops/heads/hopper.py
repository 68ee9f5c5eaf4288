"""Norm, rotation and appending of heads by one kernel for Hopper GPUs,
`quire.ops.heads.hopper_kernel`.

The kernel is used for the kinds of heads for which it passed its self-test on this GPU. It is
batch-invariant: every token is computed separately.
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
MAX_HEADS = 256  # heads of a token, which one copy loads
COPY_ALIGNMENT = 128  # bytes: copies start at multiples of it in shared memory
SHARED_SOURCES = (Path(hopper_kernel.__file__).parent / f"{name}.py" for name in ("paged", "task"))
KERNEL = SelfTestedKernel(
    f"{__package__}.accuracy",
    "heads",
    (*Path(__file__).parent.glob("*.py"), *SHARED_SOURCES, TILE_SOURCE),
)


def prepare(qkv_TGH, heads: Heads, pages: KVPages, rows, *, interpret: Any = None):
    """See `quire.ops.heads.prepare`. With `interpret` the kernel runs in Pallas' interpreter."""
    if interpret is None and (declined := device.no_hopper_reason()):
        raise NotImplementedError(declined)
    if reasons := unsupported_reasons(qkv_TGH, heads, pages):
        raise NotImplementedError(", and ".join(reasons))
    if interpret is None:
        require_pass(KERNEL, kind(qkv_TGH, heads, pages))
    from .hopper_kernel import rotate_and_append  # imported late, since it imports a compiler

    q_TNH, pages = rotate_and_append(qkv_TGH, heads, pages, rows, interpret)
    return q_TNH, None, None, pages


def unsupported_reasons(qkv_TGH, heads: Heads, pages: KVPages) -> list[str]:
    """All reasons why the kernel does not support a case."""
    N = heads.queries
    K = heads.keys
    H = qkv_TGH.shape[2]
    k_pages = pages.k_PSKH
    dtype = qkv_TGH.dtype
    has_scales = pages.k_scale_PKS is not None
    num_pairs = 0 if heads.cos_sin is None else heads.cos_sin[0].shape[1]
    reasons = []
    if k_pages is None or pages.v_PSKH is None:
        reasons.append("keys and values must lie in arrays of their own")
    elif is_packed(k_pages):
        reasons.append("pages are int4, whose codes the kernel does not write")
    elif k_pages.dtype != dtype and not (
        has_scales and k_pages.dtype in (jnp.int8, jnp.float8_e4m3fn)
    ):
        reasons.append(f"pages must hold {dtype}, int8 or float8_e4m3fn, not {k_pages.dtype}")
    elif any(first * H * k_pages.dtype.itemsize % COPY_ALIGNMENT for first in (N, N + K)):
        reasons.append(
            f"{N} and {N + K} heads in the pages' dtype must be a multiple of "
            f"{COPY_ALIGNMENT} bytes"
        )
    if dtype not in (jnp.bfloat16, jnp.float16):
        reasons.append(f"heads must be bfloat16 or float16, not {dtype}")
    if not K or heads.tied or heads.v_norm:
        reasons.append("the layer must have keys and values of its own, and values without a norm")
    if heads.shifts(pages):
        reasons.append("keys are shifted before they become codes, which the kernel does not do")
    if heads.norm not in (None, "head"):
        reasons.append("a norm must be over each head, with a scale, and before the rotation")
    if H not in WIDTHS or num_pairs % 8:
        reasons.append(
            f"heads must be of a width of {WIDTHS} with a multiple of 8 pairs rotated, not {H} "
            f"with {num_pairs}"
        )
    if N + 2 * K > MAX_HEADS:
        reasons.append(f"a row must have at most {MAX_HEADS} heads, not {N + 2 * K}")
    return reasons


def kind(qkv_TGH, heads: Heads, pages: KVPages) -> dict:
    """The key of the case's self-test: all that the kernel is specialised for."""
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
    """Batch-invariant; see `quire.ops.implementations`."""
