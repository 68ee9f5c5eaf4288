"""Quantised checkpoints in the formats of other tools: AWQ, GPTQ, FP8 and compressed-tensors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire import LLM
from quire.model.checkpoint.loader import read_config
from quire.model.config import ModelError
from quire.tests.support import served_codes, tiny
from quire.tests.support.quantized_files import (
    LLAMA,
    D,
    F,
    assert_dequantized,
    awq,
    check_damage,
    dense_of,
    fp8,
    gptq,
    read,
)

FP8_BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8_SPEC = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}


def compressed_tensors_config(weights: dict, activations: dict | None = None) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


# (writer of a matrix, its options, quantization_config, Quire's format or None if dequantised)
CASES: dict[str, tuple[Any, dict, dict, str | None]] = {
    "awq-128": (awq, {}, AWQ, "int4-128-zero"),
    "awq-32": (awq, {"group": 32}, AWQ | {"group_size": 32}, "int4-32-zero"),
    "awq-all": (awq, {"group": -1}, AWQ | {"group_size": -1}, None),
    "gptq-128": (gptq, {}, GPTQ, "int4-128-zero"),
    "gptq-32-v2": (
        gptq,
        {"group": 32, "version": 2},
        GPTQ | {"group_size": 32, "checkpoint_format": "gptq_v2"},
        "int4-32-zero",
    ),
    "gptq-sym": (gptq, {"sym": True}, GPTQ | {"sym": True}, "int4-128"),
    "gptq-order": (gptq, {"order": True}, GPTQ | {"desc_act": True}, None),
    "gptq-2": (
        gptq,
        {"bits": 2, "group": 64},
        GPTQ | {"bits": 2, "group_size": 64},
        "int4-64-zero",
    ),
    "gptq-3": (gptq, {"bits": 3}, GPTQ | {"bits": 3}, "int4-128-zero"),
    "gptq-3-sym": (
        gptq,
        {"bits": 3, "sym": True},
        GPTQ | {"bits": 3, "sym": True},
        "int4-128-zero",
    ),
    "gptq-8": (gptq, {"bits": 8}, GPTQ | {"bits": 8}, "int8-weights-128-least"),
    "gptq-8-32-v2": (
        gptq,
        {"bits": 8, "group": 32, "version": 2},
        GPTQ | {"bits": 8, "group_size": 32, "checkpoint_format": "gptq_v2"},
        "int8-weights-32-least",
    ),
    "gptq-8-order": (gptq, {"bits": 8, "order": True}, GPTQ | {"bits": 8, "desc_act": True}, None),
    "gptq-8-all": (gptq, {"bits": 8, "group": -1}, GPTQ | {"bits": 8, "group_size": -1}, None),
    "gptq-8-sym": (
        gptq,
        {"bits": 8, "sym": True},
        GPTQ | {"bits": 8, "sym": True},
        "int8-weights-128",
    ),
    "fp8-blocks": (fp8, {}, FP8_BLOCKS, "fp8-weights-128"),
    "fp8-one": (
        fp8,
        {"scales": "one", "name": "weight_scale"},
        {"quant_method": "fp8", "activation_scheme": "static"},
        "fp8",
    ),
    "fbgemm": (
        fp8,
        {"scales": "outputs", "name": "weight_scale"},
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        "fp8",
    ),
    "compressed-one": (
        fp8,
        {"scales": "one", "name": "weight_scale"},
        compressed_tensors_config(FP8_SPEC, FP8_SPEC),
        "fp8",
    ),
    "compressed-flat": (
        fp8,
        {"scales": "flat", "name": "weight_scale"},
        compressed_tensors_config(FP8_SPEC | {"strategy": "channel"}),
        "fp8-weights",
    ),
    "compressed-blocks": (
        fp8,
        {"name": "weight_scale"},
        compressed_tensors_config(
            FP8_SPEC | {"strategy": "block", "block_structure": [128, 128]},
            FP8_SPEC | {"strategy": "group", "group_size": 128, "dynamic": True},
        ),
        "fp8-weights-128",
    ),
}


def write_checkpoint(
    folder: Path,
    case: str,
    config: dict = LLAMA,
    dense_modules: tuple[str, ...] = (),
    seed: int = 0,
):
    """Write a folder in its tool's format; return its tensors and float64 matrices."""
    write, options, quantization, _ = CASES[case]
    rng = np.random.default_rng(seed)
    tensors = {}
    expected = {}
    for name, value in tiny.draw(config).items():
        stem = name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or stem.endswith(dense_modules or ("\n",)):
            tensors[name], expected[name] = value, value.astype(np.float64)
            continue
        matrix_tensors, expected[name] = write(rng, stem, value.shape, **options)
        tensors |= matrix_tensors
        if quantization.get("activation_scheme") == "static":
            tensors[f"{stem}.input_scale"] = np.array(0.1, np.float32)
    tiny.write(folder, config | {"quantization_config": quantization}, tensors)
    return tensors, expected


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_matrices_match_their_format(tmp_path, case):
    _, expected = write_checkpoint(tmp_path, case)
    config = read_config(tmp_path)
    assert config.quant == CASES[case][3]
    weights = read(tmp_path)
    is_dequantized = CASES[case][3] is None
    assert isinstance(weights.layers[0].mlp.down_FD, np.ndarray) == is_dequantized
    assert_dequantized(weights, expected, 1e-6 if is_dequantized else 0)  # dequantised to float32
    np.testing.assert_array_equal(weights.embed_VD, expected["model.embed_tokens.weight"])
    if not case.startswith("compressed"):  # the head keeps its dtype
        np.testing.assert_array_equal(weights.head_VD, expected["lm_head.weight"])


@pytest.mark.parametrize(
    ("case", "is_logged"),
    [
        ("fp8-blocks", False),
        *(
            (name, True)
            for name, case in CASES.items()
            if case[2].get("activation_scheme") == "static"
        ),
    ],
)
def test_unused_activation_scales_are_logged(tmp_path, caplog, case, is_logged):
    write_checkpoint(tmp_path, case)
    with caplog.at_level("INFO", "quire"):
        read(tmp_path)
    assert ("input_scale of the checkpoint: not used" in caplog.text) == is_logged


@pytest.mark.parametrize("case", ["awq-128", "gptq-sym", "fp8-blocks", "fp8-one"])
def test_excluded_modules_stay_dense(tmp_path, case):
    """By parts of module names, as in transformers."""
    _, expected = write_checkpoint(
        tmp_path, case, dense_modules=("self_attn.o_proj", "layers.0.mlp.down_proj")
    )
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for key in ("modules_to_not_convert", *(["ignored_layers"] if case.startswith("fp8") else [])):
        config["quantization_config"] = CASES[case][2] | {
            key: ["self_attn.o_proj", "model.layers.0.mlp.down_proj"]
        }
        file.write_text(json.dumps(config))
        weights = read(tmp_path)
        assert_dequantized(weights, expected)
        assert isinstance(weights.layers[1].attention.out_NHD, np.ndarray)
        assert isinstance(weights.layers[0].mlp.down_FD, np.ndarray)
        assert not isinstance(weights.layers[1].mlp.down_FD, np.ndarray)
    config["quantization_config"] = CASES[case][2]
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"self_attn.o_proj.weight' is not quantised"):
        read(tmp_path)


def test_fused_8_bit_matrices_of_different_group_sizes(tmp_path):
    """The fused weight has the smaller groups."""
    _, expected = write_checkpoint(tmp_path, "gptq-8")
    tensors = load_file(tmp_path / "model.safetensors")
    rng = np.random.default_rng(5)
    for stem in [
        name.removesuffix(".qweight") for name in tensors if name.endswith("v_proj.qweight")
    ]:
        matrix_tensors, expected[f"{stem}.weight"] = gptq(
            rng, stem, expected[f"{stem}.weight"].shape, bits=8, group=32
        )
        tensors |= matrix_tensors
    dynamic = {r"+:.*\.v_proj": {"group_size": 32}}
    tiny.write(
        tmp_path,
        LLAMA | {"quantization_config": CASES["gptq-8"][2] | {"dynamic": dynamic}},
        tensors,
    )
    weights = read(tmp_path)
    assert weights.layers[0].attention.qkv_DGH.group == 32
    assert_dequantized(weights, expected)


def test_gptq_zero_point_256(tmp_path):
    """GPTQ version 1 stores the zero point minus one, here 255."""
    tensors, _ = write_checkpoint(tmp_path, "gptq-8")
    name = "model.layers.0.mlp.down_proj"
    tensors[f"{name}.qzeros"] = np.full_like(tensors[f"{name}.qzeros"], -1)
    save_file(tensors, tmp_path / "model.safetensors")
    codes = (
        tensors[f"{name}.qweight"]
        .view(np.uint8)
        .reshape(F // 4, D, 4)
        .transpose(0, 2, 1)
        .reshape(F, D)
    )
    scales = tensors[f"{name}.scales"].astype(np.float64).repeat(128, 0)
    np.testing.assert_array_equal(
        dense_of(read(tmp_path).layers[0].mlp.down_FD), (codes - 256.0) * scales
    )


@pytest.mark.parametrize("case", ["gptq-order", "gptq-8-all"])
def test_dequantized_matrices_can_be_quantized_again(tmp_path, case):
    _, expected = write_checkpoint(tmp_path, case)
    weights = read(tmp_path, quantization="int8")
    for i, layer in enumerate(weights.layers):
        leaf = layer.mlp.down_FD
        expected_matrix = expected[f"model.layers.{i}.mlp.down_proj.weight"].T
        np.testing.assert_allclose(
            leaf.codes * leaf.scale, expected_matrix, atol=np.abs(expected_matrix).max() / 250
        )


def test_other_quantization_than_the_checkpoints_is_rejected(tmp_path):
    write_checkpoint(tmp_path, "fp8-blocks")
    with pytest.raises(
        ModelError, match="'int4', and the checkpoint is quantised already, as 'fp8-weights-128'"
    ):
        read_config(tmp_path, quantization="int4")


@pytest.mark.parametrize("case", ["awq-128", "gptq-3", "gptq-8", "fp8-blocks", "fp8-one", "fbgemm"])
@pytest.mark.slow
def test_engine_tokens_match_dense_and_are_batch_invariant(tmp_path, case):
    """The dense model has the dequantised weights."""
    _, expected = write_checkpoint(tmp_path / "codes", case, LLAMA | {"torch_dtype": "bfloat16"})
    tiny.write(
        tmp_path / "dense",
        LLAMA,
        {name: np.ascontiguousarray(value, np.float32) for name, value in expected.items()},
    )
    llm = LLM(tmp_path / "codes", skip_tokenizer_init=True, **served_codes.SIZES)
    # FP8 rows have larger rounding errors.
    served_codes.check(llm, tmp_path / "dense", times=8 if CASES[case][3] == "fp8" else 3)


STEM = "model.layers.1.mlp.down_proj"
DAMAGE = [
    ("awq-128", ".qzeros", lambda x: None, f"lacks the tensor '{STEM}.qzeros'"),
    ("awq-128", ".scales", lambda x: x[:-1], f"tensor '{STEM}.scales' is"),
    ("awq-128", ".qweight", lambda x: x[:-8], "do not divide by quantization_config.group_size"),
    ("awq-128", ".qweight", lambda x: x.reshape(-1), "must be a matrix of int32"),
    (
        "awq-128",
        ".scales",
        lambda x: x * np.float16(np.nan),
        f"tensor '{STEM}.scales' holds a scale",
    ),
    (
        "gptq-128",
        ".scales",
        lambda x: x * np.float16(np.inf),
        f"tensor '{STEM}.scales' holds a scale",
    ),
    ("gptq-128", ".g_idx", lambda x: x[::-1], "says desc_act = False"),
    ("gptq-order", ".g_idx", lambda x: x + 9, "names the group 11, and there are 3"),
    ("gptq-order", ".g_idx", lambda x: None, "g_idx"),
    ("gptq-128", ".g_idx", lambda x: x[:-1], f"tensor '{STEM}.g_idx' is"),
    (
        "gptq-sym",
        ".qzeros",
        lambda x: x + 1,
        "zero point other than 8, and quantization_config says sym = True",
    ),
    ("gptq-3", ".qweight", lambda x: x[:-1], "fill no words"),
    ("fp8-blocks", ".weight_scale_inv", lambda x: None, "not quantised|float8"),
    ("fp8-blocks", ".weight_scale_inv", lambda x: x[:-1], f"tensor '{STEM}.weight_scale_inv' is"),
    ("fp8-blocks", ".weight_scale_inv", lambda x: x * np.float32(np.nan), "not finite"),
    ("fp8-blocks", ".weight", lambda x: np.full_like(x, np.nan), "holds a code that is no number"),
    ("fp8-blocks", ".weight", lambda x: None, f"lacks the tensor '{STEM}.weight'"),
    (
        "fp8-one",
        ".weight_scale",
        lambda x: np.ones(3, np.float32),
        f"tensor '{STEM}.weight_scale' is",
    ),
]


@pytest.mark.parametrize(
    ("case", "ending", "change", "words"), DAMAGE, ids=[f"{x[0]}{x[1]}-{x[3]}" for x in DAMAGE]
)
def test_error_names_the_damaged_tensor(tmp_path, case, ending, change, words):
    tensors, _ = write_checkpoint(tmp_path, case)
    check_damage(tmp_path, tensors, STEM + ending, change, words)


CONFIGS = [
    (AWQ | {"version": "gemv"}, "version = 'gemv'"),
    (AWQ | {"bits": 3}, "bits = 3"),
    (AWQ | {"zero_point": False}, "zero_point = False"),
    (AWQ | {"group_size": 100}, "group_size = 100"),
    (AWQ | {"group_size": None}, "group_size = None"),
    (AWQ | {"spin": 1}, "spin = 1 is not understood"),
    (AWQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
    (GPTQ | {"bits": 5}, "bits = 5"),
    (GPTQ | {"bits": True}, "bits = True"),
    (GPTQ | {"sym": 1}, "sym = 1"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
    (GPTQ | {"dynamic": {"+:.*": {"bits": 5}}}, "bits = 5"),
    (GPTQ | {"dynamic": {"+:.*": {"spin": 5}}}, "dynamic.+:.*.spin = 5 is not understood"),
    (GPTQ | {"dynamic": {"-:(a+)+": {}}}, "dynamic.-:(a+)+"),
    (GPTQ | {"dynamic": [1]}, "dynamic = [1]"),
    (GPTQ | {"lm_head": 1}, "lm_head = 1"),
    (FP8_BLOCKS | {"weight_block_size": [64, 128]}, "weight_block_size"),
    (FP8_BLOCKS | {"fmt": "e5m2"}, "fmt = 'e5m2'"),
    (FP8_BLOCKS | {"activation_scheme": "often"}, "activation_scheme"),
]


@pytest.mark.parametrize(("config", "words"), CONFIGS, ids=[words for _, words in CONFIGS])
def test_error_names_the_unsupported_config_key(tmp_path, config, words):
    tiny.write(tmp_path, LLAMA | {"quantization_config": config}, {"x": np.zeros(1, np.float32)})
    with pytest.raises(ModelError, match="quantization_config") as error:
        read_config(tmp_path)
    assert words in str(error.value) and "\n" not in str(error.value)
