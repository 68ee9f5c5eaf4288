"""GPTQ checkpoints as AutoGPTQ and GPTQModel write them: 2, 3, 4 or 8 bits in groups, with zeros.

qweight  int32 [in * bits / 32, out]   packed down the inputs
qzeros   int32 [groups, out * bits / 32]   packed along the outputs; stored less one in version 1
scales   float16 [groups, out]
g_idx    int32 [in]: the group of each input, in order unless desc_act
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....ops import quant
from ....ops.quant import Rounded
from ....ops.quant.compressed import Layout
from ....ops.quant.int4 import Int4
from ...config import ModelError
from ...stored_format import StoredFormat, StoredGroup
from ..safetensors import Tensor
from .integers import (
    FLOATS,
    IntegerMatrix,
    Integers,
    group_of,
    groups_of,
    numbers_of,
    pack,
    sides,
    sizes_of,
    truth,
    unpack,
    whole_number,
)  # fmt: skip
from .keys import HERE, known, patterns, refusal
from .matrix import Largest, Matrix, Parts, check, rounded, take

VERSIONS = {"gptq": 1, "gptq_v2": 2}  # values of checkpoint_format
KEYS = {
    "quant_method": ("gptq",), "bits": ..., "group_size": ..., "desc_act": ..., "sym": ..., "static_groups": ...,
    "checkpoint_format": tuple(VERSIONS), "format": tuple(VERSIONS), "lm_head": (True, False), "method": ("gptq",),
    "pack_dtype": ("int32",), "is_marlin_format": (False,), "dynamic": ..., "damp_percent": ..., "true_sequential": ...,
    "model_name_or_path": ..., "model_file_base_name": ..., "meta": ..., "dataset": ..., "tokenizer": ...,
    "use_cuda_fp16": ..., "model_seqlen": ..., "block_name_to_quantize": ..., "module_name_preceding_first_block": ...,
    "batch_size": ..., "pad_token_id": ..., "use_exllama": ..., "disable_exllama": ..., "exllama_config": ...,
    "max_input_length": ..., "cache_block_outputs": ..., "modules_in_block_to_quantize": ...,
    "modules_to_not_convert": ..., "backend": ..., "act_group_aware": ...,
    "hyb_act": ..., "mse": ..., "damp_auto_increment": ..., "quantizer": ...,
}  # fmt: skip
ENDINGS = (".qweight", ".qzeros", ".scales")


@dataclass(frozen=True)
class GptqMatrix(IntegerMatrix):
    def unpacked(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        words, zeros, scales = (self.tensors[ending].read() for ending in ENDINGS)
        codes = unpack(words, self.form.bits)
        zeros = unpack(np.ascontiguousarray(zeros.T), self.form.bits).T.astype(np.uint16)  # of eight bits up to 256
        zeros += self.form.version == 1
        return codes, scales, zeros, self.order(len(scales))

    def order(self, groups: int) -> np.ndarray | None:
        """The group of each input, unless they are neighbours."""
        if ".g_idx" not in self.tensors:
            if not self.form.ordered:
                raise ModelError(f"the checkpoint lacks the tensor {self.name.removesuffix('weight') + 'g_idx'!r}")
            return None
        found, columns = self.tensors[".g_idx"].read(), self.shape[1]
        if (found == np.arange(columns) // (columns // groups)).all():
            return None
        if found.min() < 0 or found.max() >= groups:
            name = self.tensors[".g_idx"].name
            raise ModelError(f"tensor {name!r} names the group {int(found.max())}, and there are {groups}")
        return found


def stored_format(config: Mapping[str, Any]) -> StoredFormat:
    """How the matrices are kept; `dynamic` has patterns of modules with a scheme of their own, or behind `-:` none."""
    said = known(HERE, config, KEYS)
    ignore = list(patterns(f"{HERE}.modules_to_not_convert", said.get("modules_to_not_convert", [])))
    groups, dynamic = [], said.get("dynamic", {})
    if not isinstance(dynamic, dict):
        raise refusal(f"{HERE}.dynamic", dynamic, "an object of patterns")
    for name, scheme in dynamic.items():
        where = f"{HERE}.dynamic.{name}"
        targets = patterns(where, [f"re:{name.removeprefix('-:').removeprefix('+:')}"])
        if name.startswith("-:"):
            ignore += targets
        else:
            groups.append(group(said | known(where, scheme, KEYS), targets))
    every = (*groups, group(said, ("Linear",)))
    return StoredFormat("gptq", every, ("lm_head", "embed_tokens", *ignore), parts=True, rounds_head=False)


def group(said: dict[str, Any], targets: tuple[str, ...]) -> StoredGroup:
    """How the modules of one scheme are kept."""
    bits, size = (
        whole_number(said, "bits", 2, 3, 4, 8),
        whole_number(said, "group_size", -1, 16, 32, 64, 128, 256, 512, 1024),
    )
    version = VERSIONS[said.get("checkpoint_format", said.get("format", "gptq"))]
    ordered = not truth(said, "desc_act", False)
    form = Integers(bits, size, centred=truth(said, "sym", True), ordered=ordered, version=version)
    kept = group_of(form)
    return StoredGroup(kept.quant, kept.form, targets)


def gather(tensors: dict[str, Tensor], stored: StoredFormat) -> dict[str, Tensor | Matrix]:
    found: dict[str, Any] = dict(tensors)
    for stem in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        endings = ENDINGS + ((".g_idx",) if f"{stem}.g_idx" in found else ())
        own = stored.group_of(stem) or stored.groups[-1]
        found[f"{stem}.weight"] = matrix(stem, take(found, stem, ".qweight", endings), own)
    return found


def matrix(stem: str, tensors: dict[str, Tensor], group: StoredGroup) -> Matrix:
    """One matrix, the shapes and dtypes of its tensors checked."""
    assert isinstance(group.form, Integers)
    words, rows = sides(tensors[".qweight"])
    bits = group.form.bits
    columns = words * 32 // bits
    if words * 32 % bits or rows * bits % 32:
        raise ModelError(
            f"tensor {tensors['.qweight'].name!r} is {[words, rows]}; its codes of {bits} bits fill no words"
        )
    groups = groups_of(tensors[".qweight"], columns, group)
    check(tensors[".qzeros"], ("int32",), (groups, rows * bits // 32))
    check(tensors[".scales"], FLOATS, (groups, rows))
    if ".g_idx" in tensors:
        check(tensors[".g_idx"], ("int32", "int64"), (columns,))
    return GptqMatrix(f"{stem}.weight", (rows, columns), group, tensors)


WRITES = tuple(f"int4-{size}{zero}" for size in (32, 64, 128) for zero in ("", "-zero"))
WRITES += tuple(f"int8-weights-{size}" for size in (32, 64, 128))


def quantization_config(name: str, ignore: Sequence[str]) -> dict[str, Any]:
    """As GPTQModel writes it.

    Groups are neighbours whatever the order of rounding was, so that desc_act is false. Version 1 has no zero of 0, and
    where groups have zeros of their own that can be one: these are of version 2.
    """
    node = quant.example(name)
    centred = not isinstance(node, Int4) or node.zero is None
    form = "gptq" if centred else "gptq_v2"
    spared = [f"-:{pattern_of(module)}" for module in ignore if module != "lm_head"]
    return {
        "quant_method": "gptq", "bits": 4 if isinstance(node, Int4) else 8, "group_size": node.shared(), "sym": centred,
        "desc_act": False, "static_groups": True, "checkpoint_format": form, "format": form, "pack_dtype": "int32",
        "lm_head": False, "true_sequential": True, "damp_percent": 0.01, "meta": {"quantizer": ["quire"]},
    } | ({"dynamic": {name: {} for name in spared}} if spared else {})  # fmt: skip


def pattern_of(module: str) -> str:
    """A regular expression for one module; those behind `re:` are some already."""
    return module.removeprefix("re:") if module.startswith("re:") else f"{re.escape(module)}$"


def layout(name: str, group: StoredGroup, shape: tuple[int, ...]) -> Layout:
    assert isinstance(group.form, Integers)
    bits = group.form.bits
    rows, columns, groups = sizes_of(name, shape, group.form)
    return {
        ".qweight": (("int32",), ((columns * bits // 32, rows),)),
        ".qzeros": (("int32",), ((groups, rows * bits // 32),)),
        ".scales": (("float16",), ((groups, rows),)),
        ".g_idx": (("int32",), ((columns,),)),
    }


def round_matrix(value: np.ndarray, group: StoredGroup, largest: Largest) -> Parts:
    return parts(rounded(value, group), group)


def parts(node: Rounded, group: StoredGroup) -> Parts:
    assert isinstance(group.form, Integers)
    codes, scales, zeros = numbers_of(node)
    bits, stored = group.form.bits, zeros - np.uint8(group.form.version == 1)
    return {
        ".qweight": pack(codes, bits),
        ".qzeros": np.ascontiguousarray(pack(stored.T, bits).T),
        ".scales": scales,
        ".g_idx": (np.arange(len(codes)) // group.form.group).astype(np.int32),
    }
