"""AWQ checkpoints as AutoAWQ writes them: four bits in groups, with zeros, packed down the outputs.

qweight  int32 [in, out / 8]
qzeros   int32 [in / group, out / 8]
scales   float16 [in / group, out]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....ops import quant
from ....ops.quant import Rounded
from ....ops.quant.compressed import Layout
from ...stored_format import StoredFormat, StoredGroup
from ..safetensors import Tensor
from .integers import (
    FLOATS,
    IntegerMatrix,
    Integers,
    group_of,
    groups_of,
    numbers_of,
    sides,
    sizes_of,
    truth,
    whole_number,
)  # fmt: skip
from .keys import HERE, known, patterns
from .matrix import Largest, Matrix, Parts, check, rounded, take

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


def words(codes: np.ndarray) -> np.ndarray:
    """The words of `outputs`."""
    each = codes.astype(np.uint32).reshape(len(codes), -1, 8)
    return np.bitwise_or.reduce(each << (4 * PLACES).astype(np.uint32), axis=2).view(np.int32)


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


WRITES = tuple(f"int4-{size}-zero" for size in (32, 64, 128))


def quantization_config(name: str, ignore: Sequence[str]) -> dict[str, Any]:
    """As AutoAWQ writes it: modules are spared whose names hold one of these."""
    spared = [".experts" if module.startswith("re:") else module for module in ignore if module != "lm_head"]
    return {
        "quant_method": "awq", "bits": 4, "group_size": quant.example(name).shared(), "zero_point": True,
        "version": "gemm", "modules_to_not_convert": spared or None,
    }  # fmt: skip


def layout(name: str, group: StoredGroup, shape: tuple[int, ...]) -> Layout:
    assert isinstance(group.form, Integers)
    rows, columns, groups = sizes_of(name, shape, group.form)
    return {
        ".qweight": (("int32",), ((columns, rows // 8),)),
        ".qzeros": (("int32",), ((groups, rows // 8),)),
        ".scales": (("float16",), ((groups, rows),)),
    }


def round_matrix(value: np.ndarray, group: StoredGroup, largest: Largest) -> Parts:
    return parts(rounded(value, group), group)


def parts(node: Rounded, group: StoredGroup) -> Parts:
    codes, scales, zeros = numbers_of(node)
    return {".qweight": words(codes), ".qzeros": words(zeros), ".scales": scales}
