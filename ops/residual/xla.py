"""Sum and norm by XLA."""

from ..norm import norm
from . import Residual


def add_and_norm(rows: Residual, scale_D, eps: float, rounds: str | None = None):
    """See `quire.ops.residual.add_and_norm`. The products round their inputs themselves."""
    sum_TD = rows.x_TD if rows.y_TD is None else rows.x_TD + norm(rows.y_TD, rows.scale_D, eps)
    return sum_TD, norm(sum_TD, scale_D, eps)


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""
