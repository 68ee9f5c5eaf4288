"""K4: 4-bit integers with scales in two levels, for GGUF's Q2_K to Q4_K; see `grouped.py`."""

from .compressed import Scheme
from .grouped import by_count

CHOICES = None
HEAD = None
SPLITS = False
STORED: dict[str, Scheme] = {}
METHOD = None
MULTIPLE = 1

kernels, spec = by_count("k4", 4)
