"""The tables of docs/quantisation.md: formats, and how published checkpoints are stored.

`python tests/support/formats_table.py` rewrites them.
"""

from pathlib import Path

import jax
import jax.numpy as jnp

from quire.model.checkpoint.gguf_folder import KEPT
from quire.model.checkpoint.published import split_quantization
from quire.ops import quant
from quire.ops.linear.gpu_kernel import prepare
from quire.ops.native import kernel_names
from quire.ops.quant.compressed import Rounded
from quire.ops.quant.grouped import CODES, Grouped
from quire.sharding.spec import ArraySpec, nbytes

PAGE = Path(__file__).parents[2] / "docs" / "quantisation.md"
BEGIN = "<!-- tables: python tests/support/formats_table.py -->"
END = "<!-- end of tables -->"
NAMES = (
    "int8",
    "int8-weights",
    "int8-weights-128",
    "int8-weights-32-least",
    "int8-weights-16",
    "fp8",
    "fp8-weights",
    "fp8-weights-128",
    "int4-32",
    "int4-64",
    "int4-128-zero",
    "int4-32-least",
    "int4-32-least-half",
    "int5-32",
    "int5-32-least",
    "nf4",
    "iq4",
    "nvfp4",
    "mxfp4",
    "fp4",
    "k4-16",
    "k4-32-least",
    "k6-16",
    "k6-32-least",
    "iq4-levels",
    "codebook-4",
    "codebook-3",
    "e8p-2",
    "e8p-4",
)
SIZE = 1024
BLOCKS = {"weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "group_size": 128, "sym": True, "desc_act": False}
BITS = {"bits": 4, "group_size": 128, "sym": True}
FOUR = {"_type": "torch.dtype", "_data": "int4"}
OF32 = {"granularity": {"_type": "PerGroup", "_data": {"group_size": 32}}}
HQQ = {"nbits": 4, "group_size": 64, "axis": 1}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
FP8 = INT8 | {"type": "float"}
NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
}
MXFP4 = NVFP4 | {"strategy": "group", "group_size": 32}


def torchao(kind: str, **data) -> dict:
    """The quantization_config of a torchao config."""
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": data}}}


def compressed(weights: dict, activations: dict | None, form: str) -> dict:
    """The quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
    }


PUBLISHED = (
    ("AWQ, 4 bits in groups of 128", {"quant_method": "awq", "bits": 4, "group_size": 128}),
    ("GPTQ, 4 bits in groups of 128", GPTQ | {"bits": 4}),
    ("GPTQ, 2 or 3 bits", GPTQ | {"bits": 3}),
    ("GPTQ, 8 bits in groups of 128", GPTQ | {"bits": 8}),
    ("GPTQ, 8 bits in groups of 128 with zeros", GPTQ | {"bits": 8, "sym": False}),
    ("GPTQ with `desc_act`", GPTQ | {"bits": 4, "desc_act": True}),
    ("FP8 in blocks of 128 by 128 (DeepSeek, Qwen)", {"quant_method": "fp8"} | BLOCKS),
    ("FP8 with one scale per matrix", {"quant_method": "fp8"}),
    ("FBGEMM FP8", {"quant_method": "fbgemm_fp8"}),
    (
        "AutoRound, 4 bits",
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"} | BITS,
    ),
    (
        "bitsandbytes NF4",
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    (
        "bitsandbytes FP4",
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    ),
    ("bitsandbytes, 8 bits", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    (
        "HQQ, 4 bits in groups of 64",
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": HQQ}},
    ),
    ("Model Optimizer NVFP4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    ("Model Optimizer FP8", {"quant_method": "modelopt", "quant_algo": "FP8"}),
    (
        "torchao, `Int4WeightOnlyConfig`, groups of 128",
        torchao("Int4WeightOnlyConfig", group_size=128),
    ),
    (
        "torchao, `IntxWeightOnlyConfig`, 4 bits, groups of 32",
        torchao("IntxWeightOnlyConfig", weight_dtype=FOUR, **OF32),
    ),
    ("torchao, `Int8WeightOnlyConfig`", torchao("Int8WeightOnlyConfig")),
    (
        "torchao, `Int8DynamicActivationInt8WeightConfig`",
        torchao("Int8DynamicActivationInt8WeightConfig"),
    ),
    ("torchao, `Float8WeightOnlyConfig`", torchao("Float8WeightOnlyConfig")),
    (
        "torchao, `Float8DynamicActivationFloat8WeightConfig`",
        torchao("Float8DynamicActivationFloat8WeightConfig"),
    ),
    (
        "compressed-tensors W8A8",
        compressed(INT8, INT8 | {"strategy": "token", "dynamic": True}, "int-quantized"),
    ),
    ("compressed-tensors W8A16", compressed(INT8, None, "pack-quantized")),
    ("compressed-tensors W4A16, groups of 128", compressed(INT4, None, "pack-quantized")),
    (
        "compressed-tensors FP8_DYNAMIC",
        compressed(FP8, FP8 | {"strategy": "token", "dynamic": True}, "float-quantized"),
    ),
    ("compressed-tensors NVFP4", compressed(NVFP4, None, "nvfp4-pack-quantized")),
    ("compressed-tensors MXFP4", compressed(MXFP4, None, "mxfp4-pack-quantized")),
)


def matrix_spec(name: str):
    """The specs of a square matrix in a format."""
    return quant.packed(
        name, ArraySpec((SIZE, SIZE), jnp.bfloat16, (None, None), fan_in=SIZE, inputs=(0,))
    )


def gpu_kernel_support(node) -> str:
    """Whether the GPU kernels for matrix products support a node: "yes" or "no"."""
    try:
        jax.eval_shape(
            lambda weight: prepare.as_gpu_matrix(weight).array,
            jax.tree.map(lambda leaf: leaf.struct, node),
        )
    except NotImplementedError:
        return "no"
    return "yes"


def format_rows() -> list[str]:
    rows = [
        "| format | bits per weight | activations | CPU kernel | GPU kernel | split by columns |",
        "|---|---|---|---|---|---|",
    ]
    for name in NAMES:
        node = matrix_spec(name)
        assert isinstance(node, Rounded)
        rounds = {"int8": "int8", "float8": "FP8"}.get(node.rounds or "", "-")
        bits = 8 * nbytes(node) / SIZE**2
        (kernel,) = quant.kernels(name)
        if isinstance(node, Grouped):
            kernel = node.kernel
            bits = bits - (8 - CODES[node.code].bits) * (not node.packed)
        if kernel in kernel_names.ROUNDING:
            rounds += ", int8 on request"
        splits = "yes" if quant.splits(name) else "no"
        rows.append(
            f"| `{name}` | {bits:.3g} | {rounds} | `{kernel}` | {gpu_kernel_support(node)} | {splits} |"
        )
    return rows


def published_rows() -> list[str]:
    rows = ["| published as | stored as |", "|---|---|"]
    for label, config in PUBLISHED:
        stored = split_quantization({"quantization_config": config})[1]
        assert stored is not None
        rows.append(f"| {label} | {stored_as(stored.quant)} |")
    kinds_by_name: dict[str, list[str]] = {}
    for kind, name in KEPT.items():
        kinds_by_name.setdefault(name, []).append(kind)
    rows += [
        f"| GGUF: {', '.join(kinds)} | {stored_as(name)} |" for name, kinds in kinds_by_name.items()
    ]
    return [*rows, f"| GGUF: all other types | {stored_as(None)} |"]


def stored_as(name: str | None) -> str:
    return "dequantised to the model's dtype" if name is None else f"`{name}`"


def tables() -> str:
    return "\n".join([BEGIN, "", *format_rows(), "", *published_rows(), "", END])


def page(text: str) -> str:
    """The page with its tables replaced."""
    head, _, tail = text.partition(BEGIN)
    return head + tables() + tail.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
