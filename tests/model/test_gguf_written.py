"""GGUF files that `quire quantize --layout gguf` writes, against the format's own package and the
converter's rules.
"""

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
from quire.model.text.tokenizer import Tokenizer as Folder
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
# What llama.cpp's code has no word for is refused; these are the same models without it.
USUAL: dict[str, dict] = {
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


def tokenizer(folder: Path, core: Tokenizer) -> None:
    core.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": EOS, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def llama(folder: Path, **changes) -> tuple[dict, dict[str, np.ndarray]]:
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
    tokenizer(folder, byte_level())
    return config, tensors


def write(folder: Path, out: Path, kind: str = "F32", **options) -> Path:
    gguf_file.save(folder, out, read_config(folder), kind, **options)
    return out


def variant_folder(folder: Path, name: str) -> tuple[dict, dict[str, np.ndarray]]:
    hf = WRITTEN[name].config | {"vocab_size": VOCABULARY, "pad_token_id": None}
    hf |= USUAL.get(hf["model_type"], {})
    shapes = shapes_of(family(hf).config(hf))
    tensors = {name: draw(name, shape, 3, hf["model_type"]) for name, shape in shapes.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(tensors, folder / "model.safetensors")
    tokenizer(folder, byte_level())
    return hf, tensors


def numbers(count: int, seed: int) -> np.ndarray:
    """Blocks of all sizes, some of zeros, some with one number or halves."""
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
def test_blocks_are_those_of_the_reference(kind):
    x = numbers(2000, 1)
    x = np.clip(x, -6e4, 6e4) if kind == "F16" else x
    flat = x.reshape(-1, TYPES[kind].elements)
    expected = gguf.quants.quantize(x, gguf.GGMLQuantizationType[kind]).view(np.uint8)
    np.testing.assert_array_equal(TYPES[kind].encode(flat).reshape(-1), expected.reshape(-1))


@pytest.mark.parametrize("name", VARIANTS)
def test_tensors_and_keys_are_the_converter_s(tmp_path, name):
    """By what the tests of the reader say that llama.cpp's converter writes; and it is read as the
    same model.
    """
    hf, checkpoint = variant_folder(tmp_path / "dense", name)
    out = write(tmp_path / "dense", tmp_path / "out.gguf")
    found = read_file(out)
    expected = gguf_written.tensors(hf, checkpoint) | gguf_written.factors(hf)
    assert {name: tensor.shape for name, tensor in found.tensors.items()} == {
        n: x.shape for n, x in expected.items()
    }
    for own, value in expected.items():
        np.testing.assert_allclose(found.tensors[own].read(), value, rtol=1e-6, err_msg=own)
    keys = gguf_written.metadata(hf, hf["num_hidden_layers"])
    for key, value in keys.items():
        if not key.startswith("general.file_type") and key in found.metadata:
            assert np.all(found.metadata[key] == value), key
    folder = make_folder(out)
    both = (folder, tmp_path / "dense")
    read, mine = (
        load_weights(x, read_config(x, "float32"), place=lambda spec, leaf: leaf) for x in both
    )
    assert jax.tree.structure(read) == jax.tree.structure(mine)
    for one, other in zip(jax.tree.leaves(read), jax.tree.leaves(mine), strict=True):
        # a scale less one, plus one, less one
        np.testing.assert_allclose(one, other, rtol=0, atol=3e-7)


def test_every_family_has_a_variant():
    assert {WRITTEN[name].config["model_type"] for name in VARIANTS} == {*ARCHITECTURE_BY_FAMILY}


def test_the_file_as_the_format_s_own_package_reads_it(tmp_path):
    config, tensors = llama(tmp_path / "dense")
    file = gguf.GGUFReader(write(tmp_path / "dense", tmp_path / "out.gguf", "Q8_0"))
    fields = {name: field.contents() for name, field in file.fields.items()}
    wanted = {
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
    assert {name: fields[name] for name in wanted} == wanted
    assert (
        len(fields["tokenizer.ggml.tokens"])
        == len(fields["tokenizer.ggml.token_type"])
        == VOCABULARY
    )
    kinds = {tensor.name: tensor.tensor_type.name for tensor in file.tensors}
    assert kinds["output_norm.weight"] == kinds["blk.0.attn_norm.weight"] == "F32"
    assert {kind for name, kind in kinds.items() if "norm" not in name} == {"Q8_0"}
    own = next(tensor for tensor in file.tensors if tensor.name == "blk.1.ffn_down.weight")
    expected = gguf.quants.quantize(
        tensors["model.layers.1.mlp.down_proj.weight"], gguf.GGMLQuantizationType.Q8_0
    )
    np.testing.assert_array_equal(own.data, expected)


@pytest.mark.parametrize("kind", ["Q4_0", "MXFP4"])
def test_four_bits_are_too_few_for_a_vocabulary(tmp_path, kind):
    llama(tmp_path / "dense")
    out = write(tmp_path / "dense", tmp_path / "out.gguf", kind)
    kinds = {name: tensor.kind.name for name, tensor in read_file(out).tensors.items()}
    assert {kinds.pop(name) for name in ("token_embd.weight", "output.weight")} == {"Q8_0"}
    assert {one for name, one in kinds.items() if "norm" not in name} == {kind}
    stored = read_config(make_folder(out)).stored
    assert (
        stored.group_of("model.layers.1.mlp.down_proj").quant
        == {"Q4_0": "int4-32", "MXFP4": "mxfp4"}[kind]
    )


def test_other_dtypes_and_several_files(tmp_path):
    import ml_dtypes

    config, _ = llama(tmp_path / "dense", torch_dtype="bfloat16")
    tensors = {
        name: value.astype(ml_dtypes.bfloat16)
        for name, value in tiny.even(tiny.shapes(config)).items()
    }
    tiny.write(tmp_path / "dense", config, tensors, shards=3)
    (tmp_path / "dense" / "model.safetensors").unlink()
    found = (
        read_file(write(tmp_path / "dense", tmp_path / "out.gguf", "BF16"))
        .tensors["blk.0.ffn_up.weight"]
        .read()
    )
    assert found.tobytes() == tensors["model.layers.0.mlp.up_proj.weight"].tobytes()


LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
LLAMA3 += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CUTS = {
    "llama": (pre_tokenizers.Split(Regex(LLAMA3), "isolated"), "llama3"),
    "qwen": (pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), "qwen2"),
    "digits": (pre_tokenizers.Digits(True), "starcoder"),
}


@pytest.mark.parametrize("name", CUTS)
def test_how_texts_are_cut_is_known_by_what_comes_of_it(name):
    core = byte_level()
    first, right = CUTS[name]
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [first, pre_tokenizers.ByteLevel(False, use_regex=name == "digits")]
    )
    made = json.loads(core.to_str())
    made["model"]["ignore_merges"] = name == "llama"
    found = tokenizer_metadata(json.dumps(made), VOCABULARY, {"bos": "<s>"}, [1])
    assert found["tokenizer.ggml.pre"] == right


@pytest.mark.random
@pytest.mark.parametrize(
    "make", [byte_level, byte_fallback, byte_fallback_unstripped], ids=lambda make: make.__name__
)
def test_texts_are_the_same_tokens(make):
    core = make()
    found = tokenizer_metadata(core.to_str(), 500, {"bos": "<s>", "eos": EOS, "unk": "<unk>"}, [])
    again = load_tokenizer(found)
    rng = random.Random(5)
    for _ in range(cases(400)):
        text = random_text(rng)
        assert again.encode(text).ids == core.encode(text).ids, text
    assert again.get_vocab() == core.get_vocab()


@pytest.mark.parametrize("name", ["unigram", "word_piece"])
def test_tokenizers_of_other_kinds_are_refused(name):
    with pytest.raises(ModelError, match="model.type"):
        tokenizer_metadata(ZOO[name]().to_str(), 500, {}, [])


def test_a_way_to_cut_that_has_no_name_is_refused():
    core = byte_level()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("o", "isolated"), pre_tokenizers.ByteLevel(False)]
    )
    with pytest.raises(
        ModelError, match="pre_tokenizer cuts texts in a way that llama.cpp has no name for"
    ):
        tokenizer_metadata(core.to_str(), 500, {}, [])


def test_the_command_and_the_tokenizer(tmp_path):
    llama(tmp_path / "dense")
    out = tmp_path / "new" / "out-Q8_0.gguf"
    asked = [
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
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "16 matrices in q8_0, laid out as gguf" in " ".join(done.output.split())
    mine = Folder(tmp_path / "dense")
    read = Folder(make_folder(out))
    assert mine.encode("It's a fox, 123!") == read.encode("It's a fox, 123!")
    assert (mine.chat_template, mine.eos_token_ids) == (read.chat_template, read.eos_token_ids)
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
        ({"intermediate_size": 80}, "Q8_0", "out.gguf", ("ffn_down.weight", "80 inputs", "32", "F16")),
        ({"model_type": "mistral", "sliding_window": 8}, "F16", "out.gguf", ("mistral", "window = 8")),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "F16", "out.gguf", ("'dynamic'",)),
    ],
)  # fmt: skip
def test_what_a_file_cannot_be(tmp_path, changes, kind, name, words):
    llama(tmp_path / "dense", **changes)
    with pytest.raises(ModelError) as caught:
        write(tmp_path / "dense", tmp_path / name, kind)
    for word in words:
        assert word in str(caught.value)
    assert [*tmp_path.iterdir()] == [tmp_path / "dense"]


def test_other_families_are_refused_by_name(tmp_path):
    done = CliRunner().invoke(
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
    assert isinstance(done.exception, ModelError)
    assert "family quill" in str(done.exception) and "qwen3" in str(done.exception)


def test_layers_that_llama_cpp_does_not_know(tmp_path, monkeypatch):
    monkeypatch.setitem(USUAL, "qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [0]})
    variant_folder(tmp_path / "dense", "qwen3-moe")
    with pytest.raises(ModelError, match="qwen3_moe has a layer without experts"):
        write(tmp_path / "dense", tmp_path / "out.gguf")


def test_numbers_that_a_type_cannot_hold(tmp_path):
    config, tensors = llama(tmp_path / "dense")
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
CHOSEN = {"Q4_0": "int4-32", "Q8_0": "int8-weights-32"}


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("kind", CHOSEN)
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
@pytest.mark.slow
def test_codes_that_a_method_chose(tmp_path, name, kind, method):
    """Those of a folder in compressed-tensors, block by block, as the format's own package
    reads them.
    """
    dense = tmp_path / "dense"
    folder = tmp_path / "folder"
    out = tmp_path / "out.gguf"
    hf, _ = llama(dense) if name == "llama" else variant_folder(dense, name)
    session.save(dense, folder, read_config(dense, quantization=CHOSEN[kind]), method, SAMPLES)
    session.save_gguf(dense, out, read_config(dense), kind, method, SAMPLES)
    there = {path.name for path in tmp_path.iterdir()} - {"cache"}  # where kernels may be built
    assert there == {"dense", "folder", "out.gguf"}
    stored = read_config(folder).stored
    assert stored is not None
    checkpoint = {
        name: tensor.read() for name, tensor in gather(find_tensors(folder), stored).items()
    }
    expected = gguf_written.tensors(hf, checkpoint)
    coded = 0
    for tensor in gguf.GGUFReader(out).tensors:
        found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.tensor_type.name == kind and tensor.name not in (
            "token_embd.weight",
            "output.weight",
        ):
            coded += 1
            np.testing.assert_array_equal(found, expected[tensor.name], err_msg=tensor.name)
        elif tensor.tensor_type.name == "F32" and tensor.name in expected:
            np.testing.assert_allclose(found, expected[tensor.name], rtol=1e-6, err_msg=tensor.name)
    assert coded == 7 * hf["num_hidden_layers"]


@pytest.mark.parametrize(
    ("kind", "method"), [("Q5_0", "gptq"), ("F16", "awq"), ("Q8_0", "smoothquant")]
)
def test_what_methods_do_not_choose(tmp_path, kind, method):
    llama(tmp_path / "dense")
    text = tmp_path / "text.txt"
    text.write_text("It is a fox. " * 30)
    asked = [
        "--layout",
        "gguf",
        "--quantization",
        kind,
        "--method",
        method,
        "--calibration",
        str(text),
    ]
    done = CliRunner().invoke(
        app, ["quantize", str(tmp_path / "dense"), str(tmp_path / "out.gguf"), *asked]
    )
    assert isinstance(done.exception, ModelError)
    assert f"method is '{method}' and quantization '{kind}'" in str(done.exception)
    assert "gptq and awq for Q4_0 and Q8_0" in str(done.exception)
    assert {path.name for path in tmp_path.iterdir()} == {"dense", "text.txt"}


def test_the_command_with_a_method(tmp_path):
    llama(tmp_path / "dense")
    (tmp_path / "text.txt").write_text("It is a fox. " * 30)
    asked = ["--layout", "gguf", "--quantization", "q4_0", "--method", "gptq", "--calibration"]
    out = tmp_path / "out.gguf"
    done = CliRunner().invoke(
        app, ["quantize", str(tmp_path / "dense"), str(out), *asked, str(tmp_path / "text.txt")]
    )
    assert done.exit_code == 0, done.output
    assert "16 matrices in q4_0, laid out as gguf" in " ".join(done.output.split())
    assert read_file(out).tensors["blk.0.ffn_up.weight"].kind.name == "Q4_0"
