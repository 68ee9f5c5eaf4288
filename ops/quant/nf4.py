"""NF4: sixteen quantiles of the normal distribution; 64 inputs of an output share a scale, as of
bitsandbytes.
"""

from .compressed import Scheme
from .grouped import by_table

GROUP = 64

CHOICES = "nf4"
HEAD = "int8"
SPLITS = False
STORED: dict[str, Scheme] = {}
METHOD = None
MULTIPLE = 1

kernels, spec = by_table("nf4", "nf4", GROUP)
