"""The kernel serves the kinds of products in which it passed its trial on this card."""

from dataclasses import replace
from pathlib import Path

from .. import activation
from ..attention import mosaic
from ..kernel_trial import TRITON, TriedKernel, require_pass
from .shape import ProductShape

SOURCES = *Path(__file__).parent.glob("*.py"), Path(mosaic.__file__).parent / "tile.py", Path(activation.__file__)
KERNEL = TriedKernel(f"{__package__}.trial", "a product with weights", SOURCES)
TRITON_KERNEL = replace(KERNEL, compiler=TRITON)


def require_trial(shape: ProductShape) -> None:
    """Declines a kind of product that the kernel has not been seen to get right."""
    kind = {
        "grouped": shape.experts > 1, "parts": shape.parts, "turned": shape.turned, "activation": shape.activation,
        "clamp": shape.clamp, "alpha": shape.alpha, "bias": shape.bias, "weighed": shape.weighed,
        "out_dtype": shape.out_dtype, "codes": shape.codes, "group": shape.group, "zeros": shape.zeros,
        "rounded": shape.rounded, "summands": shape.summands, "kernel": shape.kernel,
    }  # fmt: skip
    require_pass(TRITON_KERNEL if shape.kernel == "triton" else KERNEL, kind)
