"""Sum and norm by one kernel on NVIDIA GPUs, which is in `quire.ops.residual.hopper_kernel`.

It serves the kinds of rows in which it passed its trial on this card. A row's bits are the same in
any batch: each row is computed by itself, and its squares are added in one order.
"""

from pathlib import Path
from typing import Any

from ..gpu import TILE_SOURCE, device
from ..gpu.self_test import SelfTestedKernel, require_pass
from ..norm import LayerNorm, scale_and_bias
from . import Residual
from .shape import LINE, MEMORY, MOST, padded

SOURCES = *Path(__file__).parent.glob("*.py"), TILE_SOURCE
KERNEL = SelfTestedKernel(f"{__package__}.accuracy", "sum and norm", SOURCES)


def add_and_norm(
    rows: Residual, scale_D, eps: float, rounds: str | None = None, *, interpret: Any = None
):
    """See `quire.ops.residual.add_and_norm`.

    With `interpret` it runs in Pallas' interpreter, on a CPU.
    """
    if interpret is None and (declined := device.no_hopper_reason()):
        raise NotImplementedError(declined)
    if reasons := refusals(rows, scale_D, rounds):
        raise NotImplementedError(", and ".join(reasons))
    if interpret is None:
        require_pass(KERNEL, kind(rows, scale_D, rounds))
    from .hopper_kernel import sum_and_norm  # only now: it imports a compiler

    return sum_and_norm(rows, scale_D, eps, rounds, interpret)


def refusals(rows: Residual, scale_D, rounds: str | None = None) -> list[str]:
    """All reasons for which the kernel cannot serve a case."""
    found = []
    D = rows.x_TD.shape[-1]
    dtypes = {str(array.dtype) for array in (rows.x_TD, rows.y_TD) if array is not None}
    if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float32"}:
        found.append(
            f"rows must all be bfloat16 or all float32, not {' and '.join(sorted(dtypes))}"
        )
    elif rounds is not None and dtypes != {"bfloat16"}:
        found.append("rows whose norm is rounded to codes must be bfloat16")
    if D % LINE or D > LINE * MOST:
        found.append(
            f"a row must have a multiple of {LINE} numbers, at most {LINE * MOST}, not {D}"
        )
    elif (size := memory(rows, scale_D)) > MEMORY:
        found.append(
            f"a row and the weights of its norms must fit into {MEMORY} bytes, and have {size}"
        )
    return found


def memory(rows: Residual, scale_D) -> int:
    """Bytes of shared memory."""
    arrays = [array for array in (rows.x_TD, rows.y_TD) if array is not None]
    weights = [
        array
        for norm in (scale_D, rows.scale_D)
        for array in scale_and_bias(norm)
        if array is not None
    ]
    each = sum(array.dtype.itemsize for array in arrays) + 4 * len(weights)
    return padded(rows.x_TD.shape[-1] // LINE) * LINE * each


def kind(rows: Residual, scale_D, rounds: str | None = None) -> dict:
    """What the kernel is compiled for."""
    found = {
        "width": rows.x_TD.shape[-1],
        "dtype": str(rows.x_TD.dtype),
        "adds": rows.y_TD is not None,
    }
    return found | {"rounds": rounds, "norm": name_of(scale_D), "added_norm": name_of(rows.scale_D)}


def name_of(weights) -> str | None:
    """How a norm is called in a kind."""
    if not isinstance(weights, LayerNorm):
        return None if weights is None else "scale"
    return "centred" if weights.bias_D is None else "centred, bias"


def varies() -> None:
    """A row's bits are the same in any company."""
