"""AWQ checkpoints as AutoAWQ writes them: four bits in groups, with zeros, packed down the outputs.

qweight  int32 [in, out / 8]
qzeros   int32 [in / group, out / 8]
scales   float16 [in / group, out]
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...stored_format import StoredFormat, StoredGroup
from ..safetensors import Tensor
from .integers import FLOATS, IntegerMatrix, Integers, group_of, groups_of, sides, truth, whole_number
from .keys import HERE, known, patterns
from .matrix import Matrix, check, take

KEYS = {
    "quant_method": ("awq",), "bits": ..., "group_size": ..., "zero_point": (True,), "version": ("gemm", "GEMM"),
    "modules_to_not_convert": ..., "backend": ..., "do_fuse": ..., "fuse_max_seq_len": ..., "modules_to_fuse": ...,
    "exllama_config": ..., "provider": ..., "lm_head": (True, False),
    "method": ("awq",), "format": ("gemm",), "checkpoint_format": ("gemm",), "pack_dtype": ("int32",), "meta": ...,
    "sym": ..., "desc_act": (False,), "dynamic": ({},), "q_group_size": ..., "w_bit": (4,),
}  # fmt: skip
ENDINGS = (".qweight", ".qzeros", ".scales")
PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # where in a word each of eight outputs lies


@dataclass(frozen=True)
class AwqMatrix(IntegerMatrix):
    def unpacked(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, None]:
        codes, zeros, scales = (self.tensors[ending].read() for ending in ENDINGS)
        return outputs(codes), scales, outputs(zeros), None


def outputs(words: np.ndarray) -> np.ndarray:
    """Codes [n, out] of words [n, out / 8]."""
    shifts = (4 * PLACES).astype(np.uint32)
    return (words.view(np.uint32)[:, :, None] >> shifts & np.uint32(15)).astype(np.uint8).reshape(len(words), -1)


def stored_format(config: Mapping[str, Any]) -> StoredFormat:
    said = known(HERE, config, KEYS)
    said = {"bits": said.get("w_bit", 4), "group_size": said.get("q_group_size")} | said
    whole_number(said, "bits", 4)
    truth(said, "zero_point", True)
    form = Integers(4, whole_number(said, "group_size", -1, 16, 32, 64, 128, 256))
    ignore = patterns(f"{HERE}.modules_to_not_convert", said.get("modules_to_not_convert", []))
    return StoredFormat("awq", (group_of(form),), ("lm_head", "embed_tokens", *ignore), parts=True, rounds_head=False)


def gather(tensors: dict[str, Tensor], stored: StoredFormat) -> dict[str, Tensor | Matrix]:
    found: dict[str, Any] = dict(tensors)
    for stem in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        group = stored.group_of(stem) or stored.groups[-1]
        found[f"{stem}.weight"] = matrix(stem, take(found, stem, ".qweight", ENDINGS), group)
    return found


def matrix(stem: str, tensors: dict[str, Tensor], group: StoredGroup) -> Matrix:
    """One matrix, the shapes and dtypes of its tensors checked."""
    columns, words = sides(tensors[".qweight"])
    groups = groups_of(tensors[".qweight"], columns, group)
    check(tensors[".qzeros"], ("int32",), (groups, words))
    check(tensors[".scales"], FLOATS, (groups, 8 * words))
    return AwqMatrix(f"{stem}.weight", (8 * words, columns), group, tensors)
