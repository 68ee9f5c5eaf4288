"""Rounding of rows by one kernel for Hopper GPUs, `quire.ops.rounding.hopper_kernel`.

The kernel is used for the widths of rows for which it passed its self-test on this GPU. It is
batch-invariant: each row is computed separately.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from .. import residual
from ..gpu import TILE_SOURCE, device
from ..gpu.self_test import SelfTestedKernel, require_pass
from ..residual.shape import LINE, MAX_LINES

USED = TILE_SOURCE, *Path(residual.__file__).parent.glob("*.py")
KERNEL = SelfTestedKernel(
    f"{__package__}.accuracy", "rounding of rows", (*Path(__file__).parent.glob("*.py"), *USED)
)


def round_rows(x_RK, codes: str, *, interpret: Any = None):
    """See `quire.ops.rounding.round_rows`.

    With `interpret` the kernel runs in Pallas' interpreter.
    """
    if interpret is None and (declined := device.no_hopper_reason()):
        raise NotImplementedError(declined)
    K = x_RK.shape[1]
    reasons = []
    if x_RK.dtype != jnp.bfloat16:
        reasons.append(f"rows must be bfloat16, not {x_RK.dtype}")
    if K % LINE or K > LINE * MAX_LINES:
        reasons.append(
            f"a row must have a multiple of {LINE} numbers, at most {LINE * MAX_LINES}, not {K}"
        )
    if reasons:
        raise NotImplementedError(", and ".join(reasons))
    if interpret is None:
        require_pass(KERNEL, {"width": K, "codes": codes})
    from .hopper_kernel import code_rows  # imported late, since it imports a compiler

    return code_rows(x_RK, codes, interpret)


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""
