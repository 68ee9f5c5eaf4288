"""NVFP4: 4-bit floats (E2M1) with a scale for every 16 inputs of an output."""

from .compressed import Scheme
from .grouped import by_table

GROUP = 16

CHOICES = "nvfp4"
HEAD = "int8-weights"
SPLITS = False
STORED: dict[str, Scheme] = {}
METHOD = None
MULTIPLE = 1

kernels, spec = by_table("nvfp4", "float4", GROUP)
