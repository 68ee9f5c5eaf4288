"""The kernels that a model will call, so that a start has them built ahead."""

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


def of_model(
    dtype: str,
    weights: str | None,
    pages: Collection[str],
    experts: tuple[str | None, ...] = (),
    stored: tuple[str | None, ...] = (),
    rounds: bool = False,
) -> tuple[str, ...]:
    """What a model calls whose weights are in a format, or of type `dtype`.

    `pages` are the dtypes of page arrays, `experts` a checkpoint's own formats of those, and
    `stored` of its matrices, beside which the head stays dense. `rounds`: rows become bytes where a
    kernel can do that. After one that is small come products, since the weights wait for them. A
    kernel that is not foreseen here is built when it is called.
    """
    if stored:
        products = {DENSE[dtype], *(name for own in stored for name in quant.kernels(own))}
    else:
        products = (
            {*quant.kernels(weights), *quant.kernels(quant.head(weights))}
            if weights
            else {DENSE[dtype]}
        )
    # what they are kept in, where it is the checkpoint's own; the way to them is found in float32
    if experts:
        products |= {DENSE["float32"], *(name for own in experts for name in quant.kernels(own))}
    floats = FLOAT_ROWS if dtype == "float32" else {}
    products = {
        ROUNDING[name] if rounds and name in ROUNDING else floats.get(name, name)
        for name in products
    }
    attention = {ATTENTION[held, dtype] for held in pages if (held, dtype) in ATTENTION}
    return (BLANK, *sorted(products), "pack", *sorted(attention), UNPACK, HEADS, RESIDUAL, SAMPLING)
