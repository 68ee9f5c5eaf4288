"""IQ4: sixteen numbers with steps that grow; 32 inputs of an output share a scale.

As of GGUF's IQ4_NL; and of IQ4_XS, whose scales have two levels.
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
