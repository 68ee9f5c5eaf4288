"""K4: codes of four bits with scales in two levels, as of GGUF's Q2_K, Q3_K and Q4_K; see
`grouped.py`.
"""

from .compressed import Scheme
from .grouped import by_count

CHOICES = None
HEAD = None
SPLITS = False
STORED: dict[str, Scheme] = {}
METHOD = None
MULTIPLE = 1

kernels, spec = by_count("k4", 4)
