"""Rounding of rows by one kernel on NVIDIA GPUs, which is in `quire.ops.rounding.hopper_kernel`.

It serves the widths of rows in which it passed its trial on this card. A row's bits are the same in
any batch: each row is computed by itself.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from .. import residual
from ..gpu import TILE_SOURCE, device
from ..gpu.self_test import SelfTestedKernel, require_pass
from ..residual.shape import LINE, MOST

USED = TILE_SOURCE, *Path(residual.__file__).parent.glob("*.py")
KERNEL = SelfTestedKernel(
    f"{__package__}.accuracy", "rounding of rows", (*Path(__file__).parent.glob("*.py"), *USED)
)


def round_rows(x_RK, codes: str, *, interpret: Any = None):
    """See `quire.ops.rounding.round_rows`.

    With `interpret` it runs in Pallas' interpreter, on a CPU.
    """
    if interpret is None and (declined := device.no_hopper_reason()):
        raise NotImplementedError(declined)
    K = x_RK.shape[1]
    reasons = []
    if x_RK.dtype != jnp.bfloat16:
        reasons.append(f"rows must be bfloat16, not {x_RK.dtype}")
    if K % LINE or K > LINE * MOST:
        reasons.append(
            f"a row must have a multiple of {LINE} numbers, at most {LINE * MOST}, not {K}"
        )
    if reasons:
        raise NotImplementedError(", and ".join(reasons))
    if interpret is None:
        require_pass(KERNEL, {"width": K, "codes": codes})
    from .hopper_kernel import code_rows  # only now: it imports a compiler

    return code_rows(x_RK, codes, interpret)


def varies() -> None:
    """A row's bits are the same in any company."""
