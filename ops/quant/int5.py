"""INT5: 5-bit integers with a float16 scale for every 32 inputs of an output, for GGUF's Q5_0.

With the option `least`, a float16 minimum is subtracted, for Q5_1; see `grouped.py`.
"""

from typing import Any

import jax.numpy as jnp

from ...sharding.spec import ArraySpec
from .compressed import FormatError, Scheme
from .grouped import kernel
from .grouped import spec as grouped

GROUP = 32

CHOICES = None
HEAD = None
SPLITS = True
STORED: dict[str, Scheme] = {}
METHOD = None
MULTIPLE = 1


def kernels(*options: str) -> tuple[str, ...]:
    return (kernel("uint5", jnp.float16),)


def spec(dense: ArraySpec, *options: str) -> Any:
    if options not in {("32",), ("32", "least")}:
        raise FormatError(
            f"int5 has no options {'-'.join(options)!r}; they can be 32, and after it least"
        )
    least = "least" in options
    code = "uint5" if least else "int5"
    return grouped(dense, code, GROUP, least=least, scale_dtype=jnp.float16)
