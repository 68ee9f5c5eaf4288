"""Weight formats: a node of packed arrays in place of one array. `node[e]` gives one matrix of a stack."""

import importlib
from typing import Any

from ...sharding.spec import ArraySpec
from .stack import in_front, one_of

FORMATS = {"int8": ".int8", "int4": ".int4", "mxfp4": ".mxfp4"}


def packed(name: str | None, dense: ArraySpec) -> Any:
    """The specs of an array kept in a format (`int8`, `int4-64-zero`); without one, of the array itself."""
    if name is None:
        return dense
    kind, *options = name.split("-")
    return importlib.import_module(FORMATS[kind], __name__).spec(dense, *options)


def stacked(name: str | None, dense: ArraySpec) -> Any:
    """The same of a stack of matrices [E, K, ...], each of them rounded by itself."""
    return dense if name is None else in_front(packed(name, one_of(dense)), dense)


def check(name: str) -> str:
    """The name of a format that weights can be rounded to, or an error that lists them."""
    if name.split("-")[0] not in ("int8", "int4"):
        raise ValueError(
            f"quantization is {name!r}; it can be int8, int8-weights (activations stay as they are), or int4 with a "
            "group of 32, 64 or 128 and perhaps zero points, such as int4-128-zero"
        )
    packed(name, ArraySpec((2, 1), "float32", (None, None), inputs=(0,)))
    return name


def quantize(weight, node) -> Any:
    """A numpy array rounded to the format of a node of specs."""
    return importlib.import_module(type(node).__module__).quantize(weight, node)
