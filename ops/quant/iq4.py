"""IQ4, as of GGUF's IQ4_NL and IQ4_XS: sixteen numbers with steps that grow; 32 inputs of an output share a scale."""

from .compressed import Scheme
from .grouped import by_table

GROUP = 32

CHOICES = None
HEAD = None
SPLITS = False
STORED: dict[str, Scheme] = {}
METHOD, MULTIPLE = None, 1

kernels, spec = by_table("iq4", "iq4", GROUP)
