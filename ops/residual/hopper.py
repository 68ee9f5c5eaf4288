"""Sum and norm by one kernel for Hopper GPUs, `quire.ops.residual.hopper_kernel`.

The kernel is used for the kinds of rows for which it passed its self-test on this GPU. It is
batch-invariant: each row is computed separately, and its squares are added in a fixed order.
"""

from pathlib import Path
from typing import Any

from ..gpu import TILE_SOURCE, device
from ..gpu.self_test import SelfTestedKernel, require_pass
from ..norm import LayerNorm, scale_and_bias
from . import Residual
from .shape import LINE, MAX_LINES, MAX_SMEM_BYTES, padded

SOURCES = *Path(__file__).parent.glob("*.py"), TILE_SOURCE
KERNEL = SelfTestedKernel(f"{__package__}.accuracy", "sum and norm", SOURCES)


def add_and_norm(
    rows: Residual, scale_D, eps: float, rounds: str | None = None, *, interpret: Any = None
):
    """See `quire.ops.residual.add_and_norm`.

    With `interpret` the kernel runs in Pallas' interpreter.
    """
    if interpret is None and (declined := device.no_hopper_reason()):
        raise NotImplementedError(declined)
    if reasons := unsupported_reasons(rows, scale_D, rounds):
        raise NotImplementedError(", and ".join(reasons))
    if interpret is None:
        require_pass(KERNEL, kind(rows, scale_D, rounds))
    from .hopper_kernel import sum_and_norm  # imported late, since it imports a compiler

    return sum_and_norm(rows, scale_D, eps, rounds, interpret)


def unsupported_reasons(rows: Residual, scale_D, rounds: str | None = None) -> list[str]:
    """All reasons why the kernel does not support a case."""
    reasons = []
    D = rows.x_TD.shape[-1]
    dtypes = {str(array.dtype) for array in (rows.x_TD, rows.y_TD) if array is not None}
    if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float32"}:
        reasons.append(
            f"rows must all be bfloat16 or all float32, not {' and '.join(sorted(dtypes))}"
        )
    elif rounds is not None and dtypes != {"bfloat16"}:
        reasons.append("rows whose norm is rounded to codes must be bfloat16")
    if D % LINE or D > LINE * MAX_LINES:
        reasons.append(
            f"a row must have a multiple of {LINE} numbers, at most {LINE * MAX_LINES}, not {D}"
        )
    elif (size := smem_bytes(rows, scale_D)) > MAX_SMEM_BYTES:
        reasons.append(
            f"a row and the weights of its norms must fit into {MAX_SMEM_BYTES} bytes, and have "
            f"{size}"
        )
    return reasons


def smem_bytes(rows: Residual, scale_D) -> int:
    """Bytes of shared memory."""
    arrays = [array for array in (rows.x_TD, rows.y_TD) if array is not None]
    weights = [
        array
        for norm in (scale_D, rows.scale_D)
        for array in scale_and_bias(norm)
        if array is not None
    ]
    bytes_per_element = sum(array.dtype.itemsize for array in arrays) + 4 * len(weights)
    return padded(rows.x_TD.shape[-1] // LINE) * LINE * bytes_per_element


def kind(rows: Residual, scale_D, rounds: str | None = None) -> dict:
    """The key of the case's self-test: all that the kernel is specialised for."""
    case_kind = {
        "width": rows.x_TD.shape[-1],
        "dtype": str(rows.x_TD.dtype),
        "adds": rows.y_TD is not None,
    }
    return case_kind | {
        "rounds": rounds,
        "norm": norm_kind(scale_D),
        "added_norm": norm_kind(rows.scale_D),
    }


def norm_kind(weights) -> str | None:
    """The name of a norm's type in the key of a self-test."""
    if not isinstance(weights, LayerNorm):
        return None if weights is None else "scale"
    return "centred" if weights.bias_D is None else "centred, bias"


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""
