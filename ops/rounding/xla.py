"""Rounding of rows by XLA."""

from ..quant.fp8 import round_to_float8
from ..quant.int8 import round_to_int8


def round_rows(x_RK, codes: str):
    """See `quire.ops.rounding.round_rows`."""
    codes_RK, scale_R1 = (round_to_int8 if codes == "int8" else round_to_float8)(x_RK)
    return codes_RK.astype(x_RK.dtype), scale_R1[:, 0]


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""
