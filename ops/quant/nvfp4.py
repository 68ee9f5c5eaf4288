"""NVFP4: floats of four bits (E2M1); 16 inputs of an output share a scale."""

from typing import Any

from ...sharding.spec import ArraySpec
from .compressed import FormatError, Scheme
from .grouped import CODES
from .grouped import spec as grouped

GROUP = 16

CHOICES = "nvfp4"
HEAD = "int8"
SPLITS = False
STORED: dict[str, Scheme] = {}
METHOD, MULTIPLE = None, 1


def kernels(*options: str) -> tuple[str, ...]:
    return (CODES["float4"].kernel,)


def spec(dense: ArraySpec, *options: str) -> Any:
    """The specs of an array kept so."""
    if options:
        raise FormatError(f"nvfp4 has no option {'-'.join(options)!r}")
    return grouped(dense, "float4", GROUP)
