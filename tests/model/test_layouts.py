"""`quire quantize --layout`: files as GPTQModel and AutoAWQ write them, decoded here bit by bit as
their kernels do.
"""

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
FLOATS = [
    ("compressed-tensors", "mxfp4"),
    ("compressed-tensors", "nvfp4"),
    ("compressed-tensors", "int8-weights-32"),
    ("bitsandbytes", "nf4"),
    ("fp8", "fp8-weights-128"),
]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def save(dense: Path, out: Path, layout: str, name: str) -> Path:
    quantized.save(dense, out, read_config(dense, quantization=name), layout=layout)
    return out


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in find_tensors(folder).items()}


def said(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def field(words: np.ndarray, index: int, bits: int) -> np.ndarray:
    """Code `index` of words that are one after the other along the first axis."""
    per = 32 // bits
    return (words.view(np.uint32)[index // per].astype(np.int64) >> (bits * (index % per))) & (
        (1 << bits) - 1
    )


def gptq_means(tensors: dict, stem: str, config: dict) -> tuple[np.ndarray, np.ndarray]:
    """A matrix [out, in] in float64, and the scale of each weight."""
    bits = config["bits"]
    less = config["checkpoint_format"] == "gptq"
    qweight, qzeros, scales, g_idx = (
        tensors[f"{stem}.{x}"] for x in ("qweight", "qzeros", "scales", "g_idx")
    )
    columns = len(g_idx)
    rows = scales.shape[1]
    codes = np.stack([field(qweight, i, bits) for i in range(columns)])
    zeros = np.stack([field(qzeros.T, o, bits) for o in range(rows)], axis=1) + less
    scale = scales.astype(np.float64)[g_idx]
    return ((codes - zeros[g_idx]) * scale).T, scale.T


def awq_means(tensors: dict, stem: str, config: dict) -> tuple[np.ndarray, np.ndarray]:
    """AutoAWQ lays the outputs 0 2 4 6 1 3 5 7 of eight into a word, from its lowest bits."""

    def spread(words: np.ndarray) -> np.ndarray:
        out = np.zeros((len(words), 8 * words.shape[1]), np.int64)
        for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            out[:, output::8] = words.view(np.uint32).astype(np.int64) >> 4 * place & 15
        return out

    qweight, qzeros, scales = (tensors[f"{stem}.{x}"] for x in ("qweight", "qzeros", "scales"))
    size = config["group_size"]
    scale = scales.astype(np.float64).repeat(size, 0)
    return ((spread(qweight) - spread(qzeros).repeat(size, 0)) * scale).T, scale.T


MEANS = {"gptq": gptq_means, "awq": awq_means}


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_each_weight_is_the_nearest(tmp_path, layout, name):
    dense = tiny.write(tmp_path / "dense", LLAMA)
    dense["model.layers.0.mlp.up_proj.weight"][3, :64] = 0
    tiny.write(tmp_path / "dense", LLAMA, dense)
    out = save(tmp_path / "dense", tmp_path / "out", layout, name)
    found = tensors_of(out)
    config = said(out)
    for tensor, value in dense.items():
        stem = tensor.removesuffix(".weight")
        if not stem.endswith("_proj"):
            np.testing.assert_array_equal(found[tensor], value)
            continue
        meant, scale = MEANS[layout](found, stem, config)
        groups = np.abs(value.reshape(len(value), -1, config["group_size"]))
        step = np.abs(scale)
        if not name.endswith("zero"):
            largest = groups.max(2).repeat(config["group_size"], 1)
            np.testing.assert_allclose(
                step, largest / (127 if "int8" in name else 8), rtol=1e-3, atol=1e-7
            )
        near = np.abs(meant - value) <= step * 0.501 + 1e-7
        # the last code of a group may be a step away from its largest weight
        each = meant.reshape(groups.shape)
        last = (
            (each == each.max(2, keepdims=True)) | (each == each.min(2, keepdims=True))
        ).reshape(meant.shape)
        assert np.all(near | (last & (np.abs(meant - value) <= 1.01 * step)))
        assert near.mean() > 0.95


def assert_same(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (one.dtype, np.asarray(one).tobytes()) == (other.dtype, np.asarray(other).tobytes())


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_it_is_read_as_what_rounding_while_loading_makes(tmp_path, layout, name):
    tiny.write(tmp_path / "dense", LLAMA)
    out = save(tmp_path / "dense", tmp_path / "out", layout, name)
    config = read_config(out)
    assert (config.quant, config.stored.method) == (name, layout)
    assert_same(read(out).layers, read(tmp_path / "dense", quantization=name).layers)


def test_the_configuration_is_their_own(tmp_path):
    """Keys as GPTQModel's QuantizeConfig and AutoAWQ's AwqConfig have them."""
    tiny.write(tmp_path / "dense", LLAMA)
    gptq = said(save(tmp_path / "dense", tmp_path / "gptq", "gptq", "int4-64"))
    wanted = {
        "bits": 4,
        "group_size": 64,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
        "quant_method": "gptq",
    }
    assert gptq | wanted == gptq and "dynamic" not in gptq
    assert (gptq["checkpoint_format"], gptq["pack_dtype"]) == ("gptq", "int32")
    asymmetric = said(save(tmp_path / "dense", tmp_path / "zero", "gptq", "int4-64-zero"))
    assert (asymmetric["sym"], asymmetric["checkpoint_format"]) == (False, "gptq_v2")
    assert said(save(tmp_path / "dense", tmp_path / "awq", "awq", "int4-64-zero")) == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }


def test_a_zero_of_zero_stays_one(tmp_path):
    """A group without a negative weight: version 1 stores its zero less one, which no four bits
    hold.
    """
    dense = tiny.write(tmp_path / "dense", LLAMA)
    value = dense["model.layers.1.mlp.down_proj.weight"] = np.abs(
        dense["model.layers.1.mlp.down_proj.weight"]
    )
    tiny.write(tmp_path / "dense", LLAMA, dense)
    for layout in ("gptq", "awq"):
        out = save(tmp_path / "dense", tmp_path / layout, layout, "int4-32-zero")
        meant, scale = MEANS[layout](tensors_of(out), "model.layers.1.mlp.down_proj", said(out))
        assert np.all(np.abs(meant - value) <= 0.501 * scale)


SLOW = [("awq", "awq", "int4-32-zero"), ("gptq", "gptq", "int8-weights-32")]


@pytest.mark.parametrize(
    ("method", "layout", "name"),
    [
        ("gptq", "gptq", "int4-32"),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in SLOW),
    ],
)
def test_methods_choose_the_same_codes_for_each_layout(tmp_path, method, layout, name):
    """Also with the largest inputs first: the groups stay neighbours, so that g_idx counts up."""
    config = LLAMA | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    tiny.write(tmp_path / "dense", config, tiny.even(tiny.shapes(config)))
    ids = np.random.default_rng(0).integers(0, 96, (6, 16)).tolist()
    folders = {}
    for each in (layout, "compressed-tensors"):
        out = tmp_path / each
        session.save(
            tmp_path / "dense",
            out,
            read_config(tmp_path / "dense", quantization=name),
            method,
            ids,
            layout=each,
        )
        folders[each] = read(out).layers
    assert_same(*folders.values())
    found = tensors_of(tmp_path / layout)
    plain = save(tmp_path / "dense", tmp_path / "rtn", layout, name)
    assert {name: x.shape for name, x in found.items()} == {
        name: x.shape for name, x in tensors_of(plain).items()
    }
    assert any(
        not np.array_equal(x, tensors_of(plain)[name])
        for name, x in found.items()
        if "qweight" in name
    )
    if layout == "gptq":
        np.testing.assert_array_equal(
            found["model.layers.0.mlp.down_proj.g_idx"], np.arange(96) // 32
        )


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_routers_stay_dense(tmp_path, layout):
    variant = next(variant for variant in MOE_VARIANTS if variant.name == "qwen3-moe")
    with np.load(HERE / f"{variant.name}.npz") as arrays:
        meta = json.loads(arrays["meta"].tobytes())
    dense = write_folder(tmp_path / "dense", variant.config, meta["tensors"], meta["seed"])
    out = save(dense, tmp_path / "out", layout, "int4-32-zero")
    found = tensors_of(out)
    routers = [name for name in found if name.endswith("mlp.gate.weight")]
    assert routers and any(name.endswith("experts.0.up_proj.qweight") for name in found)
    stored = split_quantization(json.loads((out / "config.json").read_text()))[1]
    assert not any(stored.group_of(name.removesuffix(".weight")) for name in routers)
    assert all(
        stored.group_of(name.removesuffix(".qweight"))
        for name in found
        if name.endswith(".qweight")
    )
    assert_same(read(out).layers, read(dense, quantization="int4-32-zero").layers)


def test_the_command(tmp_path):
    out = tmp_path / "out"
    tiny.write(tmp_path / "dense", LLAMA)
    asked = [
        "quantize",
        str(tmp_path / "dense"),
        str(out),
        "--quantization",
        "int4-64-zero",
        "--layout",
        "awq",
    ]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "14 matrices in int4-64-zero, laid out as awq" in " ".join(done.output.split())
    assert said(out)["quant_method"] == "awq"


@pytest.mark.parametrize(
    ("layout", "name", "words"),
    [
        ("awq", "int8", ("'awq'", "int4-32-zero", "'int8', which layout compressed-tensors has")),
        ("awq", "int4-64", ("'int4-64', which layout compressed-tensors or gptq has",)),
        ("gptq", "fp8", ("int8-weights-128", "'fp8'")),
        ("marlin", "int4", ("'marlin'", ", ".join(LAYOUTS))),
    ],
)
def test_what_a_layout_has_not(tmp_path, layout, name, words):
    tiny.write(tmp_path / "dense", LLAMA)
    with pytest.raises(ModelError) as caught:
        save(tmp_path / "dense", tmp_path / "out", layout, name)
    for word in words:
        assert word in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_shapes_that_a_layout_cannot_have(tmp_path):
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
            save(tmp_path / folder, tmp_path / "out", "awq", "int4-32-zero")
        for word in words:
            assert word in str(caught.value)


# Floats in blocks


def pairs(data: np.ndarray) -> np.ndarray:
    """Codes of which the even one is in the low half of a byte."""
    return np.stack([data & 15, data >> 4], -1).reshape(len(data), -1)


def mxfp4_means(tensors: dict, stem: str) -> np.ndarray:
    scale = 2.0 ** (tensors[f"{stem}.weight_scale"].astype(np.float64) - 127)
    return E2M1[pairs(tensors[f"{stem}.weight_packed"])] * scale.repeat(32, 1)


def nvfp4_means(tensors: dict, stem: str) -> np.ndarray:
    scale, whole = (
        tensors[f"{stem}.weight_{x}"].astype(np.float64) for x in ("scale", "global_scale")
    )
    scale /= whole
    return E2M1[pairs(tensors[f"{stem}.weight_packed"])] * scale.repeat(16, 1)


def nf4_means(tensors: dict, stem: str) -> np.ndarray:
    at = f"{stem}.weight"
    state = json.loads(tensors[f"{at}.quant_state.bitsandbytes__nf4"].tobytes())
    scales = tensors[f"{at}.nested_quant_map"].astype(np.float64)[tensors[f"{at}.absmax"]]
    scales *= (
        tensors[f"{at}.nested_absmax"]
        .astype(np.float64)
        .repeat(state["nested_blocksize"])[: len(scales)]
    )
    scales += state["nested_offset"]
    codes = np.stack([tensors[at][:, 0] >> 4, tensors[at][:, 0] & 15], -1).reshape(-1)
    means = tensors[f"{at}.quant_map"].astype(np.float64)[codes] * scales.repeat(state["blocksize"])
    return means.reshape(state["shape"])


def fp8_means(tensors: dict, stem: str) -> np.ndarray:
    codes = tensors[f"{stem}.weight"].astype(np.float64)
    each = tensors[f"{stem}.weight_scale_inv"].astype(np.float64).repeat(128, 0).repeat(128, 1)
    return codes * each[: codes.shape[0], : codes.shape[1]]


def bytes_means(tensors: dict, stem: str) -> np.ndarray:
    words = tensors[f"{stem}.weight_packed"]
    codes = np.stack([field(words.T, i, 8) for i in range(4 * words.shape[1])], axis=1) - 128
    return codes * tensors[f"{stem}.weight_scale"].astype(np.float64).repeat(32, 1)


FLOAT_MEANS = {
    "mxfp4": mxfp4_means,
    "nvfp4": nvfp4_means,
    "nf4": nf4_means,
    "fp8-weights-128": fp8_means,
    "int8-weights-32": bytes_means,
}


def written(folder: Path) -> dict[str, np.ndarray]:
    """Matrices of which some have groups of zeros, tiny numbers, and sides that 128 does not
    divide.
    """
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


def bound(name: str, value: np.ndarray) -> np.ndarray:
    """How far from each weight its code may be: half of the widest step, in parts of what a group's
    largest is.
    """

    def largest(size: int) -> np.ndarray:
        return np.abs(value.reshape(len(value), -1, size)).max(2).astype(np.float64).repeat(size, 1)

    if name == "mxfp4":  # 4 is at most the largest, and steps there are 2; from 6 to 7 is cut off
        return largest(32) / 4
    if name == "nvfp4":  # the largest is 6; the scale is off by a sixteenth at most
        return largest(16) * (1 / 6 * 17 / 16 + 1 / 16)
    # the widest step is 0.304; scales are off by some thousandths of the largest of 256
    if name == "nf4":
        return largest(64) * 0.153 + 0.015 * np.abs(value).max()
    if name == "int8-weights-32":
        return largest(32) / 254 * 1.01
    return np.maximum(np.abs(value) / 16, 1e-3 * np.abs(value).max()) * 1.01


@pytest.mark.parametrize(("layout", "name"), FLOATS)
def test_floats_and_bytes_in_blocks(tmp_path, layout, name):
    """Each weight is near, and what is read are the file's own codes."""
    dense = written(tmp_path / "dense")
    out = save(tmp_path / "dense", tmp_path / "out", layout, name)
    found = tensors_of(out)
    weights = read(out)
    assert read_config(out).quant == name
    expected = dict(dense)
    for tensor, value in dense.items():
        stem = tensor.removesuffix(".weight")
        if not stem.endswith("_proj"):
            np.testing.assert_array_equal(found[tensor], value)
            continue
        meant = expected[tensor] = FLOAT_MEANS[name](found, stem)
        assert np.all(np.abs(meant - value) <= bound(name, value) + 1e-9), tensor
        assert not meant[value == 0].any() or name == "nf4"
    assert_dequantized(weights, expected, rtol=3e-7, atol=1e-8 if name == "nf4" else 1e-9)
    if name in ("mxfp4", "int8-weights-32"):  # both ways of rounding are one
        assert_same(weights.layers, read(tmp_path / "dense", quantization=name).layers)


def test_floats_are_the_nearest(tmp_path):
    """Of sixteen numbers, by looking at all."""
    dense = written(tmp_path / "dense")
    for layout, name, size in (
        ("compressed-tensors", "mxfp4", 32),
        ("compressed-tensors", "nvfp4", 16),
    ):
        found = tensors_of(save(tmp_path / "dense", tmp_path / name, layout, name))
        stem = "model.layers.1.mlp.down_proj"
        sixes = {f"{stem}.weight_packed": np.full((256, 160), 0x77, np.uint8)}
        scale = FLOAT_MEANS[name](found | sixes, stem) / 6
        value = dense[f"{stem}.weight"].astype(np.float64)
        meant = FLOAT_MEANS[name](found, stem)
        best = np.abs(value[..., None] - E2M1 * scale[..., None]).min(-1)
        np.testing.assert_allclose(np.abs(value - meant), best, atol=1e-7)
        # the exponent of the largest, the next where that is nearer to 8 than to 6
        if name == "mxfp4":
            largest = np.abs(value).reshape(256, -1, size).max(2)
            right = 2.0 ** (np.floor(np.log2(largest)) - 2)
            right = np.where(largest > 7 * right, 2 * right, right)
            np.testing.assert_array_equal(scale[:, ::size], right)


def test_matrices_that_are_loaded_together_share_the_scale_of_all(tmp_path):
    """vLLM has one for queries, keys and values, and one for gate and up."""
    written(tmp_path / "dense")
    found = tensors_of(save(tmp_path / "dense", tmp_path / "out", "compressed-tensors", "nvfp4"))
    dense = tensors_of(tmp_path / "dense")
    for names in (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    ):
        stems = [f"model.layers.1.{name}" for name in names]
        largest = max(np.abs(dense[f"{stem}.weight"]).max() for stem in stems)
        for stem in stems:
            np.testing.assert_allclose(
                found[f"{stem}.weight_global_scale"], [448 * 6 / largest], rtol=1e-6
            )


def test_blocks_that_a_layout_cannot_have(tmp_path):
    tiny.write(tmp_path / "dense", LLAMA | {"intermediate_size": 80})
    for layout, name, size in (("bitsandbytes", "nf4", 64), ("compressed-tensors", "mxfp4", 32)):
        with pytest.raises(
            ModelError, match=f"down_proj.weight' has 80 inputs, which do not divide .* of {size}"
        ):
            save(tmp_path / "dense", tmp_path / "out", layout, name)


def test_other_dtypes_are_said(tmp_path):
    import ml_dtypes

    config = LLAMA | {"torch_dtype": "bfloat16"}
    tiny.write(tmp_path / "dense", config, tiny.draw(config, ml_dtypes.bfloat16))
    found = tensors_of(save(tmp_path / "dense", tmp_path / "out", "bitsandbytes", "nf4"))
    state = json.loads(
        found["model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"].tobytes()
    )
    assert state["dtype"] == "bfloat16"
    assert said(tmp_path / "out") | {
        "load_in_4bit": True,
        "bnb_4bit_use_double_quant": True,
    } == said(tmp_path / "out")
