"""The name that users know a GGUF file's format by: llama.cpp's name for its mixture of types, such
as Q4_K_M.
"""

import math
from collections import Counter
from collections.abc import Mapping

from .metadata import Metadata
from .tensor import BlockTensor

FILE_TYPES = {  # by general.file_type
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
}


def file_format(meta: Metadata, tensors: Mapping[str, BlockTensor]) -> str:
    """The name of general.file_type; if missing or unknown, the type of most elements."""
    number = meta.count("general.file_type", None, minimum=0)
    if number in FILE_TYPES:
        return FILE_TYPES[number]
    elements: Counter[str] = Counter()
    for tensor in tensors.values():
        elements[tensor.kind.name] += math.prod(tensor.shape)
    return elements.most_common(1)[0][0]
