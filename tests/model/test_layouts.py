"""`quire quantize --layout`: files in other tools' layouts, decoded as those tools' kernels do."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from quire.__main__ import app
from quire.model.checkpoint import quantized
from quire.model.checkpoint.loader import read_config
from quire.model.checkpoint.published import LAYOUTS, split_quantization
from quire.model.checkpoint.safetensors import find_tensors
from quire.model.config import ModelError
from quire.model.quantize import session
from quire.tests.support import tiny
from quire.tests.support.golden.families_moe import MOE_VARIANTS
from quire.tests.support.golden.folder import HERE, write_folder
from quire.tests.support.quantized_files import LLAMA, assert_dequantized, read

CASES = [
    ("gptq", "int4-32"),
    ("gptq", "int4-64-zero"),
    ("gptq", "int4-128"),
    ("gptq", "int8-weights-128"),
    ("awq", "int4-32-zero"),
    ("awq", "int4-128-zero"),
]
BLOCK_FORMATS = [
    ("compressed-tensors", "mxfp4"),
    ("compressed-tensors", "nvfp4"),
    ("compressed-tensors", "int8-weights-32"),
    ("bitsandbytes", "nf4"),
    ("fp8", "fp8-weights-128"),
]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def quantize_folder(dense: Path, out: Path, layout: str, name: str) -> Path:
    quantized.save(dense, out, read_config(dense, quantization=name), layout=layout)
    return out


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in find_tensors(folder).items()}


def read_quantization_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def unpack_code(words: np.ndarray, index: int, bits: int) -> np.ndarray:
    """Unpack code `index` from words along the first axis."""
    per = 32 // bits
    return (words.view(np.uint32)[index // per].astype(np.int64) >> (bits * (index % per))) & (
        (1 << bits) - 1
    )


def dequantize_gptq(tensors: dict, stem: str, config: dict) -> tuple[np.ndarray, np.ndarray]:
    """(float64 matrix [out, in], scale of each weight)."""
    bits = config["bits"]
    zero_offset = config["checkpoint_format"] == "gptq"
    qweight, qzeros, scales, g_idx = (
        tensors[f"{stem}.{x}"] for x in ("qweight", "qzeros", "scales", "g_idx")
    )
    columns = len(g_idx)
    rows = scales.shape[1]
    codes = np.stack([unpack_code(qweight, i, bits) for i in range(columns)])
    zeros = np.stack([unpack_code(qzeros.T, o, bits) for o in range(rows)], axis=1) + zero_offset
    scale = scales.astype(np.float64)[g_idx]
    return ((codes - zeros[g_idx]) * scale).T, scale.T


def dequantize_awq(tensors: dict, stem: str, config: dict) -> tuple[np.ndarray, np.ndarray]:
    """AutoAWQ packs outputs 0 2 4 6 1 3 5 7 into a word, from the lowest bits up."""

    def unpack_words(words: np.ndarray) -> np.ndarray:
        out = np.zeros((len(words), 8 * words.shape[1]), np.int64)
        for position, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            out[:, output::8] = words.view(np.uint32).astype(np.int64) >> 4 * position & 15
        return out

    qweight, qzeros, scales = (tensors[f"{stem}.{x}"] for x in ("qweight", "qzeros", "scales"))
    size = config["group_size"]
    scale = scales.astype(np.float64).repeat(size, 0)
    return ((unpack_words(qweight) - unpack_words(qzeros).repeat(size, 0)) * scale).T, scale.T


DEQUANTIZERS = {"gptq": dequantize_gptq, "awq": dequantize_awq}


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_every_weight_is_rounded_to_the_nearest_code(tmp_path, layout, name):
    dense = tiny.write(tmp_path / "dense", LLAMA)
    dense["model.layers.0.mlp.up_proj.weight"][3, :64] = 0
    tiny.write(tmp_path / "dense", LLAMA, dense)
    out = quantize_folder(tmp_path / "dense", tmp_path / "out", layout, name)
    tensors = read_tensors(out)
    config = read_quantization_config(out)
    for tensor, value in dense.items():
        stem = tensor.removesuffix(".weight")
        if not stem.endswith("_proj"):
            np.testing.assert_array_equal(tensors[tensor], value)
            continue
        values, scale = DEQUANTIZERS[layout](tensors, stem, config)
        groups = np.abs(value.reshape(len(value), -1, config["group_size"]))
        step = np.abs(scale)
        if not name.endswith("zero"):
            largest = groups.max(2).repeat(config["group_size"], 1)
            np.testing.assert_allclose(
                step, largest / (127 if "int8" in name else 8), rtol=1e-3, atol=1e-7
            )
        is_nearest = np.abs(values - value) <= step * 0.501 + 1e-7
        # the first and last codes of a group may be one step away from its extremes
        grouped = values.reshape(groups.shape)
        is_last_code = (
            (grouped == grouped.max(2, keepdims=True)) | (grouped == grouped.min(2, keepdims=True))
        ).reshape(values.shape)
        assert np.all(is_nearest | (is_last_code & (np.abs(values - value) <= 1.01 * step)))
        assert is_nearest.mean() > 0.95


def assert_same_leaves(actual, expected) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for actual_leaf, expected_leaf in zip(
        jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
        assert (actual_leaf.dtype, np.asarray(actual_leaf).tobytes()) == (
            expected_leaf.dtype,
            np.asarray(expected_leaf).tobytes(),
        )


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_layout_loads_as_quantization_at_load_time(tmp_path, layout, name):
    tiny.write(tmp_path / "dense", LLAMA)
    out = quantize_folder(tmp_path / "dense", tmp_path / "out", layout, name)
    config = read_config(out)
    assert (config.quant, config.stored.method) == (name, layout)
    assert_same_leaves(read(out).layers, read(tmp_path / "dense", quantization=name).layers)


def test_quantization_config_matches_gptqmodel_and_autoawq(tmp_path):
    """Keys of GPTQModel's QuantizeConfig and AutoAWQ's AwqConfig."""
    tiny.write(tmp_path / "dense", LLAMA)
    gptq = read_quantization_config(
        quantize_folder(tmp_path / "dense", tmp_path / "gptq", "gptq", "int4-64")
    )
    expected = {
        "bits": 4,
        "group_size": 64,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
        "quant_method": "gptq",
    }
    assert gptq | expected == gptq and "dynamic" not in gptq
    assert (gptq["checkpoint_format"], gptq["pack_dtype"]) == ("gptq", "int32")
    asymmetric = read_quantization_config(
        quantize_folder(tmp_path / "dense", tmp_path / "zero", "gptq", "int4-64-zero")
    )
    assert (asymmetric["sym"], asymmetric["checkpoint_format"]) == (False, "gptq_v2")
    assert read_quantization_config(
        quantize_folder(tmp_path / "dense", tmp_path / "awq", "awq", "int4-64-zero")
    ) == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }


def test_zero_point_zero_is_stored(tmp_path):
    """A group without negative weights: GPTQ version 1 would store its zero point minus one."""
    dense = tiny.write(tmp_path / "dense", LLAMA)
    value = dense["model.layers.1.mlp.down_proj.weight"] = np.abs(
        dense["model.layers.1.mlp.down_proj.weight"]
    )
    tiny.write(tmp_path / "dense", LLAMA, dense)
    for layout in ("gptq", "awq"):
        out = quantize_folder(tmp_path / "dense", tmp_path / layout, layout, "int4-32-zero")
        values, scale = DEQUANTIZERS[layout](
            read_tensors(out), "model.layers.1.mlp.down_proj", read_quantization_config(out)
        )
        assert np.all(np.abs(values - value) <= 0.501 * scale)


NIGHTLY_CASES = [("awq", "awq", "int4-32-zero"), ("gptq", "gptq", "int8-weights-32")]


@pytest.mark.parametrize(
    ("method", "layout", "name"),
    [
        ("gptq", "gptq", "int4-32"),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY_CASES),
    ],
)
def test_calibrated_codes_do_not_depend_on_the_layout(tmp_path, method, layout, name):
    """Also with `act_order`: groups stay contiguous, so g_idx is ascending."""
    config = LLAMA | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    tiny.write(tmp_path / "dense", config, tiny.even(tiny.shapes(config)))
    ids = np.random.default_rng(0).integers(0, 96, (6, 16)).tolist()
    folders = {}
    for layout_name in (layout, "compressed-tensors"):
        out = tmp_path / layout_name
        session.save(
            tmp_path / "dense",
            out,
            read_config(tmp_path / "dense", quantization=name),
            method,
            ids,
            layout=layout_name,
        )
        folders[layout_name] = read(out).layers
    assert_same_leaves(*folders.values())
    tensors = read_tensors(tmp_path / layout)
    rtn_folder = quantize_folder(tmp_path / "dense", tmp_path / "rtn", layout, name)
    assert {name: x.shape for name, x in tensors.items()} == {
        name: x.shape for name, x in read_tensors(rtn_folder).items()
    }
    assert any(
        not np.array_equal(x, read_tensors(rtn_folder)[name])
        for name, x in tensors.items()
        if "qweight" in name
    )
    if layout == "gptq":
        np.testing.assert_array_equal(
            tensors["model.layers.0.mlp.down_proj.g_idx"], np.arange(96) // 32
        )


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_routers_stay_dense(tmp_path, layout):
    variant = next(variant for variant in MOE_VARIANTS if variant.name == "qwen3-moe")
    with np.load(HERE / f"{variant.name}.npz") as arrays:
        meta = json.loads(arrays["meta"].tobytes())
    dense = write_folder(tmp_path / "dense", variant.config, meta["tensors"], meta["seed"])
    out = quantize_folder(dense, tmp_path / "out", layout, "int4-32-zero")
    tensors = read_tensors(out)
    routers = [name for name in tensors if name.endswith("mlp.gate.weight")]
    assert routers and any(name.endswith("experts.0.up_proj.qweight") for name in tensors)
    stored = split_quantization(json.loads((out / "config.json").read_text()))[1]
    assert not any(stored.group_of(name.removesuffix(".weight")) for name in routers)
    assert all(
        stored.group_of(name.removesuffix(".qweight"))
        for name in tensors
        if name.endswith(".qweight")
    )
    assert_same_leaves(read(out).layers, read(dense, quantization="int4-32-zero").layers)


def test_quantize_command_with_layout(tmp_path):
    out = tmp_path / "out"
    tiny.write(tmp_path / "dense", LLAMA)
    arguments = [
        "quantize",
        str(tmp_path / "dense"),
        str(out),
        "--quantization",
        "int4-64-zero",
        "--layout",
        "awq",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "14 matrices in int4-64-zero, laid out as awq" in " ".join(result.output.split())
    assert read_quantization_config(out)["quant_method"] == "awq"


@pytest.mark.parametrize(
    ("layout", "name", "words"),
    [
        ("awq", "int8", ("'awq'", "int4-32-zero", "'int8', which layout compressed-tensors has")),
        ("awq", "int4-64", ("'int4-64', which layout compressed-tensors or gptq has",)),
        ("gptq", "fp8", ("int8-weights-128", "'fp8'")),
        ("marlin", "int4", ("'marlin'", ", ".join(LAYOUTS))),
    ],
)
def test_formats_that_a_layout_lacks_are_rejected(tmp_path, layout, name, words):
    tiny.write(tmp_path / "dense", LLAMA)
    with pytest.raises(ModelError) as caught:
        quantize_folder(tmp_path / "dense", tmp_path / "out", layout, name)
    for word in words:
        assert word in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_shapes_that_awq_cannot_pack_are_rejected(tmp_path):
    tiny.write(tmp_path / "columns", LLAMA | {"intermediate_size": 100})
    tiny.write(
        tmp_path / "rows",
        LLAMA | {"hidden_size": 64, "num_attention_heads": 16, "num_key_value_heads": 1},
    )
    for folder, words in (
        ("columns", ("down_proj", "100 inputs", "32")),
        ("rows", ("k_proj", "4 outputs")),
    ):
        with pytest.raises(ModelError) as caught:
            quantize_folder(tmp_path / folder, tmp_path / "out", "awq", "int4-32-zero")
        for word in words:
            assert word in str(caught.value)


# Block formats


def unpack_nibbles(data: np.ndarray) -> np.ndarray:
    """Unpack two codes per byte, the even one from the low half."""
    return np.stack([data & 15, data >> 4], -1).reshape(len(data), -1)


def dequantize_mxfp4(tensors: dict, stem: str) -> np.ndarray:
    scale = 2.0 ** (tensors[f"{stem}.weight_scale"].astype(np.float64) - 127)
    return E2M1[unpack_nibbles(tensors[f"{stem}.weight_packed"])] * scale.repeat(32, 1)


def dequantize_nvfp4(tensors: dict, stem: str) -> np.ndarray:
    scale, global_scale = (
        tensors[f"{stem}.weight_{x}"].astype(np.float64) for x in ("scale", "global_scale")
    )
    scale /= global_scale
    return E2M1[unpack_nibbles(tensors[f"{stem}.weight_packed"])] * scale.repeat(16, 1)


def dequantize_nf4(tensors: dict, stem: str) -> np.ndarray:
    weight_name = f"{stem}.weight"
    state = json.loads(tensors[f"{weight_name}.quant_state.bitsandbytes__nf4"].tobytes())
    scales = tensors[f"{weight_name}.nested_quant_map"].astype(np.float64)[
        tensors[f"{weight_name}.absmax"]
    ]
    scales *= (
        tensors[f"{weight_name}.nested_absmax"]
        .astype(np.float64)
        .repeat(state["nested_blocksize"])[: len(scales)]
    )
    scales += state["nested_offset"]
    codes = np.stack(
        [tensors[weight_name][:, 0] >> 4, tensors[weight_name][:, 0] & 15], -1
    ).reshape(-1)
    values = tensors[f"{weight_name}.quant_map"].astype(np.float64)[codes] * scales.repeat(
        state["blocksize"]
    )
    return values.reshape(state["shape"])


def dequantize_fp8(tensors: dict, stem: str) -> np.ndarray:
    codes = tensors[f"{stem}.weight"].astype(np.float64)
    element_scale = (
        tensors[f"{stem}.weight_scale_inv"].astype(np.float64).repeat(128, 0).repeat(128, 1)
    )
    return codes * element_scale[: codes.shape[0], : codes.shape[1]]


def dequantize_int8(tensors: dict, stem: str) -> np.ndarray:
    words = tensors[f"{stem}.weight_packed"]
    codes = np.stack([unpack_code(words.T, i, 8) for i in range(4 * words.shape[1])], axis=1) - 128
    return codes * tensors[f"{stem}.weight_scale"].astype(np.float64).repeat(32, 1)


BLOCK_DEQUANTIZERS = {
    "mxfp4": dequantize_mxfp4,
    "nvfp4": dequantize_nvfp4,
    "nf4": dequantize_nf4,
    "fp8-weights-128": dequantize_fp8,
    "int8-weights-32": dequantize_int8,
}


def write_special_weights(folder: Path) -> dict[str, np.ndarray]:
    """Write weights with zero groups, tiny numbers and sizes that 128 does not divide."""
    config = LLAMA | {"intermediate_size": 320}
    tensors = tiny.draw(config)
    rng = np.random.default_rng(1)
    for name, value in tensors.items():
        if name.endswith("_proj.weight"):
            value *= (0.02 * np.exp(rng.standard_normal((len(value), 1)))).astype(np.float32)
    tensors["model.layers.0.mlp.up_proj.weight"][3, :64] = 0
    tensors["model.layers.0.mlp.up_proj.weight"][4] = 0
    tiny.write(folder, config, tensors)
    return tensors


def max_error(name: str, value: np.ndarray) -> np.ndarray:
    """Largest rounding error per weight: half of the widest step, from the group's maximum."""

    def largest(size: int) -> np.ndarray:
        return np.abs(value.reshape(len(value), -1, size)).max(2).astype(np.float64).repeat(size, 1)

    if (
        name == "mxfp4"
    ):  # the maximum maps to [4, 8), where steps are 2 and values above 6 are clipped
        return largest(32) / 4
    if name == "nvfp4":  # the maximum maps to 6; the scale is rounded by at most 1/16
        return largest(16) * (1 / 6 * 17 / 16 + 1 / 16)
    # the widest step is 0.304; scales are rounded to 8 bits in blocks of 256
    if name == "nf4":
        return largest(64) * 0.153 + 0.015 * np.abs(value).max()
    if name == "int8-weights-32":
        return largest(32) / 254 * 1.01
    return np.maximum(np.abs(value) / 16, 1e-3 * np.abs(value).max()) * 1.01


@pytest.mark.parametrize(("layout", "name"), BLOCK_FORMATS)
def test_block_formats_are_accurate_and_read_exactly(tmp_path, layout, name):
    """Rounding errors are bounded, and the loaded weights equal the file's values."""
    dense = write_special_weights(tmp_path / "dense")
    out = quantize_folder(tmp_path / "dense", tmp_path / "out", layout, name)
    tensors = read_tensors(out)
    weights = read(out)
    assert read_config(out).quant == name
    expected = dict(dense)
    for tensor, value in dense.items():
        stem = tensor.removesuffix(".weight")
        if not stem.endswith("_proj"):
            np.testing.assert_array_equal(tensors[tensor], value)
            continue
        values = expected[tensor] = BLOCK_DEQUANTIZERS[name](tensors, stem)
        assert np.all(np.abs(values - value) <= max_error(name, value) + 1e-9), tensor
        assert not values[value == 0].any() or name == "nf4"
    assert_dequantized(weights, expected, rtol=3e-7, atol=1e-8 if name == "nf4" else 1e-9)
    if name in ("mxfp4", "int8-weights-32"):  # the same rounding as at load time
        assert_same_leaves(weights.layers, read(tmp_path / "dense", quantization=name).layers)


def test_4_bit_floats_are_rounded_to_the_nearest(tmp_path):
    """Compared with all sixteen values."""
    dense = write_special_weights(tmp_path / "dense")
    for layout, name, size in (
        ("compressed-tensors", "mxfp4", 32),
        ("compressed-tensors", "nvfp4", 16),
    ):
        tensors = read_tensors(quantize_folder(tmp_path / "dense", tmp_path / name, layout, name))
        stem = "model.layers.1.mlp.down_proj"
        all_codes_six = {f"{stem}.weight_packed": np.full((256, 160), 0x77, np.uint8)}
        scale = BLOCK_DEQUANTIZERS[name](tensors | all_codes_six, stem) / 6
        value = dense[f"{stem}.weight"].astype(np.float64)
        values = BLOCK_DEQUANTIZERS[name](tensors, stem)
        best = np.abs(value[..., None] - E2M1 * scale[..., None]).min(-1)
        np.testing.assert_allclose(np.abs(value - values), best, atol=1e-7)
        # the maximum's exponent, plus one if the scaled maximum is nearer to 8 than to 6
        if name == "mxfp4":
            largest = np.abs(value).reshape(256, -1, size).max(2)
            expected_scale = 2.0 ** (np.floor(np.log2(largest)) - 2)
            expected_scale = np.where(
                largest > 7 * expected_scale, 2 * expected_scale, expected_scale
            )
            np.testing.assert_array_equal(scale[:, ::size], expected_scale)


def test_fused_matrices_share_the_nvfp4_global_scale(tmp_path):
    """vLLM has one global scale for q, k and v, and one for gate and up."""
    write_special_weights(tmp_path / "dense")
    tensors = read_tensors(
        quantize_folder(tmp_path / "dense", tmp_path / "out", "compressed-tensors", "nvfp4")
    )
    dense = read_tensors(tmp_path / "dense")
    for names in (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    ):
        stems = [f"model.layers.1.{name}" for name in names]
        largest = max(np.abs(dense[f"{stem}.weight"]).max() for stem in stems)
        for stem in stems:
            np.testing.assert_allclose(
                tensors[f"{stem}.weight_global_scale"], [448 * 6 / largest], rtol=1e-6
            )


def test_inputs_must_divide_into_blocks(tmp_path):
    tiny.write(tmp_path / "dense", LLAMA | {"intermediate_size": 80})
    for layout, name, size in (("bitsandbytes", "nf4", 64), ("compressed-tensors", "mxfp4", 32)):
        with pytest.raises(
            ModelError, match=f"down_proj.weight' has 80 inputs, which do not divide .* of {size}"
        ):
            quantize_folder(tmp_path / "dense", tmp_path / "out", layout, name)


def test_bitsandbytes_records_the_dtype(tmp_path):
    import ml_dtypes

    config = LLAMA | {"torch_dtype": "bfloat16"}
    tiny.write(tmp_path / "dense", config, tiny.draw(config, ml_dtypes.bfloat16))
    tensors = read_tensors(
        quantize_folder(tmp_path / "dense", tmp_path / "out", "bitsandbytes", "nf4")
    )
    state = json.loads(
        tensors["model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"].tobytes()
    )
    assert state["dtype"] == "bfloat16"
    assert read_quantization_config(tmp_path / "out") | {
        "load_in_4bit": True,
        "bnb_4bit_use_double_quant": True,
    } == read_quantization_config(tmp_path / "out")
