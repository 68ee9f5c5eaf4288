"""The native CPU kernels that a model will call, so that they can be built at its start."""

from collections.abc import Collection

from . import quant
from .native.kernel_names import (
    ATTENTION,
    BLANK,
    DENSE,
    FLOAT_ROWS,
    HEADS,
    RESIDUAL,
    ROUNDING,
    SAMPLING,
    UNPACK,
)


def kernels_for_model(
    dtype: str,
    quantised_format: str | None,
    page_dtypes: Collection[str],
    expert_formats: tuple[str | None, ...] = (),
    stored_formats: tuple[str | None, ...] = (),
    rounds_activations: bool = False,
) -> tuple[str, ...]:
    """Names of the native kernels that a model calls, in the order in which to build them.

    The small `BLANK` kernel is first, then the linear kernels, which loading weights waits for and
    which take the longest to compile. A kernel that is missing here is built when it is first
    called.

    Args:
        dtype: the model's dtype.
        quantised_format: the format that weights are quantised to; None if they stay in `dtype`.
        page_dtypes: the dtypes of the KV pages.
        expert_formats: the checkpoint's own formats of its experts.
        stored_formats: the checkpoint's own formats of its matrices, if it is quantised; its
            output head is dense.
        rounds_activations: whether activations are rounded to int8 where a kernel supports it.
    """
    if stored_formats:
        linear_kernels = {
            DENSE[dtype],
            *(name for weight_format in stored_formats for name in quant.kernels(weight_format)),
        }
    else:
        linear_kernels = (
            {*quant.kernels(quantised_format), *quant.kernels(quant.head_format(quantised_format))}
            if quantised_format
            else {DENSE[dtype]}
        )
    # experts in the checkpoint's own format, and their router, which computes in float32
    if expert_formats:
        linear_kernels |= {
            DENSE["float32"],
            *(name for weight_format in expert_formats for name in quant.kernels(weight_format)),
        }
    float_row_kernels = FLOAT_ROWS if dtype == "float32" else {}
    linear_kernels = {
        ROUNDING[name]
        if rounds_activations and name in ROUNDING
        else float_row_kernels.get(name, name)
        for name in linear_kernels
    }
    attention_kernels = {
        ATTENTION[page_dtype, dtype]
        for page_dtype in page_dtypes
        if (page_dtype, dtype) in ATTENTION
    }
    return (
        BLANK,
        *sorted(linear_kernels),
        "pack",
        *sorted(attention_kernels),
        UNPACK,
        HEADS,
        RESIDUAL,
        SAMPLING,
    )
