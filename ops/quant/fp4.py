"""FP4, as of bitsandbytes: floats of four bits, twelfths of the largest; 64 inputs of an output share a scale."""

from typing import Any

from ...sharding.spec import ArraySpec
from .compressed import FormatError, Scheme
from .grouped import CODES
from .grouped import spec as grouped

GROUP = 64

CHOICES = None
HEAD = None
SPLITS = False
STORED: dict[str, Scheme] = {}
METHOD, MULTIPLE = None, 1


def kernels(*options: str) -> tuple[str, ...]:
    return (CODES["fp4"].kernel,)


def spec(dense: ArraySpec, *options: str) -> Any:
    """The specs of an array kept so."""
    if options:
        raise FormatError(f"fp4 has no option {'-'.join(options)!r}")
    return grouped(dense, "fp4", GROUP)
