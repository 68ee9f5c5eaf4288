"""FP4 of bitsandbytes: 4-bit floats with a scale for every 64 inputs of an output."""

from .compressed import Scheme
from .grouped import by_table

GROUP = 64

CHOICES = None
HEAD = None
SPLITS = False
STORED: dict[str, Scheme] = {}
METHOD = None
MULTIPLE = 1

kernels, spec = by_table("fp4", "fp4", GROUP)
