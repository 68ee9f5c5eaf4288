"""GPTQ checkpoints as AutoGPTQ and GPTQModel write them: 2 to 8-bit groups with zero points.

qweight  int32 [in * bits / 32, out]   packed down the inputs
qzeros   int32 [groups, out * bits / 32]   packed along the outputs; version 1 stores zero - 1
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
    IntegerLayout,
    IntegerMatrix,
    checked_bool,
    checked_int,
    checked_sizes,
    count_groups,
    make_group,
    pack,
    packed_shape,
    unpack,
    unpack_node,
)  # fmt: skip
from .keys import CONFIG_KEY, checked_entries, checked_patterns, unsupported_value
from .matrix import LargestValue, Matrix, MatrixTensors, check, pop_tensors, quantize_dense

VERSIONS = {"gptq": 1, "gptq_v2": 2}  # values of checkpoint_format
KEYS = {
    "quant_method": ("gptq",),
    "bits": ...,
    "group_size": ...,
    "desc_act": ...,
    "sym": ...,
    "static_groups": ...,
    "checkpoint_format": tuple(VERSIONS),
    "format": tuple(VERSIONS),
    "lm_head": (True, False),
    "method": ("gptq",),
    "pack_dtype": ("int32",),
    "is_marlin_format": (False,),
    "dynamic": ...,
    "damp_percent": ...,
    "true_sequential": ...,
    "model_name_or_path": ...,
    "model_file_base_name": ...,
    "meta": ...,
    "dataset": ...,
    "tokenizer": ...,
    "use_cuda_fp16": ...,
    "model_seqlen": ...,
    "block_name_to_quantize": ...,
    "module_name_preceding_first_block": ...,
    "batch_size": ...,
    "pad_token_id": ...,
    "use_exllama": ...,
    "disable_exllama": ...,
    "exllama_config": ...,
    "max_input_length": ...,
    "cache_block_outputs": ...,
    "modules_in_block_to_quantize": ...,
    "modules_to_not_convert": ...,
    "backend": ...,
    "act_group_aware": ...,
    "hyb_act": ...,
    "mse": ...,
    "damp_auto_increment": ...,
    "quantizer": ...,
}
ENDINGS = (".qweight", ".qzeros", ".scales")


@dataclass(frozen=True)
class GptqMatrix(IntegerMatrix):
    def unpacked(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        words, zeros, scales = (self.tensors[ending].read() for ending in ENDINGS)
        codes = unpack(words, self.form.bits)
        # 8-bit zero points can be 256.
        zeros = unpack(np.ascontiguousarray(zeros.T), self.form.bits).T.astype(np.uint16)
        zeros += self.form.version == 1
        return codes, scales, zeros, self.order(len(scales))

    def order(self, groups: int) -> np.ndarray | None:
        """The group of each input; None if groups are contiguous."""
        if ".g_idx" not in self.tensors:
            if not self.form.ordered:
                raise ModelError(
                    "the checkpoint lacks the tensor "
                    f"{self.name.removesuffix('weight') + 'g_idx'!r}"
                )
            return None
        group_ids = self.tensors[".g_idx"].read()
        columns = self.shape[1]
        if (group_ids == np.arange(columns) // (columns // groups)).all():
            return None
        if group_ids.min() < 0 or group_ids.max() >= groups:
            name = self.tensors[".g_idx"].name
            raise ModelError(
                f"tensor {name!r} names the group {int(group_ids.max())}, and there are {groups}"
            )
        return group_ids


def stored_format(config: Mapping[str, Any]) -> StoredFormat:
    """Parse the config. `dynamic` maps module patterns to schemes; `-:` marks unquantised ones."""
    settings = checked_entries(CONFIG_KEY, config, KEYS)
    ignore = list(
        checked_patterns(
            f"{CONFIG_KEY}.modules_to_not_convert", settings.get("modules_to_not_convert", [])
        )
    )
    groups = []
    dynamic = settings.get("dynamic", {})
    if not isinstance(dynamic, dict):
        raise unsupported_value(f"{CONFIG_KEY}.dynamic", dynamic, "an object of patterns")
    for name, scheme in dynamic.items():
        key_path = f"{CONFIG_KEY}.dynamic.{name}"
        targets = checked_patterns(key_path, [f"re:{name.removeprefix('-:').removeprefix('+:')}"])
        if name.startswith("-:"):
            ignore += targets
        else:
            groups.append(scheme_group(settings | checked_entries(key_path, scheme, KEYS), targets))
    all_groups = (*groups, scheme_group(settings, ("Linear",)))
    return StoredFormat(
        "gptq",
        all_groups,
        ("lm_head", "embed_tokens", *ignore),
        match_substrings=True,
        rounds_head=False,
    )


def scheme_group(settings: dict[str, Any], targets: tuple[str, ...]) -> StoredGroup:
    """The stored group for the modules of one scheme."""
    bits = checked_int(settings, "bits", 2, 3, 4, 8)
    size = checked_int(settings, "group_size", -1, 16, 32, 64, 128, 256, 512, 1024)
    version = VERSIONS[settings.get("checkpoint_format", settings.get("format", "gptq"))]
    ordered = not checked_bool(settings, "desc_act", False)
    form = IntegerLayout(
        bits, size, centred=checked_bool(settings, "sym", True), ordered=ordered, version=version
    )
    base_group = make_group(form)
    return StoredGroup(base_group.quant, base_group.form, targets)


def gather(tensors: dict[str, Tensor], stored: StoredFormat) -> dict[str, Tensor | Matrix]:
    gathered: dict[str, Any] = dict(tensors)
    for stem in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        endings = ENDINGS + ((".g_idx",) if f"{stem}.g_idx" in gathered else ())
        stored_group = stored.group_of(stem) or stored.groups[-1]
        gathered[f"{stem}.weight"] = matrix(
            stem, pop_tensors(gathered, stem, ".qweight", endings), stored_group
        )
    return gathered


def matrix(stem: str, tensors: dict[str, Tensor], group: StoredGroup) -> Matrix:
    """One matrix, with the shapes and dtypes of its tensors checked."""
    assert isinstance(group.form, IntegerLayout)
    words, rows = packed_shape(tensors[".qweight"])
    bits = group.form.bits
    columns = words * 32 // bits
    if words * 32 % bits or rows * bits % 32:
        raise ModelError(
            f"tensor {tensors['.qweight'].name!r} is {[words, rows]}; its codes of {bits} bits "
            "fill no words"
        )
    groups = count_groups(tensors[".qweight"], columns, group)
    check(tensors[".qzeros"], ("int32",), (groups, rows * bits // 32))
    check(tensors[".scales"], FLOATS, (groups, rows))
    if ".g_idx" in tensors:
        check(tensors[".g_idx"], ("int32", "int64"), (columns,))
    return GptqMatrix(f"{stem}.weight", (rows, columns), group, tensors)


WRITES = tuple(f"int4-{size}{zero}" for size in (32, 64, 128) for zero in ("", "-zero"))
WRITES += tuple(f"int8-weights-{size}" for size in (32, 64, 128))


def quantization_config(name: str, ignore: Sequence[str]) -> dict[str, Any]:
    """GPTQModel's config.

    Groups are contiguous whatever the order of rounding was: desc_act is false. Version 1 cannot
    store a zero point of 0, so formats with zero points use version 2.
    """
    node = quant.example(name)
    centred = not isinstance(node, Int4) or node.zero is None
    form = "gptq" if centred else "gptq_v2"
    spared = [f"-:{module_pattern(module)}" for module in ignore if module != "lm_head"]
    return {
        "quant_method": "gptq",
        "bits": 4 if isinstance(node, Int4) else 8,
        "group_size": node.inputs_per_value(),
        "sym": centred,
        "desc_act": False,
        "static_groups": True,
        "checkpoint_format": form,
        "format": form,
        "pack_dtype": "int32",
        "lm_head": False,
        "true_sequential": True,
        "damp_percent": 0.01,
        "meta": {"quantizer": ["quire"]},
    } | ({"dynamic": {name: {} for name in spared}} if spared else {})


def module_pattern(module: str) -> str:
    """A regular expression for one module, or the one behind `re:`."""
    return module.removeprefix("re:") if module.startswith("re:") else f"{re.escape(module)}$"


def layout(name: str, group: StoredGroup, shape: tuple[int, ...]) -> Layout:
    assert isinstance(group.form, IntegerLayout)
    bits = group.form.bits
    rows, columns, groups = checked_sizes(name, shape, group.form)
    return {
        ".qweight": (("int32",), ((columns * bits // 32, rows),)),
        ".qzeros": (("int32",), ((groups, rows * bits // 32),)),
        ".scales": (("float16",), ((groups, rows),)),
        ".g_idx": (("int32",), ((columns,),)),
    }


def round_matrix(value: np.ndarray, group: StoredGroup, largest: LargestValue) -> MatrixTensors:
    return parts(quantize_dense(value, group), group)


def parts(node: Rounded, group: StoredGroup) -> MatrixTensors:
    assert isinstance(group.form, IntegerLayout)
    codes, scales, zeros = unpack_node(node)
    bits = group.form.bits
    stored = zeros - np.uint8(group.form.version == 1)
    return {
        ".qweight": pack(codes, bits),
        ".qzeros": np.ascontiguousarray(pack(stored.T, bits).T),
        ".scales": scales,
        ".g_idx": (np.arange(len(codes)) // group.form.group).astype(np.int32),
    }
