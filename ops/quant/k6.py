"""K6: 6-bit integers with scales in two levels, for GGUF's Q5_K and Q6_K; see `grouped.py`."""

from .compressed import Scheme
from .grouped import by_count

CHOICES = None
HEAD = None
SPLITS = True
STORED: dict[str, Scheme] = {}
METHOD = None
MULTIPLE = 1

kernels, spec = by_count("k6", 6)
