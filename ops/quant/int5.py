"""INT5: 5-bit integers with a float16 scale for every 32 inputs of an output, for GGUF's Q5_0 and
Q5_1; see `grouped.py`.
"""

import jax.numpy as jnp

from .compressed import Scheme
from .grouped import by_count

CHOICES = None
HEAD = None
SPLITS = True
STORED: dict[str, Scheme] = {}
METHOD = None
MULTIPLE = 1

kernels, spec = by_count("int5", 5, groups=("32",), scale_dtype=jnp.float16)
