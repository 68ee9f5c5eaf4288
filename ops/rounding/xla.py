"""Rounding of rows by XLA."""

from ..quant.fp8 import as_floats
from ..quant.int8 import as_bytes


def round_rows(x_RK, codes: str):
    """See `quire.ops.rounding.round_rows`."""
    codes_RK, scale_R1 = (as_bytes if codes == "int8" else as_floats)(x_RK)
    return codes_RK.astype(x_RK.dtype), scale_R1[:, 0]


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""
