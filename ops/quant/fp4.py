"""FP4, as of bitsandbytes: floats of four bits, twelfths of the largest; 64 inputs of an output
share a scale.
"""

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
