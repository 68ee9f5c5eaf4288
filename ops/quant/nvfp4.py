"""NVFP4: floats of four bits (E2M1); 16 inputs of an output share a scale."""

from .compressed import Scheme
from .grouped import by_table

GROUP = 16

CHOICES = "nvfp4"
HEAD = "int8"
SPLITS = False
STORED: dict[str, Scheme] = {}
METHOD = None
MULTIPLE = 1

kernels, spec = by_table("nvfp4", "float4", GROUP)
