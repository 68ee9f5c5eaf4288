"""IQ4, as of GGUF's IQ4_NL and IQ4_XS: sixteen numbers with steps that grow; 32 inputs of an output share a scale."""

from typing import Any

from ...sharding.spec import ArraySpec
from .compressed import FormatError, Scheme
from .grouped import CODES
from .grouped import spec as grouped

GROUP = 32

CHOICES = None
HEAD = None
SPLITS = False
STORED: dict[str, Scheme] = {}
METHOD, MULTIPLE = None, 1


def kernels(*options: str) -> tuple[str, ...]:
    return (CODES["iq4"].kernel,)


def spec(dense: ArraySpec, *options: str) -> Any:
    """The specs of an array kept so."""
    if options:
        raise FormatError(f"iq4 has no option {'-'.join(options)!r}")
    return grouped(dense, "iq4", GROUP)
