"""More quantised checkpoint formats: NVFP4, MXFP4, bitsandbytes, AutoRound, HQQ, modelopt."""

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire import LLM
from quire.model.checkpoint.loader import read_config
from quire.model.config import ModelError
from quire.ops.quant.fp8 import Fp8
from quire.ops.quant.grouped import Grouped
from quire.ops.quant.int4 import Int4
from quire.tests.support import served_codes, tiny
from quire.tests.support.golden.families_moe import MOE_VARIANTS
from quire.tests.support.golden.folder import HERE, write_folder
from quire.tests.support.quantized_files import (
    FLOAT8,
    LLAMA,
    assert_dequantized,
    awq,
    bitsandbytes_4bit,
    bitsandbytes_8bit,
    check_damage,
    dense_of,
    fp8,
    gptq,
    hqq,
    mxfp4,
    nvfp4,
    pack_quantized,
    read,
)


def compressed_tensors_config(
    form: str, weights: dict, activations: dict | None = None, **options
) -> dict:
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "format": form,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    } | options


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}
# As llm-compressor 0.10 writes it.
FLOAT4 = {
    "actorder": None, "block_structure": None, "dynamic": False, "group_size": 16, "num_bits": 4,
    "observer": "static_minmax", "observer_kwargs": {}, "scale_dtype": "torch.float8_e4m3fn",
    "strategy": "tensor_group", "symmetric": True, "type": "float", "zp_dtype": None,
}  # fmt: skip
ROWS4 = FLOAT4 | {"dynamic": "local"}
MX4 = FLOAT4 | {"group_size": 32, "strategy": "group", "scale_dtype": "torch.uint8"}
# As auto-round 0.16 writes it.
AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "data_type": "int",
    "iters": 200,
    "autoround_version": "0.16.1",
    "act_bits": 16,
    "nsamples": 128,
    "enable_quanted_input": False,
    "block_name_to_quantize": "model.layers",
    "low_gpu_mem_usage": True,
}
AUTO_ROUND_2_BIT = AUTO_ROUND | {
    "packing_format": "auto_round",
    "sym": False,
    "bits": 2,
    "group_size": 32,
}


def hqq_config(bits: int = 4, size: Any = 64, axis: int = 1, **changes) -> dict:
    """HQQ's `quantization_config` as transformers writes it."""
    params = {
        "weight_quant_params": {
            "nbits": bits,
            "group_size": size,
            "axis": axis,
            "channel_wise": True,
            "view_as_float": False,
            "optimize": True,
            "round_zero": bits == 4,
        }
        | changes,
        "scale_quant_params": None,
        "zero_quant_params": None,
        "offload_meta": False,
    }
    return {"quant_method": "hqq", "quant_config": params, "skip_modules": ["lm_head"]}


# As modelopt 0.47 writes it into config.json, and older versions into hf_quant_config.json.
MODELOPT = {
    "config_groups": {
        "group_0": {
            "input_activations": {
                "dynamic": False,
                "num_bits": 4,
                "type": "float",
                "group_size": 16,
            },
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head"],
    "quant_algo": "NVFP4",
    "quant_method": "modelopt",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.47.0"},
}
MODELOPT_FILE = {
    "producer": {"name": "modelopt", "version": "0.23.0"},
    "quantization": {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
        "group_size": None,
    },
}
MODELOPT_NAMES = {"names": ("weight", "weight_scale", "weight_scale_2")}
PER_TENSOR_SCALE = {"scales": "one", "name": "weight_scale"}
# As transformers writes it.
BNB = {
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "quant_method": "bitsandbytes",
}
BNB8 = BNB | {
    "_load_in_4bit": False,
    "_load_in_8bit": True,
    "load_in_4bit": False,
    "load_in_8bit": True,
}
INTEGERS = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
BY_OUTPUT = {
    "num_bits": 4,
    "type": "int",
    "strategy": "channel",
    "group_size": None,
    "symmetric": True,
}
PACKED = "pack-quantized"

# (writer of a matrix, its options, quantization_config, Quire's format or None if dequantised)
CASES: dict[str, tuple[Any, dict, dict, str | None]] = {
    "nvfp4": (nvfp4, {}, compressed_tensors_config("nvfp4-pack-quantized", FLOAT4), "nvfp4"),
    "nvfp4-rows": (
        nvfp4,
        {},
        compressed_tensors_config("nvfp4-pack-quantized", FLOAT4, ROWS4),
        "nvfp4",
    ),
    "mxfp4": (mxfp4, {}, compressed_tensors_config("mxfp4-pack-quantized", MX4), "mxfp4"),
    "mxfp4-rows": (
        mxfp4,
        {},
        compressed_tensors_config("mxfp4-pack-quantized", MX4, MX4 | {"dynamic": True}),
        "mxfp4",
    ),
    "int8-128": (
        pack_quantized,
        {"group": 128},
        compressed_tensors_config(PACKED, INTEGERS),
        "int8-weights-128",
    ),
    "int8-32": (
        pack_quantized,
        {"group": 32},
        compressed_tensors_config(PACKED, INTEGERS | {"group_size": 32}),
        "int8-weights-32",
    ),
    "int4-outputs": (
        pack_quantized,
        {"bits": 4},
        compressed_tensors_config(PACKED, BY_OUTPUT),
        "int4-128",
    ),
    "int4-outputs-zero": (
        pack_quantized,
        {"bits": 4, "zero": True},
        compressed_tensors_config(PACKED, BY_OUTPUT | {"symmetric": False}),
        "int4-128-zero",
    ),
    "gptq-8-64": (
        gptq,
        {"bits": 8, "group": 64, "sym": True},
        GPTQ | {"bits": 8, "group_size": 64, "sym": True},
        "int8-weights-64",
    ),
    "gptq-8-16-v2": (
        gptq,
        {"bits": 8, "group": 16, "sym": True, "version": 2},
        GPTQ | {"bits": 8, "group_size": 16, "sym": True, "checkpoint_format": "gptq_v2"},
        "int8-weights-16",
    ),
    "gptq-8-all": (
        gptq,
        {"bits": 8, "group": -1, "sym": True},
        GPTQ | {"bits": 8, "group_size": -1, "sym": True},
        "int8-weights",
    ),
    "nf4": (bitsandbytes_4bit, {}, BNB, "nf4"),
    "nf4-nested": (bitsandbytes_4bit, {"nested": True}, BNB, "nf4"),
    "nf4-128": (bitsandbytes_4bit, {"block": 128}, BNB, "nf4"),
    "fp4": (bitsandbytes_4bit, {"kind": "fp4"}, BNB | {"bnb_4bit_quant_type": "fp4"}, "fp4"),
    "fp4-nested": (
        bitsandbytes_4bit,
        {"kind": "fp4", "nested": True},
        BNB | {"bnb_4bit_quant_type": "fp4"},
        "fp4",
    ),
    "round": (gptq, {"sym": True}, AUTO_ROUND, "int4-128"),
    "round-8": (
        gptq,
        {"sym": True, "bits": 8},
        AUTO_ROUND | {"bits": 8, "quant_method": "intel/auto-round"},
        "int8-weights-128",
    ),
    "round-2": (gptq, {"bits": 2, "group": 32, "version": 2}, AUTO_ROUND_2_BIT, "int4-32-zero"),
    "round-awq": (
        awq,
        {},
        AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "sym": False},
        "int4-128-zero",
    ),
    "hqq-4": (hqq, {}, hqq_config(), "int4-64-least"),
    "hqq-4-float": (hqq, {"view": np.float16}, hqq_config(view_as_float=True), "int4-64-least"),
    "hqq-2": (hqq, {"bits": 2, "group": 32}, hqq_config(2, 32), "int4-32-least"),
    "hqq-3": (hqq, {"bits": 3, "group": 128}, hqq_config(3, 128), "int4-128-least"),
    "hqq-8": (hqq, {"bits": 8}, hqq_config(8), "int8-weights-64-least"),
    "hqq-1-16": (hqq, {"bits": 1, "group": 16}, hqq_config(1, 16), None),
    "hqq-4-down": (hqq, {"axis": 0}, hqq_config(axis=0), None),
    "hqq-3-down": (hqq, {"axis": 0, "bits": 3}, hqq_config(3, axis=0), None),
    "opt-4": (nvfp4, MODELOPT_NAMES, MODELOPT, "nvfp4"),
    "opt-4-weights": (nvfp4, MODELOPT_NAMES, MODELOPT | {"quant_algo": "W4A16_NVFP4"}, "nvfp4"),
    "opt-8": (fp8, PER_TENSOR_SCALE, MODELOPT_FILE | {"quant_method": "modelopt"}, "fp8"),
    "opt-8-outputs": (
        fp8,
        PER_TENSOR_SCALE | {"scales": "flat"},
        MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        "fp8",
    ),
    "bnb-8": (bitsandbytes_8bit, {}, BNB8, "int8-weights"),
}


def write_checkpoint(
    folder,
    case: str,
    dense_modules: tuple[str, ...] = (),
    seed: int = 0,
    config: dict = LLAMA,
    **changes,
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
        if case.startswith("opt"):
            tensors[f"{stem}.input_scale"] = np.array(0.1, np.float32)
        if case.endswith("-rows"):
            tensors[f"{stem}.input_global_scale"] = np.ones(1, np.float32)
    tiny.write(folder, config | {"quantization_config": quantization | changes}, tensors)
    return tensors, expected


def tolerance(case: str) -> float:
    """Absolute tolerance: HQQ subtracts a float32 product, and FP4 scales are divided by twelve."""
    return 1e-7 if case.startswith(("hqq", "fp4")) else 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_matrices_match_their_format(tmp_path, case):
    _, expected = write_checkpoint(tmp_path, case)
    assert read_config(tmp_path).quant == CASES[case][3]
    weights = read(tmp_path)
    is_dequantized = CASES[case][3] is None
    assert isinstance(weights.layers[0].mlp.down_FD, np.ndarray) == is_dequantized
    assert_dequantized(weights, expected, 1e-6 if is_dequantized else 0, tolerance(case))
    np.testing.assert_array_equal(weights.embed_VD, expected["model.embed_tokens.weight"])


DENSE_MODULES = ("self_attn.o_proj", "layers.0.mlp.down_proj")
DENSE = {"bits": 16, "data_type": "float"}
WITHOUT_DENSE_MODULES = {
    "nvfp4-rows",
    "mxfp4-rows",
    "opt-8",
    "fp4",
    "fp4-nested",
    "round-8",
    "hqq-1-16",
    "hqq-4-down",
    "hqq-3-down",
}  # covered by another case, or dequantised anyway
DENSE_MODULES_BY_METHOD = {  # the key and value that exclude modules, by quant_method
    "compressed-tensors": (
        "ignore",
        ["lm_head", "re:.*self_attn.o_proj", "model.layers.0.mlp.down_proj"],
    ),
    "gptq": ("modules_to_not_convert", list(DENSE_MODULES)),
    "auto-round": (
        "extra_config",
        {
            "lm_head": DENSE,
            "model.layers.0.self_attn.o_proj": DENSE,
            "model.layers.0.input_layernorm": DENSE,
            r".*1\.self_attn\.o_proj.*": DENSE,
            r"layers\.0\.mlp\.down_proj$": DENSE,
        },
    ),
    "hqq": ("skip_modules", ["lm_head", *DENSE_MODULES]),
    "modelopt": (
        "ignore",
        ["*lm_head*", "model.layers.*.self_attn.o_proj", "model.layers.0.mlp.down*"],
    ),
    "bitsandbytes": (
        "llm_int8_skip_modules",
        ["lm_head", "self_attn.o_proj", "model.layers.0.mlp.down_proj"],
    ),
}


@pytest.mark.parametrize("case", [case for case in CASES if case not in WITHOUT_DENSE_MODULES])
@pytest.mark.slow
def test_excluded_modules_stay_dense(tmp_path, case):
    key, names = DENSE_MODULES_BY_METHOD[CASES[case][2]["quant_method"]]
    _, expected = write_checkpoint(tmp_path / "said", case, DENSE_MODULES, **{key: names})
    weights = read(tmp_path / "said")
    assert_dequantized(weights, expected, atol=tolerance(case))
    assert isinstance(weights.layers[1].attention.out_NHD, np.ndarray)
    assert isinstance(weights.layers[0].mlp.down_FD, np.ndarray)
    assert not isinstance(weights.layers[1].mlp.down_FD, np.ndarray)
    write_checkpoint(tmp_path / "unsaid", case, DENSE_MODULES)
    with pytest.raises(ModelError, match=r"self_attn.o_proj.weight' is not quantised"):
        read(tmp_path / "unsaid")


def test_blocks_across_rows_are_dequantized(tmp_path):
    """`down_proj` has inputs that 64 does not divide; other matrices stay quantised."""
    _, expected = write_checkpoint(tmp_path, "nf4", config=LLAMA | {"intermediate_size": 400})
    weights = read(tmp_path)
    assert isinstance(weights.layers[0].mlp.down_FD, np.ndarray)
    assert not isinstance(weights.layers[0].mlp.up_DGF, np.ndarray)
    np.testing.assert_allclose(
        weights.layers[0].mlp.down_FD, expected["model.layers.0.mlp.down_proj.weight"].T, rtol=1e-6
    )


def test_bitsandbytes_codes_stored_as_bfloat16(tmp_path):
    tensors, expected = write_checkpoint(tmp_path, "nf4", bnb_4bit_quant_storage="bfloat16")
    for name, value in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = value.reshape(1, -1).view(ml_dtypes.bfloat16).T
    save_file(tensors, tmp_path / "model.safetensors")
    assert_dequantized(read(tmp_path), expected)


def test_auto_round_modules_of_different_bits(tmp_path):
    """Fused matrices of different bits are stored as int8."""
    _, expected = write_checkpoint(tmp_path, "round")
    tensors = load_file(tmp_path / "model.safetensors")
    rng = np.random.default_rng(5)
    layers = range(LLAMA["num_hidden_layers"])
    eight_bit_names = [
        f"model.layers.{i}.{name}" for i in layers for name in ("self_attn.v_proj", "mlp.up_proj")
    ]
    two_bit_names = [f"model.layers.{i}.mlp.down_proj" for i in layers]
    for names, options in (
        (eight_bit_names, {"bits": 8, "group": 64, "sym": True}),
        (two_bit_names, {"bits": 2, "group": 64}),
    ):
        for stem in names:
            matrix_tensors, expected[f"{stem}.weight"] = gptq(
                rng, stem, expected[f"{stem}.weight"].shape, **options
            )
            tensors |= matrix_tensors
    extra = dict.fromkeys(eight_bit_names, {"bits": 8, "group_size": 64})
    extra |= {r".*mlp\.down_proj.*": {"bits": 2, "group_size": 64, "sym": False}}
    tiny.write(
        tmp_path, LLAMA | {"quantization_config": AUTO_ROUND | {"extra_config": extra}}, tensors
    )
    weights = read(tmp_path)
    for layer in weights.layers:
        assert layer.attention.qkv_DGH.code == layer.mlp.up_DGF.code == "int8"
        assert isinstance(layer.mlp.down_FD, Int4) and isinstance(layer.attention.out_NHD, Int4)
    assert_dequantized(weights, expected)


def test_gptqmodel_dynamic_patterns(tmp_path):
    """Also a quantised head, which is dequantised."""
    _, expected = write_checkpoint(tmp_path, "gptq-8-64", DENSE_MODULES[:1])
    tensors = load_file(tmp_path / "model.safetensors")
    rng = np.random.default_rng(5)
    name = "model.layers.1.mlp.down_proj"
    options = {"lm_head": {"sym": True, "bits": 8, "group": 64}, name: {"group": 32}}
    for stem, matrix_options in options.items():
        tensors.pop(f"{stem}.weight", None)
        matrix_tensors, expected[f"{stem}.weight"] = gptq(
            rng, stem, expected[f"{stem}.weight"].shape, **matrix_options
        )
        tensors |= matrix_tensors
    dynamic = {
        r"-:.*\.o_proj": {},
        r"+:.*\.1\.mlp\.down_proj": {"bits": 4, "group_size": 32, "sym": False},
    }
    quantization = CASES["gptq-8-64"][2] | {"dynamic": dynamic, "lm_head": True, "method": "gptq"}
    tiny.write(tmp_path, LLAMA | {"quantization_config": quantization}, tensors)
    weights = read(tmp_path)
    assert isinstance(weights.layers[1].mlp.down_FD, Int4)
    assert isinstance(weights.layers[0].mlp.down_FD, Grouped)
    assert isinstance(weights.layers[0].attention.out_NHD, np.ndarray)
    assert_dequantized(weights, expected)
    np.testing.assert_allclose(weights.head_VD, expected["lm_head.weight"], rtol=1e-6)


@pytest.mark.parametrize("case", ["mxfp4", "nvfp4"])
def test_experts_stored_as_separate_matrices(tmp_path, case):
    """One matrix per expert and projection."""
    write, options, quantization, _ = CASES[case]
    (variant,) = [candidate for candidate in MOE_VARIANTS if candidate.name == "mixtral"]
    with np.load(HERE / "mixtral.npz") as arrays:
        meta = json.loads(arrays["meta"].tobytes())
    write_folder(tmp_path, variant.config, meta["tensors"], meta["seed"])
    tensors = {}
    expected = {}
    rng = np.random.default_rng(0)
    for file in list(tmp_path.glob("model*")):
        tensors |= load_file(file) if file.suffix == ".safetensors" else {}
        file.unlink()
    for name in [name for name in tensors if ".experts." in name or "_proj" in name]:
        matrix_tensors, expected[name] = write(
            rng, name.removesuffix(".weight"), tensors.pop(name).shape, **options
        )
        tensors |= matrix_tensors
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = quantization | {
        "ignore": ["lm_head", r"re:.*block_sparse_moe\.gate$"]
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    moe = read(tmp_path).layers[1].moe
    assert isinstance(moe.down_EFD.each, Grouped)
    for e in range(4):
        gate, up, down = (
            expected[f"model.layers.1.block_sparse_moe.experts.{e}.w{n}.weight"].T
            for n in (1, 3, 2)
        )
        np.testing.assert_array_equal(dense_of(moe.down_EFD[e]), down)
        np.testing.assert_array_equal(
            dense_of(moe.up_EDGF[e]).reshape(len(gate), 2, -1), np.stack([gate, up], 1)
        )


def test_modelopt_settings_in_hf_quant_config(tmp_path):
    _, expected = write_checkpoint(tmp_path, "opt-8")
    tiny.write(tmp_path / "plain", LLAMA)
    (tmp_path / "config.json").write_text((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(MODELOPT_FILE))
    assert_dequantized(read(tmp_path), expected)


def test_modelopt_mixed_precision(tmp_path):
    """Fused matrices of different formats are dequantised; the others stay quantised."""
    rng = np.random.default_rng(0)
    tensors = {}
    expected = {}
    layers = {}
    for name, value in tiny.draw(LLAMA).items():
        tensors[name], expected[name], stem = value, value, name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or "layers.0.self_attn.o" in name:
            continue
        del tensors[name]
        is_fp4 = name.endswith(("down_proj.weight", "q_proj.weight"))
        write, options = (nvfp4, MODELOPT_NAMES) if is_fp4 else (fp8, PER_TENSOR_SCALE)
        matrix_tensors, expected[name] = write(rng, stem, value.shape, **options)
        tensors |= matrix_tensors
        layers[stem] = (
            {"quant_algo": "NVFP4", "group_size": 16} if is_fp4 else {"quant_algo": "FP8"}
        )
    mixed_options = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    tiny.write(tmp_path, LLAMA | {"quantization_config": MODELOPT | mixed_options}, tensors)
    weights = read(tmp_path)
    assert isinstance(weights.layers[0].attention.qkv_DGH, np.ndarray)
    assert isinstance(weights.layers[0].attention.out_NHD, np.ndarray)
    assert isinstance(weights.layers[1].attention.out_NHD, Fp8)
    assert isinstance(weights.layers[1].mlp.down_FD, Grouped)
    assert_dequantized(weights, expected, 1e-6)


SERVED_CASES = [
    "nvfp4-rows",
    "mxfp4",
    "int8-128",
    "int4-outputs",
    "gptq-8-all",
    "opt-4",
    "hqq-4",
    "hqq-8",
    "nf4-nested",
    "fp4",
    "bnb-8",
]


@pytest.mark.parametrize("case", SERVED_CASES)
@pytest.mark.slow
def test_engine_tokens_match_dense_and_are_batch_invariant(tmp_path, case):
    """The dense model has the dequantised weights."""
    _, expected = write_checkpoint(
        tmp_path / "codes", case, config=LLAMA | {"torch_dtype": "bfloat16"}
    )
    dense = {name: np.ascontiguousarray(value, np.float32) for name, value in expected.items()}
    tiny.write(tmp_path / "dense", LLAMA, dense)
    llm = LLM(tmp_path / "codes", skip_tokenizer_init=True, **served_codes.SIZES)
    served_codes.check(llm, tmp_path / "dense")


def change_json(tensor: np.ndarray, **changes) -> np.ndarray:
    """Change keys of the JSON in a tensor."""
    return np.frombuffer(json.dumps(json.loads(tensor.tobytes()) | changes).encode(), np.uint8)


STATE = "weight.quant_state.bitsandbytes__"
STEM = "model.layers.1.mlp.down_proj"
DAMAGE: list[tuple[str, str, Any, str]] = [
    ("nvfp4", ".weight_scale", lambda x: x[:-1], f"tensor '{STEM}.weight_scale' is"),
    (
        "nvfp4",
        ".weight_scale",
        lambda x: np.full_like(x, np.nan),
        f"'{STEM}.weight_scale' holds a scale that is no",
    ),
    (
        "nvfp4",
        ".weight_global_scale",
        lambda x: x * 0,
        f"'{STEM}.weight_scale' holds a scale that is not finite",
    ),
    (
        "nvfp4",
        ".weight_global_scale",
        lambda x: None,
        f"lacks the tensor '{STEM}.weight_global_scale'",
    ),
    ("nvfp4", ".weight_packed", lambda x: None, f"lacks the tensor '{STEM}.weight_packed'"),
    ("nvfp4", ".weight_packed", lambda x: x[:, :-4], "do not divide by the group of 16"),
    ("nvfp4", ".weight_packed", lambda x: x.view(np.int8), f"tensor '{STEM}.weight_packed' is"),
    ("mxfp4", ".weight_scale", lambda x: x * 0 + 255, "holds a scale of 255"),
    ("mxfp4", ".weight_scale", lambda x: x[:, :-1], f"tensor '{STEM}.weight_scale' is"),
    ("mxfp4", ".weight_packed", lambda x: x.reshape(-1), "must be a matrix"),
    ("int8-128", ".weight_scale", lambda x: x[:, :1], f"tensor '{STEM}.weight_scale' is"),
    ("int8-128", ".weight_shape", lambda x: x * [2, 1], f"tensor '{STEM}.weight_packed' is"),
    ("int4-outputs", ".weight_scale", lambda x: x[:-1], f"tensor '{STEM}.weight_scale' is"),
    (
        "int4-outputs-zero",
        ".weight_zero_point",
        lambda x: None,
        f"lacks the tensor '{STEM}.weight_zero_point'",
    ),
    (
        "gptq-8-64",
        ".qzeros",
        lambda x: x + 1,
        "zero point other than 128, and quantization_config says sym = True",
    ),
    (
        "gptq-8-64",
        ".scales",
        lambda x: x * np.float16(np.nan),
        f"tensor '{STEM}.scales' holds a scale",
    ),
    ("gptq-8-64", ".g_idx", lambda x: x[::-1], "says desc_act = False"),
    ("opt-4", ".weight_scale", lambda x: x[:, :-1], f"tensor '{STEM}.weight_scale' is"),
    ("opt-4", ".weight_scale", lambda x: None, "not quantised|shape"),
    ("opt-4", ".weight_scale_2", lambda x: None, f"lacks the tensor '{STEM}.weight_scale_2'"),
    (
        "opt-4",
        ".weight_scale_2",
        lambda x: x * np.float32(np.inf),
        f"tensor '{STEM}.weight_scale' holds a scale",
    ),
    ("opt-4", ".weight", lambda x: None, f"lacks the tensor '{STEM}.weight'"),
    ("opt-4", ".weight", lambda x: x[:, :-4], "do not divide by the group of 16"),
    ("opt-4", ".weight", lambda x: x.repeat(2, 1).view(FLOAT8), "says uint8"),
    ("opt-8", ".weight", lambda x: np.full_like(x, np.nan), "holds a code that is no number"),
    ("hqq-4", ".W_q", lambda x: x[:-1], f"tensor '{STEM}.W_q' is"),
    ("hqq-4", ".scale", lambda x: x[:-1], f"tensor '{STEM}.scale' is"),
    ("hqq-4", ".scale", lambda x: x * np.float16(np.nan), f"tensor '{STEM}.scale' holds a scale"),
    ("hqq-4", ".zero", lambda x: x * np.float16(np.nan), f"tensor '{STEM}.zero' holds a zero"),
    ("hqq-4", ".zero", lambda x: None, f"lacks the tensor '{STEM}.zero'"),
    ("hqq-4", ".nbits", lambda x: x * 2, f"tensor '{STEM}.nbits' holds 8, and"),
    ("hqq-4", ".axis", lambda x: x * 0, f"tensor '{STEM}.axis' holds 0, and"),
    ("hqq-4", ".shape", lambda x: x * 0, "which fill no groups"),
    ("nf4", ".weight", lambda x: x[:-1], f"tensor '{STEM}.weight' is"),
    ("nf4", ".weight", lambda x: None, f"lacks the tensor '{STEM}.weight'"),
    ("nf4", ".weight.absmax", lambda x: x[:-1], f"tensor '{STEM}.weight.absmax' is"),
    (
        "nf4",
        ".weight.absmax",
        lambda x: x * np.float32(np.inf),
        f"'{STEM}.weight.absmax' holds a scale that is no",
    ),
    ("nf4", ".weight.quant_map", lambda x: x[::-1], "holds another codebook than that of NF4"),
    (
        "nf4",
        ".weight.quant_map",
        lambda x: x * np.float32(np.nan),
        f"'{STEM}.weight.quant_map' holds a value that is not finite",
    ),
    ("nf4", f".{STATE}nf4", lambda x: x[:-1], "holds no JSON"),
    (
        "nf4",
        f".{STATE}nf4",
        lambda x: change_json(x, shape=[4, -1]),
        r"says shape = \[4, -1\]; it must be two sizes",
    ),
    (
        "nf4",
        f".{STATE}nf4",
        lambda x: change_json(x, blocksize=0),
        "says blocksize = 0; it must be a whole number",
    ),
    (
        "nf4",
        f".{STATE}nf4",
        lambda x: change_json(x, blocksize=1 << 40),
        "says blocksize = 1099511627776; it must be",
    ),
    (
        "nf4",
        f".{STATE}nf4",
        lambda x: change_json(x, nested_blocksize=1 << 40),
        "says nested_blocksize = 1099511627776",
    ),
    (
        "nf4",
        f".{STATE}nf4",
        lambda x: change_json(x, nested_blocksize=256),
        "says nested_offset = None",
    ),
    (
        "nf4",
        f".{STATE}nf4",
        lambda x: change_json(x, blocksize=32),
        f"tensor '{STEM}.weight.absmax' is",
    ),
    (
        "nf4-nested",
        ".weight.nested_absmax",
        lambda x: x[:-1],
        f"tensor '{STEM}.weight.nested_absmax' is",
    ),
    (
        "nf4-nested",
        ".weight.nested_quant_map",
        lambda x: None,
        f"lacks the tensor '{STEM}.weight.nested_quant_map'",
    ),
    ("fp4", f".{STATE}fp4", lambda x: None, f"lacks the tensor '{STEM}.{STATE}fp4'"),
    ("bnb-8", ".SCB", lambda x: x[:-1], f"tensor '{STEM}.SCB' is"),
    ("bnb-8", ".SCB", lambda x: x * np.float32(np.nan), f"tensor '{STEM}.SCB' holds a scale"),
    ("bnb-8", ".SCB", lambda x: None, f"lacks the tensor '{STEM}.SCB'"),
    ("bnb-8", ".weight", lambda x: x.view(np.uint8), f"tensor '{STEM}.weight' is"),
    ("bnb-8", ".weight_format", lambda x: x + 2, "says that the weight lies in tiles"),
]


@pytest.mark.parametrize(
    ("case", "ending", "change", "message"), DAMAGE, ids=[f"{x[0]}{x[1]}-{x[3]}" for x in DAMAGE]
)
@pytest.mark.slow
def test_error_names_the_damaged_tensor(tmp_path, case, ending, change, message):
    tensors, _ = write_checkpoint(tmp_path, case)
    check_damage(tmp_path, tensors, STEM + ending, change, message)


CONFIGS: list[tuple[dict, str]] = [
    (compressed_tensors_config("mxfp4-pack-quantized", FLOAT4), "format = 'mxfp4-pack-quantized'"),
    (
        compressed_tensors_config("nvfp4-pack-quantized", FLOAT4 | {"group_size": 64}),
        "group_size = 64",
    ),
    (
        compressed_tensors_config("nvfp4-pack-quantized", FLOAT4 | {"symmetric": False}),
        "symmetric = False",
    ),
    (
        compressed_tensors_config("mxfp4-pack-quantized", MX4 | {"group_size": 16}),
        "group_size = 16",
    ),
    (compressed_tensors_config("int-quantized", INTEGERS), "format = 'int-quantized'"),
    (compressed_tensors_config(PACKED, INTEGERS | {"symmetric": False}), "symmetric = False"),
    (compressed_tensors_config(PACKED, INTEGERS, INTEGERS), "input_activations"),
    (compressed_tensors_config(PACKED, BY_OUTPUT, BY_OUTPUT), "input_activations"),
    (hqq_config(5), "nbits = 5"),
    (hqq_config(size=None), "group_size = None"),
    (hqq_config(size=12), "group_size = 12"),
    (hqq_config(axis=2), "axis = 2"),
    (hqq_config(channel_wise=False), "channel_wise = False"),
    (hqq_config() | {"quant_config": {"self_attn.q_proj": {}}}, "quant_config.self_attn.q_proj"),
    (hqq_config() | {"quant_config": None}, "quant_config = None"),
    (AUTO_ROUND | {"packing_format": "mlx"}, "packing_format = 'mlx'"),
    (AUTO_ROUND | {"packing_format": None}, "packing_format = None"),
    (AUTO_ROUND | {"act_bits": 8}, "act_bits = 8"),
    (AUTO_ROUND | {"data_type": "mx_fp"}, "data_type = 'mx_fp'"),
    (AUTO_ROUND | {"data_type": "float"}, "data_type = 'float'"),
    (AUTO_ROUND | {"rotation_configs": [{"kind": "hadamard"}]}, "rotation_configs"),
    (AUTO_ROUND | {"extra_config": {"lm_head": {"bits": 5}}}, "bits = 5"),
    (
        AUTO_ROUND | {"extra_config": {"lm_head": {"spin": 5}}},
        "extra_config.lm_head.spin = 5 is not understood",
    ),
    (AUTO_ROUND | {"extra_config": {"(a+)+": DENSE}}, "extra_config.(a+)+"),
    (AUTO_ROUND | {"extra_config": [1]}, "extra_config = [1]"),
    (AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "bits": 8}, "bits = 8"),
    (MODELOPT | {"quant_algo": "W4A8_AWQ"}, "quant_algo = 'W4A8_AWQ'"),
    (MODELOPT | {"quant_algo": "NVFP4_AWQ", "pre_quant_scale": True}, "pre_quant_scale = True"),
    (MODELOPT | {"quant_algo": None}, "quant_algo = None"),
    (MODELOPT | {"group_size": 32}, "group_size = 32"),
    (MODELOPT | {"ignore": ["model.layers.[01].mlp"]}, "model.layers.[01].mlp"),
    (MODELOPT | {"spin": 1}, "spin = 1 is not understood"),
    (
        MODELOPT_FILE | {"quant_method": "modelopt", "quantization": 4},
        "quantization_config.quantization = 4",
    ),
    (MODELOPT | {"quant_algo": "MIXED_PRECISION"}, "quantized_layers = None"),
    (
        MODELOPT
        | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W8A16"}}},
        "a.quant_algo",
    ),
    (BNB | {"load_in_8bit": True}, "load_in_4bit = True"),
    (BNB | {"load_in_4bit": False}, "load_in_4bit = False"),
    (BNB | {"bnb_4bit_quant_type": "af4"}, "bnb_4bit_quant_type = 'af4'"),
    (BNB8 | {"llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight = True"),
    (BNB | {"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules"),
    (BNB | {"spin": 1}, "spin = 1 is not understood"),
]


@pytest.mark.parametrize(
    ("config", "words"), CONFIGS, ids=[f"{i}-{words}" for i, (_, words) in enumerate(CONFIGS)]
)
def test_error_names_the_unsupported_config_key(tmp_path, config, words):
    tiny.write(tmp_path, LLAMA | {"quantization_config": config}, {"x": np.zeros(1, np.float32)})
    with pytest.raises(ModelError, match="quantization_config") as error:
        read_config(tmp_path)
    assert words in str(error.value) and "\n" not in str(error.value)
