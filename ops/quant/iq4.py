"""IQ4: a codebook of 16 values with increasing steps, and a scale for every 32 inputs of an output.

It is GGUF's IQ4_NL and, with scales in two levels, IQ4_XS.
"""

from .compressed import Scheme
from .grouped import by_table

GROUP = 32

CHOICES = None
HEAD = None
SPLITS = False
STORED: dict[str, Scheme] = {}
METHOD = None
MULTIPLE = 1

kernels, spec = by_table("iq4", "iq4", GROUP, leveled=True)
