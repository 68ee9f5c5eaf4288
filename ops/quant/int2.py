"""INT2: like INT4, with two bits per weight in files and four in memory."""

from functools import partial

from .int4 import schemes, spec_with_bits

CHOICES = "int2 with the options of int4"
HEAD = "int8-weights"
SPLITS = False
METHOD = None
MULTIPLE = 1
STORED = schemes(2)

spec = partial(spec_with_bits, 2)


def kernels(*options: str) -> tuple[str, ...]:
    return ("int4",)
