"""Quantised checkpoints: those of `quire quantize`, in compressed-tensors format, and damaged."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from quire import LLM, SamplingParams
from quire.__main__ import app
from quire.model.checkpoint import hub, quantized
from quire.model.checkpoint.loader import load, load_weights, read_config, weight_specs
from quire.model.checkpoint.placement import Placement
from quire.model.checkpoint.published import split_quantization
from quire.model.config import ModelError
from quire.model.planning import cost
from quire.ops.quant.fp8 import Fp8
from quire.ops.quant.int4 import Int4
from quire.ops.quant.int8 import Int8
from quire.ops.quant.stack import Stack
from quire.sharding.mesh import make_mesh
from quire.sharding.spec import nbytes
from quire.tests.support import tiny
from quire.tests.support.cases import cases
from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.golden.families_moe import MOE_VARIANTS
from quire.tests.support.golden.folder import HERE, write_folder

FORMATS = [
    "int8",
    "int8-weights",
    "int4",
    "int4-32-zero",
    "int4-64",
    "int4-64-zero",
    "int4-128",
    "int4-128-zero",
    "int3-64",
    "int2-32-zero",
    "fp8",
    "fp8-weights",
]
D = 128
F = 256
N = 4
K = 2
H = 32
LLAMA = tiny.LLAMA | {"hidden_size": D, "intermediate_size": F}
QWEN3 = LLAMA | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": H,
    "tie_word_embeddings": True,
}
MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj") + (
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


def draw(config: dict, dtype=np.float32) -> dict[str, np.ndarray]:
    tensors = tiny.draw(config, dtype)
    for i in range(config["num_hidden_layers"] if config["model_type"] == "qwen3" else 0):
        tensors |= {
            f"model.layers.{i}.self_attn.{x}_norm.weight": np.full(H, 1.5, dtype) for x in "qk"
        }
    return tensors


def load_host_weights(folder: Path, quantization: str | None = None, dtype: str = "auto"):
    """Load the weights as numpy arrays, without placement on devices."""
    return load_weights(
        folder, read_config(folder, dtype, quantization=quantization), place=lambda spec, leaf: leaf
    )


def quantize(folder: Path, out: Path, name: str) -> Path:
    quantized.save(folder, out, read_config(folder, quantization=name))
    return out


def assert_same_leaves(actual, expected) -> None:
    """Check that two trees have the same structure and bit-identical arrays."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for actual_leaf, expected_leaf in zip(
        jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
        assert (actual_leaf.dtype, actual_leaf.shape) == (expected_leaf.dtype, expected_leaf.shape)
        assert np.asarray(actual_leaf).tobytes() == np.asarray(expected_leaf).tobytes()


def checkpoint_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def update_config(folder: Path, **values) -> None:
    """Replace keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def assert_rejected(work, *words: str) -> str:
    """Check that `work` raises a one-line ModelError that contains `words`; return its message."""
    with pytest.raises(ModelError) as caught:
        work()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


# Checkpoints written by Quire


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=lambda config: config["model_type"])
def test_written_folder_matches_quantization_at_load_time(tmp_path, config, name):
    tiny.write(tmp_path / "dense", config, draw(config))
    out = quantize(tmp_path / "dense", tmp_path / "out", name)
    assert_same_leaves(load_host_weights(out), load_host_weights(tmp_path / "dense", name))
    assert read_config(out, "bfloat16").quant.replace("int4-32", "int4") == name.replace(
        "int4-32", "int4"
    )
    bits = (
        8
        if name.startswith(("int8", "fp8"))
        else {"2": 2, "3": 3.25, "4": 4}[name[3]]
        + (16 + 4 * ("zero" in name)) / int((name.split("-") + ["32"])[1])
    )
    matrices = 2 * (2 * D * D + 2 * D * D // 2 + 3 * D * F)
    assert checkpoint_bytes(tmp_path / "dense") - checkpoint_bytes(out) == pytest.approx(
        matrices * (4 - bits / 8), rel=0.02
    )


@pytest.mark.parametrize(
    "stored", [np.float16, ml_dtypes.bfloat16], ids=lambda dtype: np.dtype(dtype).name
)
@pytest.mark.parametrize("name", ["int8", "int4-64-zero"])
def test_dtypes_and_shards_of_the_source_are_kept(tmp_path, stored, name):
    """Quantisation starts from bfloat16, as float16 checkpoints are loaded as bfloat16.

    Tensors that are not quantised keep their dtype.
    """
    config = LLAMA | {"torch_dtype": np.dtype(stored).name}
    dense = tiny.write(tmp_path / "dense", config, draw(config, stored), shards=3)
    (tmp_path / "dense" / "tokenizer.json").write_text("{}")
    (tmp_path / "dense" / "modeling.py").write_text("raise SystemExit")
    out = quantize(tmp_path / "dense", tmp_path / "out", name)
    assert_same_leaves(load_host_weights(out), load_host_weights(tmp_path / "dense", name))
    files = {file.name for file in out.iterdir()}
    assert files == {
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
    }
    written_tensors = {
        name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()
    }
    for tensor in (
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.1.input_layernorm.weight",
    ):
        assert written_tensors[tensor].dtype == stored
        assert written_tensors[tensor].tobytes() == dense[tensor].tobytes()
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == written_tensors.keys()


def test_embedding_and_head_take_the_narrower_dtype(tmp_path):
    """A float32 checkpoint written with --dtype bfloat16; norms stay float32."""
    dense = tiny.write(tmp_path / "dense", LLAMA | {"torch_dtype": "float32"}, draw(LLAMA))
    options = ["--quantization", "int4", "--dtype", "bfloat16"]
    result = CliRunner().invoke(
        app, ["quantize", str(tmp_path / "dense"), str(tmp_path / "out"), *options]
    )
    assert result.exit_code == 0, result.output
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert tensors[name].tobytes() == dense[name].astype(ml_dtypes.bfloat16).tobytes()
    norm = "model.layers.1.input_layernorm.weight"
    assert tensors[norm].tobytes() == dense[norm].tobytes()
    assert read_config(tmp_path / "out").dtype == "bfloat16"
    hf = json.loads((tmp_path / "dense" / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    (tmp_path / "dense" / "config.json").write_text(json.dumps(hf))
    assert_same_leaves(
        load_host_weights(tmp_path / "out"), load_host_weights(tmp_path / "dense", "int4")
    )
    gguf = [
        "quantize",
        str(tmp_path / "dense"),
        str(tmp_path / "m.gguf"),
        *options,
        "--layout",
        "gguf",
    ]
    result = CliRunner().invoke(app, gguf)
    assert result.exit_code and "--dtype bfloat16 is for folders" in str(result.exception)


def family_variants():
    return [
        variant
        for variant in (*VARIANTS, *MOE_VARIANTS)
        if "quantization_config" not in variant.config
    ]


@pytest.mark.parametrize("variant", family_variants(), ids=lambda variant: variant.name)
@pytest.mark.slow
def test_every_family_is_quantized_as_at_load_time(tmp_path, variant):
    """A family's weight layout applies to codes and scales too; fused experts stay dense."""
    with np.load(HERE / f"{variant.name}.npz") as arrays:
        meta = json.loads(arrays["meta"].tobytes())
    dense = write_folder(tmp_path / "dense", variant.config, meta["tensors"], meta["seed"])
    for name in ("int8", "int4"):
        try:
            out = quantize(dense, tmp_path / name, name)
        except ModelError as error:
            # some variants are too small for groups of 32
            assert "do not divide by the group of 32; int8 has none" in str(error)
            assert name == "int4"
            continue
        expected = load_host_weights(dense, name)
        stacked = (tensor for tensor, shape in meta["tensors"].items() if len(shape) == 3)
        if any(".experts." in tensor or ".block_sparse_moe." in tensor for tensor in stacked):
            expected = replace_experts(expected, load_host_weights(dense))
        assert_same_leaves(load_host_weights(out), expected)


def replace_experts(weights, source):
    """The weights with the expert stacks of `source`."""

    def replace_layer(layer, source_layer):
        if layer.moe is None:
            return layer
        assert isinstance(layer.moe.up_EDGF, Stack) and isinstance(
            source_layer.moe.up_EDGF, np.ndarray
        )
        return layer.replace(
            moe=layer.moe.replace(
                up_EDGF=source_layer.moe.up_EDGF, down_EFD=source_layer.moe.down_EFD
            )
        )

    return weights.replace(layers=tuple(map(replace_layer, weights.layers, source.layers)))


def write_moe_folder(folder: Path, name: str) -> Path:
    """Write the folder of a mixture-of-experts variant."""
    variant = next(variant for variant in MOE_VARIANTS if variant.name == name)
    with np.load(HERE / f"{name}.npz") as arrays:
        meta = json.loads(arrays["meta"].tobytes())
    return write_folder(folder, variant.config, meta["tensors"], meta["seed"])


@pytest.mark.parametrize(("name", "is_dense"), [("qwen3-moe", False), ("gemma4-moe", True)])
def test_experts_are_quantized_if_stored_as_separate_tensors(tmp_path, name, is_dense):
    dense = write_moe_folder(tmp_path / "dense", name)
    result = CliRunner().invoke(
        app, ["quantize", str(dense), str(tmp_path / "out"), "--quantization", "int8"]
    )
    assert result.exit_code == 0, result.output
    assert ("experts stay as they are" in result.output) == is_dense
    form = split_quantization(json.loads((tmp_path / "out" / "config.json").read_text()))[1]
    tensor_names = {
        name for file in (tmp_path / "out").glob("*.safetensors") for name in load_file(file)
    }
    quantized_names = {
        name.removesuffix("_scale") for name in tensor_names if name.endswith("_scale")
    }
    assert quantized_names and any(".experts." in name for name in quantized_names) != is_dense
    assert any(form.group_of(name) for name in tensor_names if ".experts." in name) != is_dense
    if not is_dense:
        linear = {
            name
            for name in tensor_names
            if name.endswith(("proj.weight", "mlp.gate.weight", "lm_head.weight"))
        }
        assert {
            name for name in linear if form.group_of(name.removesuffix(".weight"))
        } == quantized_names
        assert (
            quantized_names == {name for name in linear if name.endswith("proj.weight")} != linear
        )


@pytest.mark.slow
def test_engine_generates_the_same_tokens_from_the_written_folder(tmp_path):
    """Same tokens as with quantisation at load time."""
    tiny.write(tmp_path / "dense", LLAMA, draw(LLAMA))
    options = {"skip_tokenizer_init": True, "max_num_seqs": 1, "max_num_batched_tokens": 8}
    request = [5, 17, 3], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for name in ("int8", "int4-64-zero", "fp8"):
        out = quantize(tmp_path / "dense", tmp_path / name, name)
        answers = [
            list(llm.generate(*request)[0].outputs[0].token_ids)
            for llm in (LLM(out, **options), LLM(tmp_path / "dense", quantization=name, **options))
        ]
        assert answers[0] == answers[1]
        assert len(set(answers[0])) > 2


@pytest.mark.slow
def test_quantize_command_on_the_bundled_model(tmp_path):
    """The folder is smaller, and generates the text and plan of quantisation at load time."""
    out = str(tmp_path / "out")
    prompt = ["--prompt", "Once upon a time", "--temperature", "0", "--max-tokens", "12"]
    result = CliRunner().invoke(app, ["quantize", "quill", out, "--quantization", "int4-64"])
    assert result.exit_code == 0, result.output
    assert "48 matrices in int4-64" in result.output
    bundled = hub.resolve("quill")
    assert checkpoint_bytes(tmp_path / "out") < checkpoint_bytes(bundled) / 3
    names = {file.name for file in bundled.iterdir()}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names
    texts = [
        CliRunner().invoke(app, ["generate", *model, *prompt]).stdout
        for model in ([out], ["quill", "--quantization", "int4-64"])
    ]
    assert texts[0] == texts[1] != ""
    plans = [
        json.loads(CliRunner().invoke(app, ["plan", *model, "--json"]).stdout)
        for model in ([out], ["quill", "--quantization", "int4-64"])
    ]
    assert plans[0] | {"model": "quill"} == plans[1]


def test_quantize_rejects_existing_outputs_and_unsupported_sources(tmp_path):
    dense = tmp_path / "dense"
    out = tmp_path / "out"
    tiny.write(dense, LLAMA, draw(LLAMA))
    quantize(dense, out, "int8")
    contents = {file: file.read_bytes() for file in out.iterdir()}
    assert_rejected(lambda: quantize(dense, out, "int4"), str(out), "already")
    assert {file: file.read_bytes() for file in out.iterdir()} == contents
    assert_rejected(lambda: quantize(out, tmp_path / "again", "int8"), "quantised already")
    assert_rejected(
        lambda: quantize(out, tmp_path / "again", "int4"), "'int4'", "'int8'", "--quantization"
    )
    assert_rejected(lambda: quantize(dense, tmp_path / "again", "int5"), "'int5'", "int4")
    assert_rejected(
        lambda: quantize(dense, tmp_path / "again", "nf4"), "'nf4'", "layout bitsandbytes has"
    )
    result = CliRunner().invoke(app, ["convert", str(dense), str(tmp_path / "orbax")])
    assert result.exit_code == 0, result.output
    assert_rejected(lambda: quantize(tmp_path / "orbax", tmp_path / "again", "int8"), "converted")
    small = tmp_path / "narrow"
    tiny.write(small, tiny.LLAMA | {"intermediate_size": 96})
    assert_rejected(
        lambda: quantize(small, tmp_path / "again", "int4-64"),
        "down_proj",
        "96 inputs",
        "could be 32",
    )
    odd_inputs = tmp_path / "odd"
    tiny.write(odd_inputs, tiny.LLAMA | {"intermediate_size": 33})
    assert_rejected(lambda: quantize(odd_inputs, tmp_path / "again", "int4"), "33 inputs")
    assert sorted(tmp_path.iterdir()) == sorted([dense, small, odd_inputs, out, tmp_path / "orbax"])


def test_failed_write_leaves_no_files(tmp_path):
    dense = tmp_path / "dense"
    tiny.write(dense, LLAMA, draw(LLAMA))
    config = read_config(dense, quantization="int8")

    def fail(count):
        if count == D * F * 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantized.save(dense, tmp_path / "out", config, fail)
    assert list(tmp_path.iterdir()) == [dense]
    (tmp_path / "file").write_text("x")
    assert_rejected(
        lambda: quantized.save(dense, tmp_path / "file" / "out", config), "cannot be written"
    )


# Checkpoints in the formats of other tools


def packed_words(codes, bits: int) -> np.ndarray:
    """Pack rows of codes into int32 words, code by code."""
    rows = []
    for row in codes.tolist():
        words = []
        for at in range(0, len(row), 32 // bits):
            word = sum(
                (code + 2 ** (bits - 1)) << bits * i
                for i, code in enumerate(row[at : at + 32 // bits])
            )
            words.append(word - 2**32 if word >= 2**31 else word)
        rows.append(words)
    return np.array(rows, np.int32)


def weights_spec(bits: int, group: int | None = None, zero: bool = False, **options) -> dict:
    """`weights` of a config group, with all keys that llm-compressor writes."""
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": group,
        "num_bits": bits,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group" if group else "channel",
        "symmetric": not zero,
        "type": "int",
    } | options


TOKEN_SPEC = weights_spec(8, dynamic=True, strategy="token", observer="memoryless")


def compressed_tensors_config(
    weights: dict, activations: dict | None = None, form: str = "pack-quantized", **options
) -> dict:
    group = {
        "input_activations": activations,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": form,
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    } | options


FP8_SPEC = weights_spec(8, type="float")
CASES = {
    "w8a8": (
        compressed_tensors_config(weights_spec(8), TOKEN_SPEC, "int-quantized"),
        ml_dtypes.bfloat16,
        "int8",
    ),
    "w8a16-bytes": (
        compressed_tensors_config(weights_spec(8), None, "int-quantized"),
        np.float32,
        "int8-weights",
    ),
    "w8a16-words": (compressed_tensors_config(weights_spec(8)), np.float16, "int8-weights"),
    "w4a16-32": (compressed_tensors_config(weights_spec(4, 32)), ml_dtypes.bfloat16, "int4-32"),
    "w4a16-64-zero": (
        compressed_tensors_config(weights_spec(4, 64, True)),
        np.float16,
        "int4-64-zero",
    ),
    "w4a16-128": (compressed_tensors_config(weights_spec(4, 128)), np.float32, "int4-128"),
    "w3a16-64": (compressed_tensors_config(weights_spec(3, 64)), np.float16, "int3-64"),
    "w2a16-32-zero": (
        compressed_tensors_config(weights_spec(2, 32, True)),
        ml_dtypes.bfloat16,
        "int2-32-zero",
    ),
    "fp8": (
        compressed_tensors_config(FP8_SPEC, TOKEN_SPEC | {"type": "float"}, "float-quantized"),
        ml_dtypes.bfloat16,
        "fp8",
    ),
    "fp8-a16": (
        compressed_tensors_config(FP8_SPEC, None, "naive-quantized"),
        np.float32,
        "fp8-weights",
    ),
    "w4a16-128-zero": (
        compressed_tensors_config(weights_spec(4, 128, True)),
        ml_dtypes.bfloat16,
        "int4-128-zero",
    ),
}


INT_BITS_PREFIXES = ("w4", "w3", "w2")
CASE_NAMES = {name for _, _, name in CASES.values()} | {
    "int4-32-zero",
    "int4-64",
    "fp8-weights-128",
}


def random_stored_matrix(rng, stem: str, shape: tuple[int, int], case: str, flat: bool = False):
    """Tensors of a random quantised matrix, and its float64 values."""
    config, dtype, name = CASES[case]
    weights = config["config_groups"]["group_0"]["weights"]
    bits = weights["num_bits"]
    rows, columns = shape
    group = weights["group_size"] or columns
    half = 2 ** (bits - 1)
    codes = rng.integers(-half, half, shape)
    scale = (rng.integers(1, 200, (rows, columns // group)) * rng.choice([1, -1]) / 2**14).astype(
        dtype
    )
    zero = (
        rng.integers(-half, half, (rows, columns // group))
        if "zero" in name
        else np.zeros((rows, columns // group))
    )
    dense = (codes - zero.repeat(group, 1)) * scale.astype(np.float64).repeat(group, 1)
    tensors = {f"{stem}.weight_scale": scale[:, 0] if flat else scale}
    if name.startswith("fp8"):
        floats = (codes * 1.7).astype(ml_dtypes.float8_e4m3fn)
        return tensors | {f"{stem}.weight": floats}, floats.astype(np.float64) * scale.astype(
            np.float64
        )
    if config["format"] == "int-quantized":
        return tensors | {f"{stem}.weight": codes.astype(np.int8)}, dense
    tensors |= {
        f"{stem}.weight_packed": packed_words(codes, bits),
        f"{stem}.weight_shape": np.array(shape),
    }
    if "zero" in name:
        tensors[f"{stem}.weight_zero_point"] = np.ascontiguousarray(packed_words(zero.T, bits).T)
    return tensors, dense


def write_compressed_tensors_folder(
    folder: Path, case: str, ignore=("lm_head",), seed: int = 0, flat: bool = False
):
    """Write a folder in llm-compressor's format; return its tensors and float64 matrices."""
    rng = np.random.default_rng(seed)
    dense = draw(LLAMA)
    tensors = {}
    expected = {}
    for name, value in dense.items():
        stem = name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or stem in ignore:
            tensors[name], expected[name] = value, value.astype(np.float64)
            continue
        matrix_tensors, expected[name] = random_stored_matrix(rng, stem, value.shape, case, flat)
        tensors |= matrix_tensors
    tiny.write(
        folder, LLAMA | {"quantization_config": CASES[case][0] | {"ignore": list(ignore)}}, tensors
    )
    return tensors, expected


def dequantize(leaf) -> np.ndarray:
    """Float64 values [*in, *out] of a quantised node's arrays."""
    if isinstance(leaf, Fp8):
        return leaf.codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * leaf.scale
    if isinstance(leaf, Int8):
        return leaf.codes.astype(np.float64) * leaf.scale
    if not isinstance(leaf, Int4):
        return leaf.astype(np.float64)
    out = np.zeros((math.prod(leaf.into), math.prod(leaf.out)))
    side = min(len(out), 128)  # inputs of a block; the last block ends with the last input
    for k in range(len(out)):
        half, offset = divmod(k - min(k // side * side, len(out) - side), side // 2)
        code = leaf.nibbles[k // side * (side // 2) + offset] >> 4 * half & 15
        zero = 8.0 if leaf.zero is None else leaf.zero[k // leaf.group].astype(np.float64)
        out[k] = (code - zero) * leaf.scale[k // leaf.group]
    return out.reshape(*leaf.into, *leaf.out)


def assert_matrices_equal(weights, expected: dict[str, np.ndarray]) -> None:
    """Compare each matrix with the checkpoint's."""
    for i, layer in enumerate(weights.layers):
        q, k, v, o, gate, up, down = (
            expected[f"model.layers.{i}.{name}.weight"].T for name in MATRICES
        )
        qkv = np.concatenate([q.reshape(D, N, H), k.reshape(D, K, H), v.reshape(D, K, H)], axis=1)
        np.testing.assert_array_equal(dequantize(layer.attention.qkv_DGH), qkv)
        np.testing.assert_array_equal(dequantize(layer.attention.out_NHD), o.reshape(N, H, D))
        np.testing.assert_array_equal(dequantize(layer.mlp.up_DGF), np.stack([gate, up], axis=1))
        np.testing.assert_array_equal(dequantize(layer.mlp.down_FD), down)


@pytest.mark.parametrize("case", CASES)
def test_compressed_tensors_folder_is_loaded_exactly(tmp_path, case):
    """Codes, scales and zero points are loaded without rounding."""
    _, expected = write_compressed_tensors_folder(tmp_path, case)
    config = read_config(tmp_path)
    assert config.quant == CASES[case][2]
    weights = load_host_weights(tmp_path)
    assert isinstance(
        weights.layers[0].mlp.up_DGF,
        Int4 if case[:2] in INT_BITS_PREFIXES else Fp8 if "fp8" in case else Int8,
    )
    assert getattr(weights.layers[0].mlp.up_DGF, "dynamic", True) == (
        case in ("w8a8", "fp8") or case[:2] in INT_BITS_PREFIXES
    )
    assert_matrices_equal(weights, expected)
    progress = []
    placed = load(tmp_path, config, Placement(make_mesh()), progress.append)
    assert_same_leaves(jax.tree.map(np.asarray, placed), weights)
    assert cost.weight_bytes(config, weight_specs(config)) == nbytes(placed)
    assert 0 < sum(progress) - nbytes(placed) < 4 * 96 * D  # the head is stored dense


@pytest.mark.parametrize("case", ["w8a8", "w8a16-words", "fp8"])
def test_one_dimensional_scales_are_accepted(tmp_path, case):
    _, expected = write_compressed_tensors_folder(tmp_path, case, flat=True)
    assert_matrices_equal(load_host_weights(tmp_path), expected)


@pytest.mark.parametrize("case", CASES)
def test_ignored_matrices_stay_dense(tmp_path, case):
    ignored = [
        "model.layers.1.mlp.down_proj",
        *(f"model.layers.0.self_attn.{x}_proj" for x in "qkv"),
    ]
    _, expected = write_compressed_tensors_folder(tmp_path, case, ["lm_head", *ignored])
    config = read_config(tmp_path)
    weights = load_host_weights(tmp_path)
    assert isinstance(weights.layers[1].mlp.down_FD, np.ndarray)
    assert not isinstance(weights.layers[0].mlp.down_FD, np.ndarray)
    assert_matrices_equal(weights, expected)
    assert (
        cost.weight_bytes(config, weight_specs(config))
        == nbytes(weights)
        > cost.weight_bytes(config)
    )
    update_config(
        tmp_path,
        quantization_config=CASES[case][0]
        | {"ignore": [r"re:.*layers\.0.*(q|k|v)_proj$", ignored[0]]},
    )
    assert_same_leaves(load_host_weights(tmp_path), weights)
    update_config(tmp_path, quantization_config=CASES[case][0] | {"ignore": ignored[:2]})
    half = load_host_weights(tmp_path)
    # a fused weight that is partly dense: v is dequantised
    assert isinstance(half.layers[0].attention.qkv_DGH, np.ndarray)
    assert_matrices_equal(half, expected)
    update_config(tmp_path, quantization_config=CASES[case][0])
    assert_rejected(
        lambda: load_host_weights(tmp_path), "self_attn.q_proj.weight", "quantization_config.ignore"
    )


def test_config_group_with_a_regex_target(tmp_path):
    """Only the matrices of the MLP are quantised; the others are dense."""
    dense_names = [f"model.layers.{i}.self_attn.{x}_proj" for i in (0, 1) for x in "qkvo"]
    _, expected = write_compressed_tensors_folder(tmp_path, "w4a16-32", dense_names)
    weights = load_host_weights(tmp_path)
    config = compressed_tensors_config(weights_spec(4, 32))
    config["config_groups"]["group_0"]["targets"] = [r"re:.*\.mlp\..*_proj$"]
    update_config(tmp_path, quantization_config=config | {"ignore": []})
    assert_same_leaves(load_host_weights(tmp_path), weights)
    assert_matrices_equal(weights, expected)


def test_config_groups_of_different_formats(tmp_path):
    """Attention in FP8 and the MLP in int4; name targets have precedence over module classes."""
    tensors = {}
    expected = {}
    for case, name_part in (("fp8-a16", "self_attn"), ("w4a16-32", ".mlp.")):
        case_tensors, case_expected = write_compressed_tensors_folder(tmp_path / case, case)
        tensors |= {
            name: value
            for name, value in case_tensors.items()
            if name_part in name or "_proj" not in name
        }
        expected |= {
            name: value
            for name, value in case_expected.items()
            if name_part in name or "_proj" not in name
        }
    config = compressed_tensors_config(weights_spec(4, 32), form="mixed-precision")
    config["config_groups"] = {
        "rest": config["config_groups"]["group_0"] | {"format": "pack-quantized"},
        "attention": {
            "targets": ["re:.*self_attn.*"],
            "weights": FP8_SPEC,
            "format": "float-quantized",
        },
    }
    tiny.write(tmp_path, LLAMA | {"quantization_config": config}, tensors)
    weights = load_host_weights(tmp_path)
    assert_matrices_equal(weights, expected)
    assert isinstance(weights.layers[0].attention.qkv_DGH, Fp8) and isinstance(
        weights.layers[0].mlp.down_FD, Int4
    )
    assert cost.weight_bytes(read_config(tmp_path), weight_specs(read_config(tmp_path))) == nbytes(
        weights
    )


@pytest.mark.parametrize("case", ["w8a8", "w4a16-64-zero", "fp8"])
def test_quantized_embedding_and_head_are_loaded(tmp_path, case):
    """A quantised embedding is dequantised; an 8-bit head keeps its codes."""
    tensors, expected = write_compressed_tensors_folder(tmp_path, case)
    unquantized_head = load_host_weights(tmp_path)
    rng = np.random.default_rng(1)
    values = {}
    for stem in ("model.embed_tokens", "lm_head"):
        matrix_tensors, values[stem] = random_stored_matrix(
            rng, stem, tensors.pop(f"{stem}.weight").shape, case
        )
        tensors |= matrix_tensors
    save_file(tensors, tmp_path / "model.safetensors")
    update_config(tmp_path, quantization_config=CASES[case][0] | {"ignore": []})
    weights = load_host_weights(tmp_path)
    assert_matrices_equal(weights, expected)
    assert_same_leaves(weights.layers, unquantized_head.layers)
    np.testing.assert_array_equal(weights.embed_VD, values["model.embed_tokens"].astype(np.float32))
    exact = case != "w4a16-64-zero"
    np.testing.assert_allclose(
        dequantize(weights.head_VD).T, values["lm_head"], rtol=0, atol=0 if exact else 0.01
    )


@pytest.mark.parametrize("case", ["w4a16-32", "w8a16-words", "fp8"])
def test_experts_stored_as_separate_quantized_tensors(tmp_path, case):
    """As vLLM's tools write experts: one matrix per expert and projection."""
    folder = write_moe_folder(tmp_path, "mixtral")
    tensors = {}
    rng = np.random.default_rng(0)
    expected = {}
    for file in list(folder.glob("model*")):
        tensors |= load_file(file) if file.suffix == ".safetensors" else {}
        file.unlink()
    for name in list(tensors):
        if ".experts." in name or "_proj" in name:
            matrix_tensors, expected[name] = random_stored_matrix(
                rng, name.removesuffix(".weight"), tensors.pop(name).shape, case
            )
            tensors |= matrix_tensors
    save_file(tensors, folder / "model.safetensors")
    update_config(
        folder,
        quantization_config=CASES[case][0] | {"ignore": ["lm_head", "re:.*block_sparse_moe.gate$"]},
    )
    moe = load_host_weights(folder).layers[1].moe
    for e in range(4):
        gate, up, down = (
            expected[f"model.layers.1.block_sparse_moe.experts.{e}.w{n}.weight"].T
            for n in (1, 3, 2)
        )
        np.testing.assert_array_equal(dequantize(moe.down_EFD[e]), down)
        np.testing.assert_array_equal(
            dequantize(moe.up_EDGF[e]).reshape(len(gate), 2, -1), np.stack([gate, up], 1)
        )
    assert isinstance(
        moe.down_EFD.each, Int4 if case[:2] in INT_BITS_PREFIXES else Fp8 if case == "fp8" else Int8
    )
    update_config(
        folder, quantization_config=CASES[case][0] | {"ignore": ["lm_head", "re:.*w[23]$"]}
    )
    # only w1 is quantised: the fused weight is dequantised
    assert isinstance(load_host_weights(folder).layers[1].moe.up_EDGF, np.ndarray)


@pytest.mark.parametrize("case", ["w8a8", "w8a16-words", "w4a16-128-zero", "fp8"])
def test_quantized_folder_survives_conversion_to_orbax(tmp_path, case):
    """Quantised and dense matrices are the same after `quire convert`."""
    write_compressed_tensors_folder(
        tmp_path / "plain", case, ["lm_head", "model.layers.1.mlp.down_proj"]
    )
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "plain"), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    config = read_config(tmp_path / "out")
    assert config == read_config(tmp_path / "plain")
    weights = load(tmp_path / "out", config, skip_packing=True)
    assert_same_leaves(jax.tree.map(np.asarray, weights), load_host_weights(tmp_path / "plain"))


def test_quantization_option_must_match_the_checkpoint(tmp_path):
    write_compressed_tensors_folder(tmp_path, "w4a16-32")
    assert read_config(tmp_path, quantization="int4") == read_config(tmp_path)
    for name in ("int8", "int4-64", "int4-zero", "int8-weights"):
        assert_rejected(
            lambda name=name: read_config(tmp_path, quantization=name),
            repr(name),
            "'int4-32'",
            "--quantization",
        )
    assert_rejected(lambda: read_config(tmp_path, quantization=""), "''")


# Damaged checkpoints and unsupported options

WEIGHTS = "quantization_config.config_groups.group_0.weights"
ACTIVATIONS = "quantization_config.config_groups.group_0.input_activations"
CONFIGS = [
    (compressed_tensors_config(weights_spec(4, 32, num_bits=5)), f"{WEIGHTS}.num_bits = 5"),
    (
        compressed_tensors_config(weights_spec(4, 32, type="float")),
        "quantization_config.format = 'pack-quantized'",
    ),
    (
        compressed_tensors_config(weights_spec(4, 32, actorder="group")),
        f"{WEIGHTS}.actorder = 'group'",
    ),
    (compressed_tensors_config(weights_spec(4, 32, actorder=True)), f"{WEIGHTS}.actorder = True"),
    (compressed_tensors_config(weights_spec(4, 32, dynamic=True)), f"{WEIGHTS}.dynamic = True"),
    (compressed_tensors_config(weights_spec(4, 16)), f"{WEIGHTS}.group_size = 16"),
    (
        compressed_tensors_config(weights_spec(4, strategy="tensor")),
        f"{WEIGHTS}.strategy = 'tensor'",
    ),
    (
        compressed_tensors_config(weights_spec(4, None, strategy="group")),
        f"{WEIGHTS}.group_size = None",
    ),
    (
        compressed_tensors_config(weights_spec(8, strategy="tensor"), TOKEN_SPEC, "int-quantized"),
        f"{WEIGHTS}.strategy = 'tensor'",
    ),
    (
        compressed_tensors_config(weights_spec(8, strategy=None), TOKEN_SPEC, "int-quantized"),
        f"{WEIGHTS}.strategy = 'tensor'",
    ),
    (compressed_tensors_config(weights_spec(8, 256)), f"{WEIGHTS}.group_size = 256"),
    (compressed_tensors_config(weights_spec(8, zero=True)), f"{WEIGHTS}.symmetric = False"),
    (
        compressed_tensors_config(weights_spec(8, strategy="block", block_structure=[128, 128])),
        f"{WEIGHTS}.block_structure",
    ),
    (compressed_tensors_config(weights_spec(4, 32, outliers=3)), f"{WEIGHTS}.outliers = 3"),
    (
        compressed_tensors_config(weights_spec(4, 32) | {"num_bits": {"mlp": 4}}),
        f"{WEIGHTS}.num_bits",
    ),
    (compressed_tensors_config(None), f"{WEIGHTS} = None"),
    (
        compressed_tensors_config(weights_spec(8), config_groups=7),
        "quantization_config.config_groups = 7",
    ),
    (compressed_tensors_config(["W4A16"]), f"{WEIGHTS} = ['W4A16']"),
    (
        compressed_tensors_config(
            weights_spec(8), TOKEN_SPEC | {"dynamic": False}, "int-quantized"
        ),
        f"{ACTIVATIONS}.dynamic = False",
    ),
    (
        compressed_tensors_config(weights_spec(8), {"num_bits": 8}, "int-quantized"),
        f"{ACTIVATIONS}.dynamic = False",
    ),
    (
        compressed_tensors_config(
            weights_spec(8), TOKEN_SPEC | {"strategy": "tensor"}, "int-quantized"
        ),
        f"{ACTIVATIONS}.strategy = 'tensor'",
    ),
    (
        compressed_tensors_config(
            weights_spec(8), TOKEN_SPEC | {"symmetric": False}, "int-quantized"
        ),
        f"{ACTIVATIONS}.symmetric = False",
    ),
    (compressed_tensors_config(weights_spec(4, 128), TOKEN_SPEC), f"{ACTIVATIONS} = "),
    (
        compressed_tensors_config(weights_spec(8), TOKEN_SPEC),
        "quantization_config.format = 'pack-quantized'",
    ),
    (
        compressed_tensors_config(weights_spec(4, 32), None, "int-quantized"),
        "quantization_config.format = 'int-quantized'",
    ),
    (
        compressed_tensors_config(weights_spec(8), TOKEN_SPEC, "float-quantized"),
        "quantization_config.format = 'float-quantized'",
    ),
    (
        compressed_tensors_config(weights_spec(8), TOKEN_SPEC, None),
        "quantization_config.format = None",
    ),
    (
        compressed_tensors_config(FP8_SPEC | {"strategy": "block", "block_structure": [64, 128]}),
        f"{WEIGHTS}.block_structure = [64, 128]",
    ),
    (
        compressed_tensors_config(FP8_SPEC | {"strategy": "block", "block_structure": [128, 128]}),
        "format = 'pack-quantized'",
    ),
    (
        compressed_tensors_config(FP8_SPEC, TOKEN_SPEC, "float-quantized"),
        f"{ACTIVATIONS}.type = 'int'",
    ),
    (
        compressed_tensors_config(FP8_SPEC, None, "int-quantized"),
        "quantization_config.format = 'int-quantized'",
    ),
    (
        compressed_tensors_config(weights_spec(8), sparsity_config={"format": "sparse-24-bitmask"}),
        "quantization_config.sparsity_config",
    ),
    (
        compressed_tensors_config(weights_spec(8), transform_config={"config_groups": {}}),
        "quantization_config.transform_config",
    ),
    (
        compressed_tensors_config(weights_spec(8), config_groups={}),
        "quantization_config.config_groups = {}",
    ),
    (
        compressed_tensors_config(weights_spec(8), config_groups=None),
        "quantization_config.config_groups = None",
    ),
    (
        compressed_tensors_config(weights_spec(8), config_groups={"a": {}, "b": {}}),
        "quantization_config.config_groups.a.targets",
    ),
    (
        compressed_tensors_config(weights_spec(8), config_groups={"W8A8": ["Linear"]}),
        "quantization_config.config_groups.W8A8",
    ),
    (compressed_tensors_config(weights_spec(8), spin=1), "quantization_config.spin = 1"),
    (
        compressed_tensors_config(weights_spec(8), ignore="lm_head"),
        "quantization_config.ignore = 'lm_head'",
    ),
    (compressed_tensors_config(weights_spec(8), ignore=[7]), "quantization_config.ignore = [7]"),
    (
        compressed_tensors_config(weights_spec(8), ignore=["re:(a"]),
        "quantization_config.ignore = 're:(a'",
    ),
    (
        compressed_tensors_config(weights_spec(8), ignore=["re:(a+)+$"]),
        "quantization_config.ignore = 're:(a+)+$'",
    ),
    (
        compressed_tensors_config(weights_spec(8), ignore=["re:" + ".*" * 9]),
        "quantization_config.ignore = 're:",
    ),
    (
        compressed_tensors_config(weights_spec(8), ignore=["Linear"]),
        "quantization_config.ignore = 'Linear'",
    ),
]


@pytest.mark.parametrize(("config", "words"), CONFIGS, ids=[words for _, words in CONFIGS])
def test_error_names_the_unsupported_config_key(tmp_path, config, words):
    tiny.write(tmp_path, LLAMA | {"quantization_config": config}, {"x": np.zeros(1, np.float32)})
    assert_rejected(lambda: read_config(tmp_path), words)


@pytest.mark.parametrize("targets", [None, [], ["LlamaDecoderLayer"], "Linear", ["re:["]])
def test_unsupported_targets_are_rejected(tmp_path, targets):
    config = compressed_tensors_config(weights_spec(8))
    config["config_groups"]["group_0"]["targets"] = targets
    tiny.write(tmp_path, LLAMA | {"quantization_config": config}, {"x": np.zeros(1, np.float32)})
    assert_rejected(
        lambda: read_config(tmp_path), "quantization_config.config_groups.group_0.targets"
    )


def test_keys_of_older_tools_are_ignored(tmp_path):
    """Keys of earlier llm-compressor versions that do not describe the weights."""
    sparse = {
        "format": "dense",
        "global_sparsity": 0.1,
        "ignore": [],
        "sparsity_structure": "unstructured",
    }
    config = compressed_tensors_config(
        weights_spec(8, -1, strategy="channel", actorder="weight"), sparsity_config=sparse
    )
    tiny.write(
        tmp_path, LLAMA | {"quantization_config": config | {"quantization_status": "frozen"}}
    )
    assert read_config(tmp_path).quant == "int8-weights"


def test_unknown_quant_method_is_rejected(tmp_path):
    tiny.write(tmp_path, LLAMA | {"quantization_config": {"quant_method": "aqlm", "bits": 2}})
    assert_rejected(lambda: read_config(tmp_path), "quantization_config", "aqlm")


VALUES = [
    None,
    True,
    False,
    0,
    1,
    4,
    8,
    -1,
    32,
    128,
    10**12,
    0.5,
    "",
    "int",
    "group",
    "channel",
    "token",
    [],
    {},
    [[]],
]


@settings(max_examples=cases(300))
@given(st.data())
def test_mutated_config_is_accepted_or_rejected_in_one_line(data):
    """Random values of random keys raise a one-line error or give a known format."""
    case = data.draw(st.sampled_from(sorted(CASES)))
    config = json.loads(json.dumps(CASES[case][0]))
    for _ in range(data.draw(st.integers(1, 3))):
        node = config
        while isinstance(node, dict) and node:
            key = data.draw(st.sampled_from(sorted(node)))
            if not isinstance(node[key], dict) or data.draw(st.integers(0, 3)) == 0:
                node[key] = data.draw(st.sampled_from(VALUES))
                break
            node = node[key]
    try:
        form = split_quantization({"quantization_config": config})[1]
    except ModelError as error:
        assert "\n" not in str(error)
        assert "quantization_config" in str(error)
        return
    assert form is None or form.quant in CASE_NAMES


STEM = "model.layers.1.mlp.down_proj"


def tensor_damage(suffix: str, make):
    """Return a function that replaces one tensor of a matrix, or removes it for None."""

    def damage(tensors: dict) -> None:
        value = make(tensors.pop(STEM + suffix, None))
        tensors.update({} if value is None else {STEM + suffix: value})

    return damage


def with_first_value(value):
    """Return a function that sets the first scale to `value`."""

    def make(scale):
        return np.where(
            np.arange(scale.size).reshape(scale.shape) == 0, value, scale.astype(np.float32)
        )

    return make


DAMAGE = [
    ("w8a8", tensor_damage(".weight_scale", lambda x: None), f"{STEM}.weight'"),
    ("w8a8", tensor_damage(".weight_scale", lambda x: x[:-1]), f"{STEM}.weight_scale"),
    ("w8a8", tensor_damage(".weight_scale", lambda x: x.T.copy()), f"{STEM}.weight_scale"),
    (
        "w8a8",
        tensor_damage(".weight_scale", lambda x: x.astype(np.float64)),
        f"{STEM}.weight_scale",
    ),
    (
        "w8a8",
        tensor_damage(".weight_scale", lambda x: x[:, 0].astype(np.int32)),
        f"{STEM}.weight_scale",
    ),
    ("w8a8", tensor_damage(".weight_scale", with_first_value(np.nan)), f"{STEM}.weight_scale"),
    ("w8a8", tensor_damage(".weight_scale", with_first_value(np.inf)), f"{STEM}.weight_scale"),
    ("w8a8", tensor_damage(".weight", lambda x: None), f"{STEM}.weight'"),
    ("w8a8", tensor_damage(".weight", lambda x: x.astype(np.uint8)), f"{STEM}.weight'"),
    ("w8a8", tensor_damage(".weight", lambda x: x[:, :-1].copy()), f"{STEM}.weight'"),
    ("w8a8", tensor_damage(".weight", lambda x: x.reshape(-1)), f"{STEM}.weight'"),
    ("w8a8", tensor_damage(".weight", lambda x: x[:, :0].copy()), f"{STEM}.weight'"),
    (
        "w8a8",
        tensor_damage(".weight_zero_point", lambda x: np.zeros((D, 1), np.int8)),
        f"{STEM}.weight_zero_point",
    ),
    ("fp8", tensor_damage(".weight", lambda x: x.view(np.int8)), f"{STEM}.weight'"),
    (
        "fp8",
        tensor_damage(".weight", lambda x: np.full_like(x, np.nan)),
        "holds a code that is no number",
    ),
    ("w4a16-32", tensor_damage(".weight_scale", lambda x: None), f"{STEM}.weight_scale"),
    (
        "w4a16-32",
        tensor_damage(".weight_scale", lambda x: x[:, :-1].copy()),
        f"{STEM}.weight_scale",
    ),
    ("w4a16-32", tensor_damage(".weight_scale", lambda x: x[:, 0].copy()), f"{STEM}.weight_scale"),
    ("w4a16-32", tensor_damage(".weight_scale", with_first_value(1e5)), "at most 65504"),
    ("w4a16-32", tensor_damage(".weight_packed", lambda x: None), f"{STEM}.weight"),
    (
        "w4a16-32",
        tensor_damage(".weight_packed", lambda x: x[:, :-1].copy()),
        f"{STEM}.weight_packed",
    ),
    (
        "w4a16-32",
        tensor_damage(".weight_packed", lambda x: x.astype(np.int64)),
        f"{STEM}.weight_packed",
    ),
    ("w4a16-32", tensor_damage(".weight_shape", lambda x: None), f"{STEM}.weight_shape"),
    ("w4a16-32", tensor_damage(".weight_shape", lambda x: x[:1].copy()), f"{STEM}.weight_shape"),
    (
        "w4a16-32",
        tensor_damage(".weight_shape", lambda x: x.astype(np.float32)),
        f"{STEM}.weight_shape",
    ),
    ("w4a16-32", tensor_damage(".weight_shape", lambda x: x * 2**40), f"{STEM}.weight_packed"),
    ("w4a16-32", tensor_damage(".weight_shape", lambda x: -x), f"{STEM}.weight_shape"),
    ("w4a16-32", tensor_damage(".weight_shape", lambda x: x - 8), f"{STEM}.weight_packed"),
    (
        "w4a16-32",
        tensor_damage(".weight_g_idx", lambda x: np.zeros(F, np.int32)),
        f"{STEM}.weight_g_idx",
    ),
    (
        "w4a16-32",
        tensor_damage(".weight", lambda x: np.zeros((D, F), np.float32)),
        f"{STEM}.weight'",
    ),
    (
        "w4a16-32",
        tensor_damage(".weight_zero_point", lambda x: np.zeros((16, 8), np.int32)),
        f"{STEM}.weight_zero_point",
    ),
    (
        "w4a16-64-zero",
        tensor_damage(".weight_zero_point", lambda x: None),
        f"{STEM}.weight_zero_point",
    ),
    (
        "w4a16-64-zero",
        tensor_damage(".weight_zero_point", lambda x: x[:-1]),
        f"{STEM}.weight_zero_point",
    ),
    (
        "w4a16-64-zero",
        tensor_damage(".weight_zero_point", lambda x: x.astype(np.int8)),
        f"{STEM}.weight_zero_point",
    ),
]


@pytest.mark.parametrize(
    ("case", "damage", "words"), DAMAGE, ids=[f"{case}-{w}" for case, _, w in DAMAGE]
)
def test_error_names_the_damaged_tensor(tmp_path, case, damage, words):
    tensors, _ = write_compressed_tensors_folder(tmp_path, case)
    load_host_weights(tmp_path)
    damage(tensors)
    save_file(
        {name: np.ascontiguousarray(value) for name, value in tensors.items()},
        tmp_path / "model.safetensors",
    )
    assert_rejected(lambda: load_host_weights(tmp_path), words)


@pytest.mark.parametrize("case", ["w8a8", "w4a16-64-zero"])
def test_truncated_file_is_rejected(tmp_path, case):
    write_compressed_tensors_folder(tmp_path, case)
    file = tmp_path / "model.safetensors"
    rng = np.random.default_rng(0)
    contents = file.read_bytes()
    for cut in [0, 7, 100, len(contents) - 1, *rng.integers(0, len(contents), 20)]:
        file.write_bytes(contents[:cut])
        assert_rejected(lambda: load_host_weights(tmp_path), "model.safetensors")


def test_group_size_must_divide_the_inputs(tmp_path):
    tensors, _ = write_compressed_tensors_folder(tmp_path, "w4a16-128")
    tensors |= {
        f"{STEM}.weight_packed": np.zeros((D, 24), np.int32),
        f"{STEM}.weight_shape": np.array([D, 192]),
    }
    save_file(
        tensors | {f"{STEM}.weight_scale": np.ones((D, 1), np.float16)},
        tmp_path / "model.safetensors",
    )
    assert_rejected(lambda: load_host_weights(tmp_path), STEM, "192 inputs", "could be 32 or 64")


def test_non_finite_scale_of_dequantized_head_is_rejected(tmp_path):
    tensors, _ = write_compressed_tensors_folder(tmp_path, "w8a8")
    head_tensors, _ = random_stored_matrix(
        np.random.default_rng(0), "lm_head", tensors.pop("lm_head.weight").shape, "w8a8"
    )
    head_tensors["lm_head.weight_scale"][3] = np.nan
    save_file(tensors | head_tensors, tmp_path / "model.safetensors")
    config = replace(read_config(tmp_path), quant=None)
    assert_rejected(
        lambda: load_weights(tmp_path, config, place=lambda spec, leaf: leaf),
        "lm_head.weight_scale",
        "finite",
    )


@pytest.mark.slow
def test_tiny_scales_become_the_nearest_float16_subnormals(tmp_path):
    tensors, _ = write_compressed_tensors_folder(tmp_path, "w4a16-32")
    name = f"{STEM}.weight_scale"
    tensors[name] = np.full_like(tensors[name], 1.1e-6)
    save_file(tensors, tmp_path / "model.safetensors")
    scale = load_host_weights(tmp_path).layers[1].mlp.down_FD.scale
    assert np.abs(scale.astype(np.float64) - tensors[name][0, 0].astype(np.float64)).max() <= 3e-8
