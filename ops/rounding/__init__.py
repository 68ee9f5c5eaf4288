"""Dynamic quantisation of activations to int8 or float8, with a scale per row, for products with
quantised weights on GPUs.
"""

from ..implementations import choose

# Tried in order; one that does not support a case raises NotImplementedError with its reasons.
IMPLEMENTATIONS = {"mosaic_gpu": ".hopper", "xla": ".xla"}


def round_rows(x_RK, codes: str = "int8", implementation: str | None = None):
    """Round each row to `codes` ("int8" or "float8"), scaled so that its largest magnitude is 127
    or 448.

    Returns:
        (quantised values in x's dtype, float32 scales of the rows). A row that is not finite has a
        scale of NaN.
    """
    return choose(
        IMPLEMENTATIONS, __name__, lambda module: module.round_rows(x_RK, codes), implementation
    )
