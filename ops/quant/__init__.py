"""Weight formats: a node of packed arrays in place of one array. `node[e]` gives one matrix of a stack, dense."""

import importlib
from typing import Any

from ...sharding.spec import ArraySpec

FORMATS = {"mxfp4": ".mxfp4"}


def packed(name: str | None, dense: ArraySpec) -> Any:
    """The specs of an array kept in a format; without one, of the array itself."""
    return dense if name is None else importlib.import_module(FORMATS[name], __name__).spec(dense)
