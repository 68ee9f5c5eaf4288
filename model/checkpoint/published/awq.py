"""AWQ checkpoints as AutoAWQ writes them: 4-bit groups with zero points, packed along the outputs.

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
    IntegerLayout,
    IntegerMatrix,
    checked_bool,
    checked_int,
    checked_sizes,
    count_groups,
    make_group,
    packed_shape,
    unpack_node,
)  # fmt: skip
from .keys import CONFIG_KEY, checked_entries, checked_patterns
from .matrix import LargestValue, Matrix, MatrixTensors, check, pop_tensors, quantize_dense

KEYS = {
    "quant_method": ("awq",),
    "bits": ...,
    "group_size": ...,
    "zero_point": (True,),
    "version": ("gemm", "GEMM"),
    "modules_to_not_convert": ...,
    "backend": ...,
    "do_fuse": ...,
    "fuse_max_seq_len": ...,
    "modules_to_fuse": ...,
    "exllama_config": ...,
    "provider": ...,
    "lm_head": (True, False),
    "method": ("awq",),
    "format": ("gemm",),
    "checkpoint_format": ("gemm",),
    "pack_dtype": ("int32",),
    "meta": ...,
    "sym": ...,
    "desc_act": (False,),
    "dynamic": ({},),
    "q_group_size": ...,
    "w_bit": (4,),
}
ENDINGS = (".qweight", ".qzeros", ".scales")
PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # position in a word of each of eight outputs


@dataclass(frozen=True)
class AwqMatrix(IntegerMatrix):
    def unpacked(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, None]:
        codes, zeros, scales = (self.tensors[ending].read() for ending in ENDINGS)
        return unpack_outputs(codes), scales, unpack_outputs(zeros), None


def unpack_outputs(words: np.ndarray) -> np.ndarray:
    """Unpack codes [n, out] from words [n, out / 8]."""
    shifts = (4 * PLACES).astype(np.uint32)
    return (
        (words.view(np.uint32)[:, :, None] >> shifts & np.uint32(15))
        .astype(np.uint8)
        .reshape(len(words), -1)
    )


def pack_outputs(codes: np.ndarray) -> np.ndarray:
    """The inverse of `unpack_outputs`."""
    grouped = codes.astype(np.uint32).reshape(len(codes), -1, 8)
    return np.bitwise_or.reduce(grouped << (4 * PLACES).astype(np.uint32), axis=2).view(np.int32)


def stored_format(config: Mapping[str, Any]) -> StoredFormat:
    settings = checked_entries(CONFIG_KEY, config, KEYS)
    settings = {
        "bits": settings.get("w_bit", 4),
        "group_size": settings.get("q_group_size"),
    } | settings
    checked_int(settings, "bits", 4)
    checked_bool(settings, "zero_point", True)
    form = IntegerLayout(4, checked_int(settings, "group_size", -1, 16, 32, 64, 128, 256))
    ignore = checked_patterns(
        f"{CONFIG_KEY}.modules_to_not_convert", settings.get("modules_to_not_convert", [])
    )
    return StoredFormat(
        "awq",
        (make_group(form),),
        ("lm_head", "embed_tokens", *ignore),
        match_substrings=True,
        rounds_head=False,
    )


def gather(tensors: dict[str, Tensor], stored: StoredFormat) -> dict[str, Tensor | Matrix]:
    gathered: dict[str, Any] = dict(tensors)
    for stem in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        group = stored.group_of(stem) or stored.groups[-1]
        gathered[f"{stem}.weight"] = matrix(
            stem, pop_tensors(gathered, stem, ".qweight", ENDINGS), group
        )
    return gathered


def matrix(stem: str, tensors: dict[str, Tensor], group: StoredGroup) -> Matrix:
    """One matrix, with the shapes and dtypes of its tensors checked."""
    columns, words = packed_shape(tensors[".qweight"])
    groups = count_groups(tensors[".qweight"], columns, group)
    check(tensors[".qzeros"], ("int32",), (groups, words))
    check(tensors[".scales"], FLOATS, (groups, 8 * words))
    return AwqMatrix(f"{stem}.weight", (8 * words, columns), group, tensors)


WRITES = tuple(f"int4-{size}-zero" for size in (32, 64, 128))


def quantization_config(name: str, ignore: Sequence[str]) -> dict[str, Any]:
    """AutoAWQ's config, which ignores modules by parts of their names."""
    spared = [
        ".experts" if module.startswith("re:") else module
        for module in ignore
        if module != "lm_head"
    ]
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": quant.example(name).inputs_per_value(),
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": spared or None,
    }


def layout(name: str, group: StoredGroup, shape: tuple[int, ...]) -> Layout:
    assert isinstance(group.form, IntegerLayout)
    rows, columns, groups = checked_sizes(name, shape, group.form)
    return {
        ".qweight": (("int32",), ((columns, rows // 8),)),
        ".qzeros": (("int32",), ((groups, rows // 8),)),
        ".scales": (("float16",), ((groups, rows),)),
    }


def round_matrix(value: np.ndarray, group: StoredGroup, largest: LargestValue) -> MatrixTensors:
    return parts(quantize_dense(value, group), group)


def parts(node: Rounded, group: StoredGroup) -> MatrixTensors:
    codes, scales, zeros = unpack_node(node)
    return {".qweight": pack_outputs(codes), ".qzeros": pack_outputs(zeros), ".scales": scales}
