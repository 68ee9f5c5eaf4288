"""GGUF files as models: the numbers that they mean, their own codes, and the engine on them."""

import json
from pathlib import Path
from types import SimpleNamespace

import gguf
import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from quire import LLM, SamplingParams
from quire.__main__ import app
from quire.model import partition
from quire.model.checkpoint import gguf_folder, hub
from quire.model.checkpoint.gguf_folder import make_folder
from quire.model.checkpoint.loader import load_weights, read_config
from quire.model.config import ModelError
from quire.model.gguf.file import read_file
from quire.model.gguf.file_type import FILE_TYPES, file_format
from quire.model.gguf.metadata import Metadata
from quire.ops.linear import einsum
from quire.ops.quant.grouped import Grouped
from quire.ops.quant.int4 import Int4
from quire.serving.http.endpoints.ollama import details
from quire.tests.support import served_codes, tiny, tiny_gguf
from quire.tests.support.cases import cases, thinned

KINDS = [*gguf_folder.KEPT, "F32", "F16", "BF16", "IQ3_S", "IQ2_XXS"]
D = 256
N = 8
K = 4


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def read(file: Path, **options):
    folder = hub.resolve(str(file))
    return load_weights(
        folder, read_config(folder, "float32", **options), place=lambda spec, leaf: leaf
    )


def dense_of(leaf) -> np.ndarray:
    """[*into, *out], through the format's own arithmetic, which float32 holds as GGUF's does."""
    if isinstance(leaf, Int4):
        return np.asarray(leaf.dense()).reshape(*leaf.into, *leaf.out)
    if isinstance(leaf, Grouped):
        return np.asarray(leaf.dense(int(np.prod(leaf.into)))).reshape(*leaf.into, *leaf.out)
    return leaf


def assert_is(weights, means: dict[str, np.ndarray]) -> None:
    """Bit for bit, but for the sign of a zero."""
    D = means["model.embed_tokens.weight"].shape[1]
    H = D // N
    for i, layer in enumerate(weights.layers):
        names = [f"self_attn.{x}_proj" for x in "qkvo"] + [
            f"mlp.{x}_proj" for x in ("gate", "up", "down")
        ]
        q, k, v, o, gate, up, down = (means[f"model.layers.{i}.{name}.weight"].T for name in names)
        qkv = np.concatenate([q.reshape(D, N, H), k.reshape(D, K, H), v.reshape(D, K, H)], axis=1)
        found = (
            layer.attention.qkv_DGH,
            layer.attention.out_NHD,
            layer.mlp.up_DGF,
            layer.mlp.down_FD,
        )
        for leaf, right in zip(
            found, (qkv, o.reshape(N, H, D), np.stack([gate, up], axis=1), down), strict=True
        ):
            np.testing.assert_array_equal(dense_of(leaf), right)
        np.testing.assert_array_equal(
            layer.pre_attention_norm_D, means[f"model.layers.{i}.input_layernorm.weight"]
        )
    np.testing.assert_array_equal(dense_of(weights.embed_VD), means["model.embed_tokens.weight"])
    head = dense_of(weights.head_VD)
    np.testing.assert_array_equal(
        head if head.shape == (96, D) else head.T, means["lm_head.weight"]
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_every_type_means_what_the_package_says(tmp_path, kind, caplog):
    caplog.set_level("INFO", "quire")
    means = tiny_gguf.write(tmp_path / "model.gguf", kind)
    weights = read(tmp_path / "model.gguf")
    assert_is(weights, means)
    # the embedding is
    assert ("quantised matrices are dequantised" in caplog.text) == (
        kind not in ("F32", "F16", "BF16")
    )
    kept = isinstance(weights.layers[0].mlp.down_FD, Int4 | Grouped)
    assert kept == (kind in gguf_folder.KEPT)
    assert read_config(hub.resolve(str(tmp_path / "model.gguf"))).quant == gguf_folder.KEPT.get(
        kind
    )


@pytest.mark.parametrize(
    ("kind", "other", "kept"),
    [
        ("Q4_K", "Q6_K", ("uint6", 16, True)), ("Q4_K", "Q2_K", ("uint4", 16, True)),
        ("Q3_K", "Q4_K", ("uint4", 16, True)), ("Q3_K", "Q5_K", ("uint6", 16, True)),
        ("Q6_K", "Q3_K", ("int6", 16, True)), ("Q4_0", "Q8_0", ("int8", 32, False)),
        ("Q8_0", "Q6_K", ("int8", 16, False)), ("Q5_1", "Q4_K", ("int8", 32, False)), ("IQ4_XS", "Q5_K", None),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_types_that_are_mixed(tmp_path, kind, other, kept):
    """As in Q4_K_M: what is one matrix here is kept in codes that hold both, or is widened."""
    config = tiny_gguf.LLAMA | {"hidden_size": 512, "num_hidden_layers": 1}  # rows of two blocks
    means = tiny_gguf.write(tmp_path / "model.gguf", kind, config, v_proj_kind=other)
    weights = read(tmp_path / "model.gguf")
    assert_is(weights, means)
    qkv = weights.layers[0].attention.qkv_DGH
    assert (None if isinstance(qkv, np.ndarray) else (qkv.code, qkv.group, qkv.levels)) == kept
    assert not isinstance(weights.layers[0].attention.out_NHD, np.ndarray)


@pytest.mark.parametrize(
    "kind", thinned(["Q4_K", "Q8_0", "IQ4_XS", "MXFP4", "IQ3_S"], ["Q4_K", "MXFP4"])
)
@pytest.mark.slow
def test_tokens_and_company(tmp_path, kind):
    """Near the dense model of the same numbers, whatever the batch; with a prefix cache and a
    schema.
    """
    means = tiny_gguf.write(
        tmp_path / "model.gguf", kind, v_proj_kind="Q6_K" if kind == "Q4_K" else None
    )
    tiny.write(tmp_path / "dense", tiny_gguf.LLAMA, means)
    llm = LLM(tmp_path / "model.gguf", **served_codes.SIZES)
    prompts = ["a story about a fox", "rain", "one two one two one two one two one", "went home"]
    answers = llm.generate(prompts, SamplingParams(max_tokens=1))
    ids = [list(one.prompt_token_ids) for one in answers]
    assert ids[0][0] == 1  # begins as the file says
    served_codes.check(llm, tmp_path / "dense", ids)
    chosen = SamplingParams(
        temperature=0, max_tokens=8, structured_outputs={"choice": ["fox", "bird"]}
    )
    assert llm.generate("a", chosen)[0].outputs[0].text.strip() in ("fox", "bird")


def test_the_head_and_the_embedding_in_one(tmp_path):
    """A tied embedding keeps its codes, and rows of it are looked up in them."""
    means = tiny_gguf.write(
        tmp_path / "model.gguf", "Q6_K", tiny_gguf.LLAMA | {"tie_word_embeddings": True}
    )
    folder = hub.resolve(str(tmp_path / "model.gguf"))
    config = read_config(folder, "float32")
    assert config.tied
    table = load_weights(folder, config, place=lambda spec, leaf: leaf).embed_VD
    assert isinstance(table, Grouped)
    np.testing.assert_array_equal(
        table[np.array([5, 0, 95])], means["model.embed_tokens.weight"][[5, 0, 95]]
    )
    x = np.random.default_rng(0).standard_normal((3, D)).astype(np.float32)
    right = x @ means["model.embed_tokens.weight"].T
    np.testing.assert_allclose(einsum("RD,VD->RV", jax.numpy.asarray(x), table), right, atol=0.1)


def test_devices_may_not_cut_a_block(tmp_path):
    """256 inputs share the upper level of a scale: a part has them whole."""
    shape = {"hidden_size": 512, "num_hidden_layers": 1}
    tiny_gguf.write(tmp_path / "model.gguf", "Q6_K", tiny_gguf.LLAMA | shape)
    config = read_config(hub.resolve(str(tmp_path / "model.gguf")))
    partition.check(config, 2, 1, 1)
    with pytest.raises(
        ModelError,
        match="a matrix of 512 inputs is kept as 'k6-16', whose groups of 256 it would cut",
    ):
        partition.check(config, 4, 1, 1)


def test_parts(tmp_path):
    """A file in parts, by the name of any of them; and a folder that holds nothing else."""
    (tmp_path / "m").mkdir()
    means = tiny_gguf.write(tmp_path / "m" / "model.gguf", "Q8_0", split_max_tensors=7)
    parts = sorted((tmp_path / "m").glob("*.gguf"))
    assert len(parts) > 1
    for given in (*parts, tmp_path / "m"):
        assert_is(read(given), means)


def test_a_folder_of_several(tmp_path):
    for name in ("a", "b"):
        tiny_gguf.write(tmp_path / f"{name}.gguf", "Q8_0")
    with pytest.raises(ModelError, match=r"several GGUF files, a\.gguf, b\.gguf: give one of them"):
        hub.resolve(str(tmp_path))


def test_a_file_that_changes_is_read_anew(tmp_path):
    file = tmp_path / "model.gguf"
    tiny_gguf.write(file, "Q8_0")
    first = hub.resolve(str(file))
    assert hub.resolve(str(file)) == first
    file.unlink()
    means = tiny_gguf.write(file, "Q4_0", seed=1)
    assert hub.resolve(str(file)) != first
    assert_is(read(file), means)


def test_folder_is_made_while_another_process_with_this_id_makes_it(tmp_path, monkeypatch):
    """As in containers that share the cache: the one that is quicker publishes, and the other takes
    its folder.
    """
    file = tmp_path / "model.gguf"
    means = tiny_gguf.write(file, "Q8_0")
    contents = gguf_folder.build_files
    folders = []

    def paused(items):
        first, *others = items
        yield first
        if not folders:
            folders.append(None)  # so that the quicker one writes without a pause
            folders[0] = gguf_folder.make_folder(file)
        yield from others

    def slow_contents(file):
        texts, files = contents(file)
        return SimpleNamespace(items=lambda: paused(texts.items())), files

    monkeypatch.setattr(gguf_folder, "build_files", slow_contents)
    assert [gguf_folder.make_folder(file)] == folders == [*gguf_folder.home().iterdir()]
    assert_is(read(file), means)


def test_file_types_have_llama_cpp_names():
    known = {member.value: member.name for member in gguf.LlamaFileType}
    for number, name in FILE_TYPES.items():
        assert known[number].removeprefix("ALL_").removeprefix("MOSTLY_") == name


def test_format_is_named_as_the_file_has_it(tmp_path):
    """By general.file_type, else by the type of most elements."""
    file = tmp_path / "model.gguf"
    tiny_gguf.write(file, "Q5_0", v_proj_kind="Q8_0")
    tensors = read_file(file).tensors
    for number, name in ((15, "Q4_K_M"), (3, "Q4_1"), (9999, "Q5_0"), (None, "Q5_0")):
        values = {} if number is None else {"general.file_type": number}
        assert file_format(Metadata(values), tensors) == name
    config = read_config(make_folder(file))
    assert config.weights_format == config.file_format == "Q5_0"
    made = details(SimpleNamespace(config=config))  # of Ollama's lists
    assert (made["format"], made["quantization_level"]) == ("gguf", "Q5_0")
    planned = CliRunner().invoke(app, ["plan", str(file)])
    assert "weights in Q5_0" in planned.output, planned.output


def test_file_that_is_rounded_again_has_the_new_format(tmp_path):
    tiny_gguf.write(tmp_path / "model.gguf", "F16")
    folder = make_folder(tmp_path / "model.gguf")
    assert read_config(folder).weights_format == "F16"
    assert read_config(folder, quantization="int8").weights_format == "int8"


def test_a_format_cannot_be_asked_for(tmp_path):
    tiny_gguf.write(tmp_path / "model.gguf", "Q4_K")
    with pytest.raises(ModelError, match="'int8', and the checkpoint is quantised already"):
        read(tmp_path / "model.gguf", quantization="int8")


def test_modules_that_are_not_understood(tmp_path):
    tiny_gguf.write(tmp_path / "model.gguf", "Q4_0")
    folder = hub.resolve(str(tmp_path / "model.gguf"))
    config = json.loads((folder / "config.json").read_text())
    for wrong in ({"int9": []}, {"int4-32": "x"}, {"int4-32": ["re:("]}, [], None):
        config["quantization_config"]["modules"] = wrong
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=r"quantization_config\.modules"):
            read_config(folder)


def test_damage_is_named(tmp_path):
    """Whatever is cut off or changed of a small file: a model, or one error in a line."""
    file = tmp_path / "model.gguf"
    rng = np.random.default_rng(0)
    tiny_gguf.write(file, "Q8_0", tiny_gguf.LLAMA | {"num_hidden_layers": 1})
    whole = file.read_bytes()
    for turn in range(cases(200)):
        data = bytearray(whole)
        if turn % 3 == 0:
            del data[int(rng.integers(len(data))) :]
        for _ in range(0 if turn % 3 == 0 else int(rng.integers(1, 6))):
            data[int(rng.integers(4000 if turn % 3 == 1 else len(data)))] = int(rng.integers(256))
        file.unlink()
        file.write_bytes(bytes(data))
        try:
            read(file)
        except ModelError as error:
            assert "\n" not in str(error)
