"""Rounded checkpoints: written by `quire quantize`, by hand as vLLM's tools write them, and
damaged.
"""

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


def read(folder: Path, quantization: str | None = None, dtype: str = "auto"):
    """The weights as numpy arrays, not placed."""
    return load_weights(
        folder, read_config(folder, dtype, quantization=quantization), place=lambda spec, leaf: leaf
    )


def quantize(folder: Path, out: Path, name: str) -> Path:
    quantized.save(folder, out, read_config(folder, quantization=name))
    return out


def assert_same(a, b) -> None:
    """The same arrays in the same tree, bit for bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def change(folder: Path, **values) -> None:
    """Keys of config.json replaced."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(work, *words: str) -> str:
    """What the error says: one line, with these words in it."""
    with pytest.raises(ModelError) as caught:
        work()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


# Written by Quire


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=lambda config: config["model_type"])
def test_a_written_folder_is_what_rounding_while_loading_makes(tmp_path, config, name):
    tiny.write(tmp_path / "dense", config, draw(config))
    out = quantize(tmp_path / "dense", tmp_path / "out", name)
    assert_same(read(out), read(tmp_path / "dense", name))
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
    assert size(tmp_path / "dense") - size(out) == pytest.approx(
        matrices * (4 - bits / 8), rel=0.02
    )


@pytest.mark.parametrize(
    "stored", [np.float16, ml_dtypes.bfloat16], ids=lambda dtype: np.dtype(dtype).name
)
@pytest.mark.parametrize("name", ["int8", "int4-64-zero"])
def test_other_dtypes_and_several_files(tmp_path, stored, name):
    """Quire loads float16 as bfloat16, and rounds from there either way.

    What is not rounded keeps its dtype.
    """
    config = LLAMA | {"torch_dtype": np.dtype(stored).name}
    dense = tiny.write(tmp_path / "dense", config, draw(config, stored), shards=3)
    (tmp_path / "dense" / "tokenizer.json").write_text("{}")
    (tmp_path / "dense" / "modeling.py").write_text("raise SystemExit")
    out = quantize(tmp_path / "dense", tmp_path / "out", name)
    assert_same(read(out), read(tmp_path / "dense", name))
    files = {file.name for file in out.iterdir()}
    assert files == {
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
    }
    found = {
        name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()
    }
    for tensor in (
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.1.input_layernorm.weight",
    ):
        assert found[tensor].dtype == stored
        assert found[tensor].tobytes() == dense[tensor].tobytes()
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == found.keys()


def test_embedding_and_head_take_the_narrower_dtype(tmp_path):
    """A float32 checkpoint written for bfloat16; norms stay exact."""
    dense = tiny.write(tmp_path / "dense", LLAMA | {"torch_dtype": "float32"}, draw(LLAMA))
    options = ["--quantization", "int4", "--dtype", "bfloat16"]
    done = CliRunner().invoke(
        app, ["quantize", str(tmp_path / "dense"), str(tmp_path / "out"), *options]
    )
    assert done.exit_code == 0, done.output
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert found[name].tobytes() == dense[name].astype(ml_dtypes.bfloat16).tobytes()
    norm = "model.layers.1.input_layernorm.weight"
    assert found[norm].tobytes() == dense[norm].tobytes()
    assert read_config(tmp_path / "out").dtype == "bfloat16"
    hf = json.loads((tmp_path / "dense" / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    (tmp_path / "dense" / "config.json").write_text(json.dumps(hf))
    assert_same(read(tmp_path / "out"), read(tmp_path / "dense", "int4"))
    gguf = [
        "quantize",
        str(tmp_path / "dense"),
        str(tmp_path / "m.gguf"),
        *options,
        "--layout",
        "gguf",
    ]
    done = CliRunner().invoke(app, gguf)
    assert done.exit_code and "--dtype bfloat16 is for folders" in str(done.exception)


def family_variants():
    return [
        variant
        for variant in (*VARIANTS, *MOE_VARIANTS)
        if "quantization_config" not in variant.config
    ]


@pytest.mark.parametrize("variant", family_variants(), ids=lambda variant: variant.name)
@pytest.mark.slow
def test_every_family(tmp_path, variant):
    """Whatever a family does with its tensors, it does with their codes and scales; experts in one
    tensor stay.
    """
    with np.load(HERE / f"{variant.name}.npz") as arrays:
        meta = json.loads(arrays["meta"].tobytes())
    dense = write_folder(tmp_path / "dense", variant.config, meta["tensors"], meta["seed"])
    for name in ("int8", "int4"):
        try:
            out = quantize(dense, tmp_path / name, name)
        except ModelError as error:
            # the sizes of some are tiny
            assert "do not divide by the group of 32; int8 has none" in str(error)
            assert name == "int4"
            continue
        expected = read(dense, name)
        stacked = (tensor for tensor, shape in meta["tensors"].items() if len(shape) == 3)
        if any(".experts." in tensor or ".block_sparse_moe." in tensor for tensor in stacked):
            expected = with_experts(expected, read(dense))
        assert_same(read(out), expected)


def with_experts(weights, of):
    """The weights with the stacks of others."""

    def replaced(layer, other):
        if layer.moe is None:
            return layer
        assert isinstance(layer.moe.up_EDGF, Stack) and isinstance(other.moe.up_EDGF, np.ndarray)
        return layer.replace(
            moe=layer.moe.replace(up_EDGF=other.moe.up_EDGF, down_EFD=other.moe.down_EFD)
        )

    return weights.replace(layers=tuple(map(replaced, weights.layers, of.layers)))


def written(folder: Path, name: str) -> Path:
    """The folder of a variant with experts."""
    variant = next(variant for variant in MOE_VARIANTS if variant.name == name)
    with np.load(HERE / f"{name}.npz") as arrays:
        meta = json.loads(arrays["meta"].tobytes())
    return write_folder(folder, variant.config, meta["tensors"], meta["seed"])


@pytest.mark.parametrize(("name", "stay"), [("qwen3-moe", False), ("gemma4-moe", True)])
def test_experts_are_rounded_where_each_has_tensors(tmp_path, name, stay):
    dense = written(tmp_path / "dense", name)
    done = CliRunner().invoke(
        app, ["quantize", str(dense), str(tmp_path / "out"), "--quantization", "int8"]
    )
    assert done.exit_code == 0, done.output
    assert ("experts stay as they are" in done.output) == stay
    form = split_quantization(json.loads((tmp_path / "out" / "config.json").read_text()))[1]
    found = {name for file in (tmp_path / "out").glob("*.safetensors") for name in load_file(file)}
    coded = {name.removesuffix("_scale") for name in found if name.endswith("_scale")}
    assert coded and any(".experts." in name for name in coded) != stay
    assert any(form.group_of(name) for name in found if ".experts." in name) != stay
    if not stay:
        linear = {
            name
            for name in found
            if name.endswith(("proj.weight", "mlp.gate.weight", "lm_head.weight"))
        }
        assert {name for name in linear if form.group_of(name.removesuffix(".weight"))} == coded
        assert coded == {name for name in linear if name.endswith("proj.weight")} != linear


@pytest.mark.slow
def test_greedy_tokens(tmp_path):
    """Through the whole engine, kernels and all."""
    tiny.write(tmp_path / "dense", LLAMA, draw(LLAMA))
    options = {"skip_tokenizer_init": True, "max_num_seqs": 1, "max_num_batched_tokens": 8}
    asked = [5, 17, 3], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for name in ("int8", "int4-64-zero", "fp8"):
        out = quantize(tmp_path / "dense", tmp_path / name, name)
        answers = [
            list(llm.generate(*asked)[0].outputs[0].token_ids)
            for llm in (LLM(out, **options), LLM(tmp_path / "dense", quantization=name, **options))
        ]
        assert answers[0] == answers[1]
        assert len(set(answers[0])) > 2


@pytest.mark.slow
def test_command(tmp_path):
    """The bundled model: written, smaller, and writing what it writes when it is rounded while
    loading.
    """
    out = str(tmp_path / "out")
    say = ["--prompt", "Once upon a time", "--temperature", "0", "--max-tokens", "12"]
    done = CliRunner().invoke(app, ["quantize", "quill", out, "--quantization", "int4-64"])
    assert done.exit_code == 0, done.output
    assert "48 matrices in int4-64" in done.output
    bundled = hub.resolve("quill")
    assert size(tmp_path / "out") < size(bundled) / 3
    names = {file.name for file in bundled.iterdir()}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names
    texts = [
        CliRunner().invoke(app, ["generate", *model, *say]).stdout
        for model in ([out], ["quill", "--quantization", "int4-64"])
    ]
    assert texts[0] == texts[1] != ""
    plans = [
        json.loads(CliRunner().invoke(app, ["plan", *model, "--json"]).stdout)
        for model in ([out], ["quill", "--quantization", "int4-64"])
    ]
    assert plans[0] | {"model": "quill"} == plans[1]


def test_what_is_not_quantised(tmp_path):
    dense = tmp_path / "dense"
    out = tmp_path / "out"
    tiny.write(dense, LLAMA, draw(LLAMA))
    quantize(dense, out, "int8")
    before = {file: file.read_bytes() for file in out.iterdir()}
    refused(lambda: quantize(dense, out, "int4"), str(out), "already")
    assert {file: file.read_bytes() for file in out.iterdir()} == before
    refused(lambda: quantize(out, tmp_path / "again", "int8"), "quantised already")
    refused(lambda: quantize(out, tmp_path / "again", "int4"), "'int4'", "'int8'", "--quantization")
    refused(lambda: quantize(dense, tmp_path / "again", "int5"), "'int5'", "int4")
    refused(lambda: quantize(dense, tmp_path / "again", "nf4"), "'nf4'", "layout bitsandbytes has")
    done = CliRunner().invoke(app, ["convert", str(dense), str(tmp_path / "orbax")])
    assert done.exit_code == 0, done.output
    refused(lambda: quantize(tmp_path / "orbax", tmp_path / "again", "int8"), "converted")
    narrow = tmp_path / "narrow"
    tiny.write(narrow, tiny.LLAMA | {"intermediate_size": 96})
    refused(
        lambda: quantize(narrow, tmp_path / "again", "int4-64"),
        "down_proj",
        "96 inputs",
        "could be 32",
    )
    odd = tmp_path / "odd"
    tiny.write(odd, tiny.LLAMA | {"intermediate_size": 33})
    refused(lambda: quantize(odd, tmp_path / "again", "int4"), "33 inputs")
    assert sorted(tmp_path.iterdir()) == sorted([dense, narrow, odd, out, tmp_path / "orbax"])


def test_nothing_is_left_of_a_write_that_fails(tmp_path):
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
    refused(lambda: quantized.save(dense, tmp_path / "file" / "out", config), "cannot be written")


# Written by others


def packed_words(codes, bits: int) -> np.ndarray:
    """Rows of codes in int32 words, one by one."""
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


def rounding(bits: int, group: int | None = None, zero: bool = False, **more) -> dict:
    """The weights of a config group, with all the keys that llm-compressor writes."""
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
    } | more


TOKEN = rounding(8, dynamic=True, strategy="token", observer="memoryless")


def described(
    weights: dict, activations: dict | None = None, form: str = "pack-quantized", **more
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
    } | more


FLOAT = rounding(8, type="float")
CASES = {
    "w8a8": (described(rounding(8), TOKEN, "int-quantized"), ml_dtypes.bfloat16, "int8"),
    "w8a16-bytes": (described(rounding(8), None, "int-quantized"), np.float32, "int8-weights"),
    "w8a16-words": (described(rounding(8)), np.float16, "int8-weights"),
    "w4a16-32": (described(rounding(4, 32)), ml_dtypes.bfloat16, "int4-32"),
    "w4a16-64-zero": (described(rounding(4, 64, True)), np.float16, "int4-64-zero"),
    "w4a16-128": (described(rounding(4, 128)), np.float32, "int4-128"),
    "w3a16-64": (described(rounding(3, 64)), np.float16, "int3-64"),
    "w2a16-32-zero": (described(rounding(2, 32, True)), ml_dtypes.bfloat16, "int2-32-zero"),
    "fp8": (
        described(FLOAT, TOKEN | {"type": "float"}, "float-quantized"),
        ml_dtypes.bfloat16,
        "fp8",
    ),
    "fp8-a16": (described(FLOAT, None, "naive-quantized"), np.float32, "fp8-weights"),
    "w4a16-128-zero": (described(rounding(4, 128, True)), ml_dtypes.bfloat16, "int4-128-zero"),
}


FEW = ("w4", "w3", "w2")
CASE_NAMES = {name for _, _, name in CASES.values()} | {
    "int4-32-zero",
    "int4-64",
    "fp8-weights-128",
}


def coded(rng, stem: str, shape: tuple[int, int], case: str, flat: bool = False):
    """The tensors of one random matrix, and what it is in float64."""
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


def by_hand(folder: Path, case: str, ignore=("lm_head",), seed: int = 0, flat: bool = False):
    """A folder as llm-compressor writes it, and every matrix of it in float64."""
    rng = np.random.default_rng(seed)
    dense = draw(LLAMA)
    tensors = {}
    expected = {}
    for name, value in dense.items():
        stem = name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or stem in ignore:
            tensors[name], expected[name] = value, value.astype(np.float64)
            continue
        parts, expected[name] = coded(rng, stem, value.shape, case, flat)
        tensors |= parts
    tiny.write(
        folder, LLAMA | {"quantization_config": CASES[case][0] | {"ignore": list(ignore)}}, tensors
    )
    return tensors, expected


def dense_of(leaf) -> np.ndarray:
    """[*in, *out] in float64, from a node's own arrays."""
    if isinstance(leaf, Fp8):
        return leaf.codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * leaf.scale
    if isinstance(leaf, Int8):
        return leaf.codes.astype(np.float64) * leaf.scale
    if not isinstance(leaf, Int4):
        return leaf.astype(np.float64)
    out = np.zeros((math.prod(leaf.into), math.prod(leaf.out)))
    side = min(len(out), 128)  # inputs of a block, of which the last one ends with the last input
    for k in range(len(out)):
        half, place = divmod(k - min(k // side * side, len(out) - side), side // 2)
        code = leaf.nibbles[k // side * (side // 2) + place] >> 4 * half & 15
        zero = 8.0 if leaf.zero is None else leaf.zero[k // leaf.group].astype(np.float64)
        out[k] = (code - zero) * leaf.scale[k // leaf.group]
    return out.reshape(*leaf.into, *leaf.out)


def assert_is(weights, expected: dict[str, np.ndarray]) -> None:
    """Each matrix against the checkpoint's."""
    for i, layer in enumerate(weights.layers):
        q, k, v, o, gate, up, down = (
            expected[f"model.layers.{i}.{name}.weight"].T for name in MATRICES
        )
        qkv = np.concatenate([q.reshape(D, N, H), k.reshape(D, K, H), v.reshape(D, K, H)], axis=1)
        np.testing.assert_array_equal(dense_of(layer.attention.qkv_DGH), qkv)
        np.testing.assert_array_equal(dense_of(layer.attention.out_NHD), o.reshape(N, H, D))
        np.testing.assert_array_equal(dense_of(layer.mlp.up_DGF), np.stack([gate, up], axis=1))
        np.testing.assert_array_equal(dense_of(layer.mlp.down_FD), down)


@pytest.mark.parametrize("case", CASES)
def test_a_folder_by_hand(tmp_path, case):
    """Codes, scales and zeros as they are stored, wherever the model keeps them."""
    _, expected = by_hand(tmp_path, case)
    config = read_config(tmp_path)
    assert config.quant == CASES[case][2]
    weights = read(tmp_path)
    assert isinstance(
        weights.layers[0].mlp.up_DGF, Int4 if case[:2] in FEW else Fp8 if "fp8" in case else Int8
    )
    assert getattr(weights.layers[0].mlp.up_DGF, "dynamic", True) == (
        case in ("w8a8", "fp8") or case[:2] in FEW
    )
    assert_is(weights, expected)
    told = []
    placed = load(tmp_path, config, Placement(make_mesh()), told.append)
    assert_same(jax.tree.map(np.asarray, placed), weights)
    assert cost.weight_bytes(config, weight_specs(config)) == nbytes(placed)
    assert 0 < sum(told) - nbytes(placed) < 4 * 96 * D  # the head is read dense


@pytest.mark.parametrize("case", ["w8a8", "w8a16-words", "fp8"])
def test_scales_without_a_second_axis(tmp_path, case):
    _, expected = by_hand(tmp_path, case, flat=True)
    assert_is(read(tmp_path), expected)


@pytest.mark.parametrize("case", CASES)
def test_what_was_left_dense_stays_so(tmp_path, case):
    spared = [
        "model.layers.1.mlp.down_proj",
        *(f"model.layers.0.self_attn.{x}_proj" for x in "qkv"),
    ]
    _, expected = by_hand(tmp_path, case, ["lm_head", *spared])
    config = read_config(tmp_path)
    weights = read(tmp_path)
    assert isinstance(weights.layers[1].mlp.down_FD, np.ndarray)
    assert not isinstance(weights.layers[0].mlp.down_FD, np.ndarray)
    assert_is(weights, expected)
    assert (
        cost.weight_bytes(config, weight_specs(config))
        == nbytes(weights)
        > cost.weight_bytes(config)
    )
    change(
        tmp_path,
        quantization_config=CASES[case][0]
        | {"ignore": [r"re:.*layers\.0.*(q|k|v)_proj$", spared[0]]},
    )
    assert_same(read(tmp_path), weights)
    change(tmp_path, quantization_config=CASES[case][0] | {"ignore": spared[:2]})
    half = read(tmp_path)
    # partly left dense: the codes of v are widened
    assert isinstance(half.layers[0].attention.qkv_DGH, np.ndarray)
    assert_is(half, expected)
    change(tmp_path, quantization_config=CASES[case][0])
    refused(lambda: read(tmp_path), "self_attn.q_proj.weight", "quantization_config.ignore")


def test_targets(tmp_path):
    """A group for some of the matrices, the others dense."""
    spared = [f"model.layers.{i}.self_attn.{x}_proj" for i in (0, 1) for x in "qkvo"]
    _, expected = by_hand(tmp_path, "w4a16-32", spared)
    weights = read(tmp_path)
    config = described(rounding(4, 32))
    config["config_groups"]["group_0"]["targets"] = [r"re:.*\.mlp\..*_proj$"]
    change(tmp_path, quantization_config=config | {"ignore": []})
    assert_same(read(tmp_path), weights)
    assert_is(weights, expected)


def test_several_groups(tmp_path):
    """Mixed precision: attention in FP8 and the block in int4; names go before kinds of modules."""
    tensors = {}
    expected = {}
    for case, part in (("fp8-a16", "self_attn"), ("w4a16-32", ".mlp.")):
        found, right = by_hand(tmp_path / case, case)
        tensors |= {
            name: value for name, value in found.items() if part in name or "_proj" not in name
        }
        expected |= {
            name: value for name, value in right.items() if part in name or "_proj" not in name
        }
    config = described(rounding(4, 32), form="mixed-precision")
    config["config_groups"] = {
        "rest": config["config_groups"]["group_0"] | {"format": "pack-quantized"},
        "attention": {
            "targets": ["re:.*self_attn.*"],
            "weights": FLOAT,
            "format": "float-quantized",
        },
    }
    tiny.write(tmp_path, LLAMA | {"quantization_config": config}, tensors)
    weights = read(tmp_path)
    assert_is(weights, expected)
    assert isinstance(weights.layers[0].attention.qkv_DGH, Fp8) and isinstance(
        weights.layers[0].mlp.down_FD, Int4
    )
    assert cost.weight_bytes(read_config(tmp_path), weight_specs(read_config(tmp_path))) == nbytes(
        weights
    )


@pytest.mark.parametrize("case", ["w8a8", "w4a16-64-zero", "fp8"])
def test_codes_where_the_model_wants_none(tmp_path, case):
    """A rounded embedding is widened, a rounded head taken as it is if it has eight bits."""
    tensors, expected = by_hand(tmp_path, case)
    plain = read(tmp_path)
    rng = np.random.default_rng(1)
    values = {}
    for stem in ("model.embed_tokens", "lm_head"):
        parts, values[stem] = coded(rng, stem, tensors.pop(f"{stem}.weight").shape, case)
        tensors |= parts
    save_file(tensors, tmp_path / "model.safetensors")
    change(tmp_path, quantization_config=CASES[case][0] | {"ignore": []})
    weights = read(tmp_path)
    assert_is(weights, expected)
    assert_same(weights.layers, plain.layers)
    np.testing.assert_array_equal(weights.embed_VD, values["model.embed_tokens"].astype(np.float32))
    exact = case != "w4a16-64-zero"
    np.testing.assert_allclose(
        dense_of(weights.head_VD).T, values["lm_head"], rtol=0, atol=0 if exact else 0.01
    )


@pytest.mark.parametrize("case", ["w4a16-32", "w8a16-words", "fp8"])
def test_codes_of_experts(tmp_path, case):
    """As vLLM's tools write them: each expert's matrices by themselves."""
    folder = written(tmp_path, "mixtral")
    tensors = {}
    rng = np.random.default_rng(0)
    expected = {}
    for file in list(folder.glob("model*")):
        tensors |= load_file(file) if file.suffix == ".safetensors" else {}
        file.unlink()
    for name in list(tensors):
        if ".experts." in name or "_proj" in name:
            parts, expected[name] = coded(
                rng, name.removesuffix(".weight"), tensors.pop(name).shape, case
            )
            tensors |= parts
    save_file(tensors, folder / "model.safetensors")
    change(
        folder,
        quantization_config=CASES[case][0] | {"ignore": ["lm_head", "re:.*block_sparse_moe.gate$"]},
    )
    moe = read(folder).layers[1].moe
    for e in range(4):
        gate, up, down = (
            expected[f"model.layers.1.block_sparse_moe.experts.{e}.w{n}.weight"].T
            for n in (1, 3, 2)
        )
        np.testing.assert_array_equal(dense_of(moe.down_EFD[e]), down)
        np.testing.assert_array_equal(
            dense_of(moe.up_EDGF[e]).reshape(len(gate), 2, -1), np.stack([gate, up], 1)
        )
    assert isinstance(
        moe.down_EFD.each, Int4 if case[:2] in FEW else Fp8 if case == "fp8" else Int8
    )
    change(folder, quantization_config=CASES[case][0] | {"ignore": ["lm_head", "re:.*w[23]$"]})
    # w1 has codes, and w3 by that has none
    assert isinstance(read(folder).layers[1].moe.up_EDGF, np.ndarray)


@pytest.mark.parametrize("case", ["w8a8", "w8a16-words", "w4a16-128-zero", "fp8"])
def test_converted(tmp_path, case):
    """As an orbax checkpoint it is the same, what was left dense too."""
    by_hand(tmp_path / "plain", case, ["lm_head", "model.layers.1.mlp.down_proj"])
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "plain"), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    config = read_config(tmp_path / "out")
    assert config == read_config(tmp_path / "plain")
    again = load(tmp_path / "out", config, skip_packing=True)
    assert_same(jax.tree.map(np.asarray, again), read(tmp_path / "plain"))


def test_a_wish_that_the_checkpoint_contradicts(tmp_path):
    by_hand(tmp_path, "w4a16-32")
    assert read_config(tmp_path, quantization="int4") == read_config(tmp_path)
    for wish in ("int8", "int4-64", "int4-zero", "int8-weights"):
        refused(
            lambda wish=wish: read_config(tmp_path, quantization=wish),
            repr(wish),
            "'int4-32'",
            "--quantization",
        )
    refused(lambda: read_config(tmp_path, quantization=""), "''")


# Damaged, or beyond what is built

W = "quantization_config.config_groups.group_0.weights"
A = "quantization_config.config_groups.group_0.input_activations"
CONFIGS = [
    (described(rounding(4, 32, num_bits=5)), f"{W}.num_bits = 5"),
    (described(rounding(4, 32, type="float")), "quantization_config.format = 'pack-quantized'"),
    (described(rounding(4, 32, actorder="group")), f"{W}.actorder = 'group'"),
    (described(rounding(4, 32, actorder=True)), f"{W}.actorder = True"),
    (described(rounding(4, 32, dynamic=True)), f"{W}.dynamic = True"),
    (described(rounding(4, 16)), f"{W}.group_size = 16"),
    (described(rounding(4, strategy="tensor")), f"{W}.strategy = 'tensor'"),
    (described(rounding(4, None, strategy="group")), f"{W}.group_size = None"),
    (described(rounding(8, strategy="tensor"), TOKEN, "int-quantized"), f"{W}.strategy = 'tensor'"),
    (described(rounding(8, strategy=None), TOKEN, "int-quantized"), f"{W}.strategy = 'tensor'"),
    (described(rounding(8, 256)), f"{W}.group_size = 256"),
    (described(rounding(8, zero=True)), f"{W}.symmetric = False"),
    (described(rounding(8, strategy="block", block_structure=[128, 128])), f"{W}.block_structure"),
    (described(rounding(4, 32, outliers=3)), f"{W}.outliers = 3"),
    (described(rounding(4, 32) | {"num_bits": {"mlp": 4}}), f"{W}.num_bits"),
    (described(None), f"{W} = None"),
    (described(rounding(8), config_groups=7), "quantization_config.config_groups = 7"),
    (described(["W4A16"]), f"{W} = ['W4A16']"),
    (described(rounding(8), TOKEN | {"dynamic": False}, "int-quantized"), f"{A}.dynamic = False"),
    (described(rounding(8), {"num_bits": 8}, "int-quantized"), f"{A}.dynamic = False"),
    (
        described(rounding(8), TOKEN | {"strategy": "tensor"}, "int-quantized"),
        f"{A}.strategy = 'tensor'",
    ),
    (
        described(rounding(8), TOKEN | {"symmetric": False}, "int-quantized"),
        f"{A}.symmetric = False",
    ),
    (described(rounding(4, 128), TOKEN), f"{A} = "),
    (described(rounding(8), TOKEN), "quantization_config.format = 'pack-quantized'"),
    (
        described(rounding(4, 32), None, "int-quantized"),
        "quantization_config.format = 'int-quantized'",
    ),
    (
        described(rounding(8), TOKEN, "float-quantized"),
        "quantization_config.format = 'float-quantized'",
    ),
    (described(rounding(8), TOKEN, None), "quantization_config.format = None"),
    (
        described(FLOAT | {"strategy": "block", "block_structure": [64, 128]}),
        f"{W}.block_structure = [64, 128]",
    ),
    (
        described(FLOAT | {"strategy": "block", "block_structure": [128, 128]}),
        "format = 'pack-quantized'",
    ),
    (described(FLOAT, TOKEN, "float-quantized"), f"{A}.type = 'int'"),
    (described(FLOAT, None, "int-quantized"), "quantization_config.format = 'int-quantized'"),
    (
        described(rounding(8), sparsity_config={"format": "sparse-24-bitmask"}),
        "quantization_config.sparsity_config",
    ),
    (
        described(rounding(8), transform_config={"config_groups": {}}),
        "quantization_config.transform_config",
    ),
    (described(rounding(8), config_groups={}), "quantization_config.config_groups = {}"),
    (described(rounding(8), config_groups=None), "quantization_config.config_groups = None"),
    (
        described(rounding(8), config_groups={"a": {}, "b": {}}),
        "quantization_config.config_groups.a.targets",
    ),
    (
        described(rounding(8), config_groups={"W8A8": ["Linear"]}),
        "quantization_config.config_groups.W8A8",
    ),
    (described(rounding(8), spin=1), "quantization_config.spin = 1"),
    (described(rounding(8), ignore="lm_head"), "quantization_config.ignore = 'lm_head'"),
    (described(rounding(8), ignore=[7]), "quantization_config.ignore = [7]"),
    (described(rounding(8), ignore=["re:(a"]), "quantization_config.ignore = 're:(a'"),
    (described(rounding(8), ignore=["re:(a+)+$"]), "quantization_config.ignore = 're:(a+)+$'"),
    (described(rounding(8), ignore=["re:" + ".*" * 9]), "quantization_config.ignore = 're:"),
    (described(rounding(8), ignore=["Linear"]), "quantization_config.ignore = 'Linear'"),
]


@pytest.mark.parametrize(("config", "words"), CONFIGS, ids=[words for _, words in CONFIGS])
def test_a_config_that_is_not_understood(tmp_path, config, words):
    tiny.write(tmp_path, LLAMA | {"quantization_config": config}, {"x": np.zeros(1, np.float32)})
    refused(lambda: read_config(tmp_path), words)


@pytest.mark.parametrize("targets", [None, [], ["LlamaDecoderLayer"], "Linear", ["re:["]])
def test_targets_that_are_not_understood(tmp_path, targets):
    config = described(rounding(8))
    config["config_groups"]["group_0"]["targets"] = targets
    tiny.write(tmp_path, LLAMA | {"quantization_config": config}, {"x": np.zeros(1, np.float32)})
    refused(lambda: read_config(tmp_path), "quantization_config.config_groups.group_0.targets")


def test_older_configs(tmp_path):
    """What earlier tools wrote besides says nothing about the weights."""
    sparse = {
        "format": "dense",
        "global_sparsity": 0.1,
        "ignore": [],
        "sparsity_structure": "unstructured",
    }
    config = described(
        rounding(8, -1, strategy="channel", actorder="weight"), sparsity_config=sparse
    )
    tiny.write(
        tmp_path, LLAMA | {"quantization_config": config | {"quantization_status": "frozen"}}
    )
    assert read_config(tmp_path).quant == "int8-weights"


def test_other_methods_are_refused_as_before(tmp_path):
    tiny.write(tmp_path, LLAMA | {"quantization_config": {"quant_method": "aqlm", "bits": 2}})
    refused(lambda: read_config(tmp_path), "quantization_config", "aqlm")


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
def test_any_value_of_any_key(data):
    """Refused in a line, or understood."""
    case = data.draw(st.sampled_from(sorted(CASES)))
    config = json.loads(json.dumps(CASES[case][0]))
    for _ in range(data.draw(st.integers(1, 3))):
        place = config
        while isinstance(place, dict) and place:
            key = data.draw(st.sampled_from(sorted(place)))
            if not isinstance(place[key], dict) or data.draw(st.integers(0, 3)) == 0:
                place[key] = data.draw(st.sampled_from(VALUES))
                break
            place = place[key]
    try:
        form = split_quantization({"quantization_config": config})[1]
    except ModelError as error:
        assert "\n" not in str(error)
        assert "quantization_config" in str(error)
        return
    assert form is None or form.quant in CASE_NAMES


STEM = "model.layers.1.mlp.down_proj"


def replaced(suffix: str, make):
    """A change of one tensor of a matrix; None takes it away."""

    def damage(tensors: dict) -> None:
        value = make(tensors.pop(STEM + suffix, None))
        tensors.update({} if value is None else {STEM + suffix: value})

    return damage


def first(value):
    """A scale array with one wrong entry."""

    def make(scale):
        return np.where(
            np.arange(scale.size).reshape(scale.shape) == 0, value, scale.astype(np.float32)
        )

    return make


DAMAGE = [
    ("w8a8", replaced(".weight_scale", lambda x: None), f"{STEM}.weight'"),
    ("w8a8", replaced(".weight_scale", lambda x: x[:-1]), f"{STEM}.weight_scale"),
    ("w8a8", replaced(".weight_scale", lambda x: x.T.copy()), f"{STEM}.weight_scale"),
    ("w8a8", replaced(".weight_scale", lambda x: x.astype(np.float64)), f"{STEM}.weight_scale"),
    ("w8a8", replaced(".weight_scale", lambda x: x[:, 0].astype(np.int32)), f"{STEM}.weight_scale"),
    ("w8a8", replaced(".weight_scale", first(np.nan)), f"{STEM}.weight_scale"),
    ("w8a8", replaced(".weight_scale", first(np.inf)), f"{STEM}.weight_scale"),
    ("w8a8", replaced(".weight", lambda x: None), f"{STEM}.weight'"),
    ("w8a8", replaced(".weight", lambda x: x.astype(np.uint8)), f"{STEM}.weight'"),
    ("w8a8", replaced(".weight", lambda x: x[:, :-1].copy()), f"{STEM}.weight'"),
    ("w8a8", replaced(".weight", lambda x: x.reshape(-1)), f"{STEM}.weight'"),
    ("w8a8", replaced(".weight", lambda x: x[:, :0].copy()), f"{STEM}.weight'"),
    (
        "w8a8",
        replaced(".weight_zero_point", lambda x: np.zeros((D, 1), np.int8)),
        f"{STEM}.weight_zero_point",
    ),
    ("fp8", replaced(".weight", lambda x: x.view(np.int8)), f"{STEM}.weight'"),
    (
        "fp8",
        replaced(".weight", lambda x: np.full_like(x, np.nan)),
        "holds a code that is no number",
    ),
    ("w4a16-32", replaced(".weight_scale", lambda x: None), f"{STEM}.weight_scale"),
    ("w4a16-32", replaced(".weight_scale", lambda x: x[:, :-1].copy()), f"{STEM}.weight_scale"),
    ("w4a16-32", replaced(".weight_scale", lambda x: x[:, 0].copy()), f"{STEM}.weight_scale"),
    ("w4a16-32", replaced(".weight_scale", first(1e5)), "at most 65504"),
    ("w4a16-32", replaced(".weight_packed", lambda x: None), f"{STEM}.weight"),
    ("w4a16-32", replaced(".weight_packed", lambda x: x[:, :-1].copy()), f"{STEM}.weight_packed"),
    ("w4a16-32", replaced(".weight_packed", lambda x: x.astype(np.int64)), f"{STEM}.weight_packed"),
    ("w4a16-32", replaced(".weight_shape", lambda x: None), f"{STEM}.weight_shape"),
    ("w4a16-32", replaced(".weight_shape", lambda x: x[:1].copy()), f"{STEM}.weight_shape"),
    ("w4a16-32", replaced(".weight_shape", lambda x: x.astype(np.float32)), f"{STEM}.weight_shape"),
    ("w4a16-32", replaced(".weight_shape", lambda x: x * 2**40), f"{STEM}.weight_packed"),
    ("w4a16-32", replaced(".weight_shape", lambda x: -x), f"{STEM}.weight_shape"),
    ("w4a16-32", replaced(".weight_shape", lambda x: x - 8), f"{STEM}.weight_packed"),
    (
        "w4a16-32",
        replaced(".weight_g_idx", lambda x: np.zeros(F, np.int32)),
        f"{STEM}.weight_g_idx",
    ),
    ("w4a16-32", replaced(".weight", lambda x: np.zeros((D, F), np.float32)), f"{STEM}.weight'"),
    (
        "w4a16-32",
        replaced(".weight_zero_point", lambda x: np.zeros((16, 8), np.int32)),
        f"{STEM}.weight_zero_point",
    ),
    ("w4a16-64-zero", replaced(".weight_zero_point", lambda x: None), f"{STEM}.weight_zero_point"),
    (
        "w4a16-64-zero",
        replaced(".weight_zero_point", lambda x: x[:-1]),
        f"{STEM}.weight_zero_point",
    ),
    (
        "w4a16-64-zero",
        replaced(".weight_zero_point", lambda x: x.astype(np.int8)),
        f"{STEM}.weight_zero_point",
    ),
]


@pytest.mark.parametrize(
    ("case", "damage", "words"), DAMAGE, ids=[f"{case}-{w}" for case, _, w in DAMAGE]
)
def test_damaged_tensors(tmp_path, case, damage, words):
    tensors, _ = by_hand(tmp_path, case)
    read(tmp_path)
    damage(tensors)
    save_file(
        {name: np.ascontiguousarray(value) for name, value in tensors.items()},
        tmp_path / "model.safetensors",
    )
    refused(lambda: read(tmp_path), words)


@pytest.mark.parametrize("case", ["w8a8", "w4a16-64-zero"])
def test_truncated(tmp_path, case):
    by_hand(tmp_path, case)
    file = tmp_path / "model.safetensors"
    rng = np.random.default_rng(0)
    whole = file.read_bytes()
    for cut in [0, 7, 100, len(whole) - 1, *rng.integers(0, len(whole), 20)]:
        file.write_bytes(whole[:cut])
        refused(lambda: read(tmp_path), "model.safetensors")


def test_a_group_that_does_not_divide(tmp_path):
    tensors, _ = by_hand(tmp_path, "w4a16-128")
    tensors |= {
        f"{STEM}.weight_packed": np.zeros((D, 24), np.int32),
        f"{STEM}.weight_shape": np.array([D, 192]),
    }
    save_file(
        tensors | {f"{STEM}.weight_scale": np.ones((D, 1), np.float16)},
        tmp_path / "model.safetensors",
    )
    refused(lambda: read(tmp_path), STEM, "192 inputs", "could be 32 or 64")


def test_a_scale_that_is_no_number_where_codes_are_widened(tmp_path):
    tensors, _ = by_hand(tmp_path, "w8a8")
    parts, _ = coded(
        np.random.default_rng(0), "lm_head", tensors.pop("lm_head.weight").shape, "w8a8"
    )
    parts["lm_head.weight_scale"][3] = np.nan
    save_file(tensors | parts, tmp_path / "model.safetensors")
    config = replace(read_config(tmp_path), quant=None)
    refused(
        lambda: load_weights(tmp_path, config, place=lambda spec, leaf: leaf),
        "lm_head.weight_scale",
        "finite",
    )


@pytest.mark.slow
def test_scales_too_small_for_float16_are_the_nearest(tmp_path):
    tensors, _ = by_hand(tmp_path, "w4a16-32")
    name = f"{STEM}.weight_scale"
    tensors[name] = np.full_like(tensors[name], 1.1e-6)
    save_file(tensors, tmp_path / "model.safetensors")
    scale = read(tmp_path).layers[1].mlp.down_FD.scale
    assert np.abs(scale.astype(np.float64) - tensors[name][0, 0].astype(np.float64)).max() <= 3e-8
