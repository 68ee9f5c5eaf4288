"""NF4 of bitsandbytes: a codebook of 16 quantiles of the normal distribution, and a scale for every
64 inputs of an output.
"""

from .compressed import Scheme
from .grouped import by_table

GROUP = 64

CHOICES = "nf4"
HEAD = "int8-weights"
SPLITS = False
STORED: dict[str, Scheme] = {}
METHOD = None
MULTIPLE = 1

kernels, spec = by_table("nf4", "nf4", GROUP)
