"""GGUF files of `quire quantize --layout gguf` against the gguf package and the converter."""

import json
import random
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, pre_tokenizers
from typer.testing import CliRunner

from quire.__main__ import app
from quire.model.checkpoint.gguf_folder import make_folder
from quire.model.checkpoint.loader import load_weights, read_config
from quire.model.checkpoint.published import gather
from quire.model.checkpoint.safetensors import find_tensors
from quire.model.config import ModelError
from quire.model.gguf.blocks import WRITTEN as TYPES
from quire.model.gguf.description import ARCHITECTURE_BY_FAMILY
from quire.model.gguf.file import read_file
from quire.model.gguf.tokenizer import load_tokenizer
from quire.model.gguf.vocabulary import tokenizer_metadata
from quire.model.quantize import gguf_file, session
from quire.model.text.tokenizer import Tokenizer as FolderTokenizer
from quire.tests.support import gguf_written, tiny
from quire.tests.support.cases import cases
from quire.tests.support.gguf_files import WRITTEN, family, shapes_of
from quire.tests.support.golden.folder import draw
from quire.tests.support.tokenizer_zoo import (
    EOS,
    ZOO,
    byte_fallback,
    byte_fallback_unstripped,
    byte_level,
    random_text,
)

TEMPLATE = "{% for message in messages %}<|turn|>{{ message.content }}</s>{% endfor %}"
VOCABULARY = 400
# Changes that replace options without a counterpart in llama.cpp, which are rejected.
SUPPORTED_CHANGES: dict[str, dict] = {
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3_text": {"query_pre_attn_scalar": 32, "sliding_window_pattern": 6},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False, "layer_types": None},
    "qwen3_moe": {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1},
}
VARIANTS = sorted(
    name
    for name, variant in WRITTEN.items()
    if variant.config["model_type"] in ARCHITECTURE_BY_FAMILY
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_tokenizer(folder: Path, core: Tokenizer) -> None:
    core.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": EOS, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_llama(folder: Path, **changes) -> tuple[dict, dict[str, np.ndarray]]:
    config = (
        tiny.LLAMA
        | {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "rope_theta": 50000.0,
            "eos_token_id": 1,
        }
        | changes
    )
    tensors = tiny.write(folder, config, tiny.even(tiny.shapes(config)))
    write_tokenizer(folder, byte_level())
    return config, tensors


def write(folder: Path, out: Path, kind: str = "F32", **options) -> Path:
    gguf_file.save(folder, out, read_config(folder), kind, **options)
    return out


def variant_folder(folder: Path, name: str) -> tuple[dict, dict[str, np.ndarray]]:
    hf = WRITTEN[name].config | {"vocab_size": VOCABULARY, "pad_token_id": None}
    hf |= SUPPORTED_CHANGES.get(hf["model_type"], {})
    shapes = shapes_of(family(hf).config(hf))
    tensors = {name: draw(name, shape, 3, hf["model_type"]) for name, shape in shapes.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(tensors, folder / "model.safetensors")
    write_tokenizer(folder, byte_level())
    return hf, tensors


def random_blocks(count: int, seed: int) -> np.ndarray:
    """Random blocks of different magnitudes, and special ones: zeros, constants, rounding ties."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((count, 32)) * 10.0 ** rng.integers(-6, 4, (count, 1))).astype(
        np.float32
    )
    x[0], x[1] = 0, 0.25
    x[2, 1:] = 0
    x[3] = np.arange(-16, 16)
    x[4] = np.arange(-63.5, 64.5, 4)
    return x


@pytest.mark.parametrize("kind", [*TYPES])
def test_encoded_blocks_match_the_gguf_package(kind):
    x = random_blocks(2000, 1)
    x = np.clip(x, -6e4, 6e4) if kind == "F16" else x
    flat = x.reshape(-1, TYPES[kind].elements)
    expected = gguf.quants.quantize(x, gguf.GGMLQuantizationType[kind]).view(np.uint8)
    np.testing.assert_array_equal(TYPES[kind].encode(flat).reshape(-1), expected.reshape(-1))


@pytest.mark.parametrize("name", VARIANTS)
def test_tensors_and_keys_match_the_llama_cpp_converter(tmp_path, name):
    """The reference is the converter in the reader's tests; the file loads as the same model."""
    hf, checkpoint = variant_folder(tmp_path / "dense", name)
    out = write(tmp_path / "dense", tmp_path / "out.gguf")
    gguf_contents = read_file(out)
    expected = gguf_written.tensors(hf, checkpoint) | gguf_written.factors(hf)
    assert {name: tensor.shape for name, tensor in gguf_contents.tensors.items()} == {
        n: x.shape for n, x in expected.items()
    }
    for tensor_name, value in expected.items():
        np.testing.assert_allclose(
            gguf_contents.tensors[tensor_name].read(), value, rtol=1e-6, err_msg=tensor_name
        )
    keys = gguf_written.metadata(hf, hf["num_hidden_layers"])
    for key, value in keys.items():
        if not key.startswith("general.file_type") and key in gguf_contents.metadata:
            assert np.all(gguf_contents.metadata[key] == value), key
    folder = make_folder(out)
    folders = (folder, tmp_path / "dense")
    gguf_weights, dense_weights = (
        load_weights(x, read_config(x, "float32"), place=lambda spec, leaf: leaf) for x in folders
    )
    assert jax.tree.structure(gguf_weights) == jax.tree.structure(dense_weights)
    for actual, expected_leaf in zip(
        jax.tree.leaves(gguf_weights), jax.tree.leaves(dense_weights), strict=True
    ):
        # norm scales are stored plus one, which rounds
        np.testing.assert_allclose(actual, expected_leaf, rtol=0, atol=3e-7)


def test_every_family_has_a_variant():
    assert {WRITTEN[name].config["model_type"] for name in VARIANTS} == {*ARCHITECTURE_BY_FAMILY}


def test_written_file_is_read_by_the_gguf_package(tmp_path):
    config, tensors = write_llama(tmp_path / "dense")
    file = gguf.GGUFReader(write(tmp_path / "dense", tmp_path / "out.gguf", "Q8_0"))
    fields = {name: field.contents() for name, field in file.fields.items()}
    expected_fields = {
        "general.architecture": "llama",
        "general.file_type": 7,
        "llama.block_count": 2,
        "llama.context_length": 64,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 50000.0,
        "llama.rope.dimension_count": 16,
        "llama.vocab_size": VOCABULARY,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    assert {name: fields[name] for name in expected_fields} == expected_fields
    assert (
        len(fields["tokenizer.ggml.tokens"])
        == len(fields["tokenizer.ggml.token_type"])
        == VOCABULARY
    )
    kinds = {tensor.name: tensor.tensor_type.name for tensor in file.tensors}
    assert kinds["output_norm.weight"] == kinds["blk.0.attn_norm.weight"] == "F32"
    assert {kind for name, kind in kinds.items() if "norm" not in name} == {"Q8_0"}
    down_proj = next(tensor for tensor in file.tensors if tensor.name == "blk.1.ffn_down.weight")
    expected = gguf.quants.quantize(
        tensors["model.layers.1.mlp.down_proj.weight"], gguf.GGMLQuantizationType.Q8_0
    )
    np.testing.assert_array_equal(down_proj.data, expected)


@pytest.mark.parametrize("kind", ["Q4_0", "MXFP4"])
def test_embedding_and_head_are_q8_0_in_4_bit_files(tmp_path, kind):
    write_llama(tmp_path / "dense")
    out = write(tmp_path / "dense", tmp_path / "out.gguf", kind)
    kinds = {name: tensor.kind.name for name, tensor in read_file(out).tensors.items()}
    assert {kinds.pop(name) for name in ("token_embd.weight", "output.weight")} == {"Q8_0"}
    assert {tensor_kind for name, tensor_kind in kinds.items() if "norm" not in name} == {kind}
    stored = read_config(make_folder(out)).stored
    assert (
        stored.group_of("model.layers.1.mlp.down_proj").quant
        == {"Q4_0": "int4-32", "MXFP4": "mxfp4"}[kind]
    )


def test_bfloat16_shards_are_written_exactly(tmp_path):
    import ml_dtypes

    config, _ = write_llama(tmp_path / "dense", torch_dtype="bfloat16")
    tensors = {
        name: value.astype(ml_dtypes.bfloat16)
        for name, value in tiny.even(tiny.shapes(config)).items()
    }
    tiny.write(tmp_path / "dense", config, tensors, shards=3)
    (tmp_path / "dense" / "model.safetensors").unlink()
    written = (
        read_file(write(tmp_path / "dense", tmp_path / "out.gguf", "BF16"))
        .tensors["blk.0.ffn_up.weight"]
        .read()
    )
    assert written.tobytes() == tensors["model.layers.0.mlp.up_proj.weight"].tobytes()


LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
LLAMA3 += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {
    "llama": (pre_tokenizers.Split(Regex(LLAMA3), "isolated"), "llama3"),
    "qwen": (pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), "qwen2"),
    "digits": (pre_tokenizers.Digits(True), "starcoder"),
}


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_pre_tokenizer_is_identified_by_its_results(name):
    core = byte_level()
    first, expected_name = PRE_TOKENIZERS[name]
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [first, pre_tokenizers.ByteLevel(False, use_regex=name == "digits")]
    )
    tokenizer_json = json.loads(core.to_str())
    tokenizer_json["model"]["ignore_merges"] = name == "llama"
    metadata = tokenizer_metadata(json.dumps(tokenizer_json), VOCABULARY, {"bos": "<s>"}, [1])
    assert metadata["tokenizer.ggml.pre"] == expected_name


@pytest.mark.random
@pytest.mark.parametrize(
    "make", [byte_level, byte_fallback, byte_fallback_unstripped], ids=lambda make: make.__name__
)
def test_written_tokenizer_encodes_random_texts_alike(make):
    core = make()
    metadata = tokenizer_metadata(
        core.to_str(), 500, {"bos": "<s>", "eos": EOS, "unk": "<unk>"}, []
    )
    written_tokenizer = load_tokenizer(metadata)
    rng = random.Random(5)
    for _ in range(cases(400)):
        text = random_text(rng)
        assert written_tokenizer.encode(text).ids == core.encode(text).ids, text
    assert written_tokenizer.get_vocab() == core.get_vocab()


@pytest.mark.parametrize("name", ["unigram", "word_piece"])
def test_unsupported_tokenizer_models_are_rejected(name):
    with pytest.raises(ModelError, match="model.type"):
        tokenizer_metadata(ZOO[name]().to_str(), 500, {}, [])


def test_unknown_pre_tokenizer_is_rejected():
    core = byte_level()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("o", "isolated"), pre_tokenizers.ByteLevel(False)]
    )
    with pytest.raises(
        ModelError, match="pre_tokenizer cuts texts in a way that llama.cpp has no name for"
    ):
        tokenizer_metadata(core.to_str(), 500, {}, [])


def test_quantize_command_writes_tokenizer_and_sampling_defaults(tmp_path):
    write_llama(tmp_path / "dense")
    out = tmp_path / "new" / "out-Q8_0.gguf"
    arguments = [
        "quantize",
        str(tmp_path / "dense"),
        str(out),
        "--layout",
        "gguf",
        "--quantization",
        "q8_0",
    ]
    sampling = {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    (tmp_path / "dense" / "generation_config.json").write_text(
        json.dumps(sampling | {"do_sample": True})
    )
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "16 matrices in q8_0, laid out as gguf" in " ".join(result.output.split())
    source_tokenizer = FolderTokenizer(tmp_path / "dense")
    gguf_tokenizer = FolderTokenizer(make_folder(out))
    assert source_tokenizer.encode("It's a fox, 123!") == gguf_tokenizer.encode("It's a fox, 123!")
    assert (source_tokenizer.chat_template, source_tokenizer.eos_token_ids) == (
        gguf_tokenizer.chat_template,
        gguf_tokenizer.eos_token_ids,
    )
    assert (
        sampling.items()
        <= json.loads((make_folder(out) / "generation_config.json").read_text()).items()
    )
    assert [*out.parent.iterdir()] == [out]


@pytest.mark.parametrize(
    ("changes", "kind", "name", "words"),
    [
        ({}, "int8", "out.gguf", ("'gguf'", "Q8_0", "'int8'")),
        ({}, "Q6_K", "out.gguf", ("Q8_0", "'Q6_K'")),
        ({}, "F16", "out", ("must end in .gguf",)),
        (
            {"intermediate_size": 80},
            "Q8_0",
            "out.gguf",
            ("ffn_down.weight", "80 inputs", "32", "F16"),
        ),
        (
            {"model_type": "mistral", "sliding_window": 8},
            "F16",
            "out.gguf",
            ("mistral", "window = 8"),
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "F16",
            "out.gguf",
            ("'dynamic'",),
        ),
    ],
)
def test_unsupported_models_and_formats_are_rejected(tmp_path, changes, kind, name, words):
    write_llama(tmp_path / "dense", **changes)
    with pytest.raises(ModelError) as caught:
        write(tmp_path / "dense", tmp_path / name, kind)
    for word in words:
        assert word in str(caught.value)
    assert [*tmp_path.iterdir()] == [tmp_path / "dense"]


def test_error_names_the_unsupported_family(tmp_path):
    result = CliRunner().invoke(
        app,
        [
            "quantize",
            "quill",
            str(tmp_path / "out.gguf"),
            "--layout",
            "gguf",
            "--quantization",
            "F16",
        ],
    )
    assert isinstance(result.exception, ModelError)
    assert "family quill" in str(result.exception) and "qwen3" in str(result.exception)


def test_dense_layers_in_a_moe_model_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setitem(
        SUPPORTED_CHANGES, "qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [0]}
    )
    variant_folder(tmp_path / "dense", "qwen3-moe")
    with pytest.raises(ModelError, match="qwen3_moe has a layer without experts"):
        write(tmp_path / "dense", tmp_path / "out.gguf")


def test_out_of_range_and_non_finite_values_are_rejected(tmp_path):
    config, tensors = write_llama(tmp_path / "dense")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e5
    tiny.write(tmp_path / "dense", config, tensors)
    with pytest.raises(
        ModelError, match=r"blk.0.ffn_up.weight holds a number that is too large for F16"
    ):
        write(tmp_path / "dense", tmp_path / "out.gguf", "F16")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = np.nan
    tiny.write(tmp_path / "dense", config, tensors)
    with pytest.raises(ModelError, match=r"blk.0.ffn_up.weight holds a value that is not finite"):
        write(tmp_path / "dense", tmp_path / "out.gguf", "Q8_0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense"]


SAMPLES = [[(7 * i + 3 * k) % VOCABULARY for i in range(40)] for k in range(6)]
FORMAT_BY_KIND = {"Q4_0": "int4-32", "Q8_0": "int8-weights-32"}


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("kind", FORMAT_BY_KIND)
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
@pytest.mark.slow
def test_calibrated_codes_match_those_of_a_folder(tmp_path, name, kind, method):
    """The gguf package reads the same values as those of a compressed-tensors folder."""
    dense = tmp_path / "dense"
    folder = tmp_path / "folder"
    out = tmp_path / "out.gguf"
    hf, _ = write_llama(dense) if name == "llama" else variant_folder(dense, name)
    session.save(
        dense, folder, read_config(dense, quantization=FORMAT_BY_KIND[kind]), method, SAMPLES
    )
    session.save_gguf(dense, out, read_config(dense), kind, method, SAMPLES)
    names = {path.name for path in tmp_path.iterdir()} - {"cache"}  # where kernels may be built
    assert names == {"dense", "folder", "out.gguf"}
    stored = read_config(folder).stored
    assert stored is not None
    checkpoint = {
        name: tensor.read() for name, tensor in gather(find_tensors(folder), stored).items()
    }
    expected = gguf_written.tensors(hf, checkpoint)
    num_quantized = 0
    for tensor in gguf.GGUFReader(out).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.tensor_type.name == kind and tensor.name not in (
            "token_embd.weight",
            "output.weight",
        ):
            num_quantized += 1
            np.testing.assert_array_equal(values, expected[tensor.name], err_msg=tensor.name)
        elif tensor.tensor_type.name == "F32" and tensor.name in expected:
            np.testing.assert_allclose(
                values, expected[tensor.name], rtol=1e-6, err_msg=tensor.name
            )
    assert num_quantized == 7 * hf["num_hidden_layers"]


@pytest.mark.parametrize(
    ("kind", "method"), [("Q5_0", "gptq"), ("F16", "awq"), ("Q8_0", "smoothquant")]
)
def test_unsupported_kinds_of_calibrated_methods_are_rejected(tmp_path, kind, method):
    write_llama(tmp_path / "dense")
    text = tmp_path / "text.txt"
    text.write_text("It is a fox. " * 30)
    options = [
        "--layout",
        "gguf",
        "--quantization",
        kind,
        "--method",
        method,
        "--calibration",
        str(text),
    ]
    result = CliRunner().invoke(
        app, ["quantize", str(tmp_path / "dense"), str(tmp_path / "out.gguf"), *options]
    )
    assert isinstance(result.exception, ModelError)
    assert f"method is '{method}' and quantization '{kind}'" in str(result.exception)
    assert "gptq and awq for Q4_0 and Q8_0" in str(result.exception)
    assert {path.name for path in tmp_path.iterdir()} == {"dense", "text.txt"}


def test_quantize_command_with_calibration(tmp_path):
    write_llama(tmp_path / "dense")
    (tmp_path / "text.txt").write_text("It is a fox. " * 30)
    options = ["--layout", "gguf", "--quantization", "q4_0", "--method", "gptq", "--calibration"]
    out = tmp_path / "out.gguf"
    result = CliRunner().invoke(
        app, ["quantize", str(tmp_path / "dense"), str(out), *options, str(tmp_path / "text.txt")]
    )
    assert result.exit_code == 0, result.output
    assert "16 matrices in q4_0, laid out as gguf" in " ".join(result.output.split())
    assert read_file(out).tensors["blk.0.ffn_up.weight"].kind.name == "Q4_0"
