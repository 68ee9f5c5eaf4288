"""Sum and norm by one kernel on NVIDIA GPUs, which is in `quire.ops.residual.mosaic_kernel`.

It serves the kinds of rows in which it passed its trial on this card. A row's bits are the same in any batch: each row
is computed by itself, and its squares are added in one order.
"""

from pathlib import Path
from typing import Any

from ..attention import mosaic, mosaic_gpu
from ..kernel_trial import TriedKernel, require_pass
from ..norm import LayerNorm
from . import Residual
from .shape import LINE, MOST

SOURCES = *Path(__file__).parent.glob("*.py"), Path(mosaic.__file__).parent / "tile.py"
KERNEL = TriedKernel(f"{__package__}.trial", "sum and norm", SOURCES)


def add_and_norm(rows: Residual, scale_D, eps: float, rounds: str | None = None, *, interpret: Any = None):
    """See `quire.ops.residual.add_and_norm`. With `interpret` it runs in Pallas' interpreter, on a CPU."""
    if interpret is None and (declined := mosaic_gpu.card_declines()):
        raise NotImplementedError(declined)
    if reasons := refusals(rows, scale_D):
        raise NotImplementedError(", and ".join(reasons))
    if interpret is None:
        require_pass(KERNEL, kind(rows, rounds))
    from .mosaic_kernel import sum_and_norm  # only now: it imports a compiler

    return sum_and_norm(rows, scale_D, eps, rounds, interpret)


def refusals(rows: Residual, scale_D) -> list[str]:
    """All reasons for which the kernel cannot serve a case."""
    if scale_D is None:
        return ["there must be a norm of the sum"]
    if isinstance(scale_D, LayerNorm) or isinstance(rows.scale_D, LayerNorm):
        return ["norms must not take the mean off"]
    found, D = [], rows.x_TD.shape[-1]
    dtypes = [str(array.dtype) for array in (rows.x_TD, rows.y_TD) if array is not None]
    if {*dtypes} != {"bfloat16"}:
        found.append(f"rows must be bfloat16, not {' and '.join(dtypes)}")
    if D % LINE or D > LINE * MOST:
        found.append(f"a row must have a multiple of {LINE} numbers, at most {LINE * MOST}, not {D}")
    return found


def kind(rows: Residual, rounds: str | None = None) -> dict:
    """What the kernel is compiled for."""
    adds, normed = rows.y_TD is not None, rows.scale_D is not None
    return {"width": rows.x_TD.shape[-1], "adds": adds, "normed": normed, "rounds": rounds}


def varies() -> None:
    """A row's bits are the same in any company."""
