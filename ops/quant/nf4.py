"""NF4: sixteen quantiles of the normal distribution; 64 inputs of an output share a scale, as of bitsandbytes."""

from typing import Any

from ...sharding.spec import ArraySpec
from .compressed import FormatError, Scheme
from .grouped import CODES
from .grouped import spec as grouped

GROUP = 64

CHOICES = "nf4"
HEAD = "int8"
SPLITS = False
STORED: dict[str, Scheme] = {}
METHOD, MULTIPLE = None, 1


def kernels(*options: str) -> tuple[str, ...]:
    return (CODES["nf4"].kernel,)


def spec(dense: ArraySpec, *options: str) -> Any:
    """The specs of an array kept so."""
    if options:
        raise FormatError(f"nf4 has no option {'-'.join(options)!r}")
    return grouped(dense, "nf4", GROUP)
