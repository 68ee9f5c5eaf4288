"""GGUF files as models: dequantised values, quantised leaves, and generation."""

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
from quire.tests.support.cases import cases, nightly_from, thinned

KINDS = [*gguf_folder.KEPT, "F32", "F16", "BF16", "IQ3_S", "IQ2_XXS"]
D = 256
N = 8
K = 4


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def load_host_weights(file: Path, **options):
    folder = hub.resolve(str(file))
    return load_weights(
        folder, read_config(folder, "float32", **options), place=lambda spec, leaf: leaf
    )


def dequantize(leaf) -> np.ndarray:
    """Dequantise to [*into, *out] in float32, as GGUF does."""
    if isinstance(leaf, Int4):
        return np.asarray(leaf.dense()).reshape(*leaf.into, *leaf.out)
    if isinstance(leaf, Grouped):
        return np.asarray(leaf.dense(int(np.prod(leaf.into)))).reshape(*leaf.into, *leaf.out)
    return leaf


def assert_matrices_equal(weights, matrices: dict[str, np.ndarray]) -> None:
    """Compare each matrix exactly, except for the sign of zeros."""
    D = matrices["model.embed_tokens.weight"].shape[1]
    H = D // N
    for i, layer in enumerate(weights.layers):
        names = [f"self_attn.{x}_proj" for x in "qkvo"] + [
            f"mlp.{x}_proj" for x in ("gate", "up", "down")
        ]
        q, k, v, o, gate, up, down = (
            matrices[f"model.layers.{i}.{name}.weight"].T for name in names
        )
        qkv = np.concatenate([q.reshape(D, N, H), k.reshape(D, K, H), v.reshape(D, K, H)], axis=1)
        leaves = (
            layer.attention.qkv_DGH,
            layer.attention.out_NHD,
            layer.mlp.up_DGF,
            layer.mlp.down_FD,
        )
        for leaf, expected in zip(
            leaves, (qkv, o.reshape(N, H, D), np.stack([gate, up], axis=1), down), strict=True
        ):
            np.testing.assert_array_equal(dequantize(leaf), expected)
        np.testing.assert_array_equal(
            layer.pre_attention_norm_D, matrices[f"model.layers.{i}.input_layernorm.weight"]
        )
    for leaf, name in ((weights.embed_VD, "model.embed_tokens"), (weights.head_VD, "lm_head")):
        table = dequantize(leaf)
        table_VD = table if table.shape == (96, D) else table.T
        np.testing.assert_array_equal(table_VD, matrices[f"{name}.weight"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_matrices_of_every_type_match_the_gguf_package(tmp_path, kind, caplog):
    caplog.set_level("INFO", "quire")
    matrices = tiny_gguf.write(tmp_path / "model.gguf", kind)
    weights = load_host_weights(tmp_path / "model.gguf")
    assert_matrices_equal(weights, matrices)
    is_kept = kind in gguf_folder.KEPT
    assert ("quantised matrices are dequantised" in caplog.text) == (
        not is_kept and kind not in ("F32", "F16", "BF16")
    )
    for leaf in (weights.layers[0].mlp.down_FD, weights.embed_VD, weights.head_VD):
        assert isinstance(leaf, Int4 | Grouped) == is_kept
    assert read_config(hub.resolve(str(tmp_path / "model.gguf"))).quant == gguf_folder.KEPT.get(
        kind
    )


@pytest.mark.parametrize(
    ("kind", "other_kind", "expected_format"),
    [
        ("Q4_K", "Q6_K", ("uint6", 16, True)),
        ("Q4_K", "Q2_K", ("uint4", 16, True)),
        ("Q3_K", "Q4_K", ("uint4", 16, True)),
        ("Q3_K", "Q5_K", ("uint6", 16, True)),
        ("Q6_K", "Q3_K", ("int6", 16, True)),
        ("Q4_0", "Q8_0", ("int8", 32, False)),
        ("Q8_0", "Q6_K", ("int8", 16, False)),
        ("Q5_1", "Q4_K", ("int8", 32, False)),
        ("IQ4_XS", "Q5_K", None),
    ],
)
@pytest.mark.slow
def test_fused_matrices_of_different_types(tmp_path, kind, other_kind, expected_format):
    """As in Q4_K_M: a format that holds both types' codes is used, or they are dequantised."""
    config = tiny_gguf.LLAMA | {"hidden_size": 512, "num_hidden_layers": 1}  # rows of two blocks
    matrices = tiny_gguf.write(tmp_path / "model.gguf", kind, config, v_proj_kind=other_kind)
    weights = load_host_weights(tmp_path / "model.gguf")
    assert_matrices_equal(weights, matrices)
    qkv = weights.layers[0].attention.qkv_DGH
    assert (
        None if isinstance(qkv, np.ndarray) else (qkv.code, qkv.group, qkv.levels)
    ) == expected_format
    assert not isinstance(weights.layers[0].attention.out_NHD, np.ndarray)


@pytest.mark.parametrize(
    "kind", thinned(["Q4_K", "Q8_0", "IQ4_XS", "MXFP4", "IQ3_S"], ["Q4_K", "MXFP4"])
)
@pytest.mark.slow
def test_engine_tokens_match_dense_and_are_batch_invariant(tmp_path, kind):
    """The dense model has the dequantised weights; also with prefix caching and a schema."""
    matrices = tiny_gguf.write(
        tmp_path / "model.gguf", kind, v_proj_kind="Q6_K" if kind == "Q4_K" else None
    )
    tiny.write(tmp_path / "dense", tiny_gguf.LLAMA, matrices)
    llm = LLM(tmp_path / "model.gguf", **served_codes.SIZES)
    prompts = ["a story about a fox", "rain", "one two one two one two one two one", "went home"]
    answers = llm.generate(prompts, SamplingParams(max_tokens=1))
    ids = [list(output.prompt_token_ids) for output in answers]
    assert ids[0][0] == 1  # BOS, as the file requires
    served_codes.check(llm, tmp_path / "dense", ids)
    choice_params = SamplingParams(
        temperature=0, max_tokens=8, structured_outputs={"choice": ["fox", "bird"]}
    )
    assert llm.generate("a", choice_params)[0].outputs[0].text.strip() in ("fox", "bird")


@pytest.mark.parametrize(
    ("kind", "tied"),
    nightly_from(
        3,
        [
            ("Q6_K", True),
            ("Q4_0", True),
            ("Q5_0", False),
            ("Q5_0", True),
            ("Q4_0", False),
            ("Q5_1", False),
            ("MXFP4", False),
        ],
    ),
)
def test_embedding_stays_quantized(tmp_path, kind, tied):
    """Embedding lookups dequantise single rows, of the node and of its tiles for the kernels."""
    matrices = tiny_gguf.write(
        tmp_path / "model.gguf", kind, tiny_gguf.LLAMA | {"tie_word_embeddings": tied}
    )
    folder = hub.resolve(str(tmp_path / "model.gguf"))
    config = read_config(folder, "float32")
    assert config.tied == tied
    table = load_weights(folder, config, place=lambda spec, leaf: leaf).embed_VD
    assert isinstance(table, Int4 | Grouped)
    for lookup in (table, table.for_kernels("bfloat16")):
        np.testing.assert_array_equal(
            lookup[np.array([5, 0, 95])], matrices["model.embed_tokens.weight"][[5, 0, 95]]
        )
        assert lookup.rows == 96
    x = np.random.default_rng(0).standard_normal((3, D)).astype(np.float32)
    expected = x @ matrices["model.embed_tokens.weight"].T
    np.testing.assert_allclose(einsum("RD,VD->RV", jax.numpy.asarray(x), table), expected, atol=0.1)


def test_sharding_must_not_split_a_256_block(tmp_path):
    """256 inputs share a super-scale, so a shard must hold whole blocks."""
    shape = {"hidden_size": 512, "num_hidden_layers": 1}
    tiny_gguf.write(tmp_path / "model.gguf", "Q6_K", tiny_gguf.LLAMA | shape)
    config = read_config(hub.resolve(str(tmp_path / "model.gguf")))
    partition.check(config, 2, 1, 1)
    with pytest.raises(
        ModelError,
        match="a matrix of 512 inputs is kept as 'k6-16', whose groups of 256 it would cut",
    ):
        partition.check(config, 4, 1, 1)


def test_formats_that_cannot_be_split_by_columns_name_those_that_can(tmp_path):
    tiny_gguf.write(tmp_path / "model.gguf", "Q4_0")
    config = read_config(hub.resolve(str(tmp_path / "model.gguf")))
    with pytest.raises(ModelError, match="use int8 or fp8 with tensor_parallel_size 2, or 1"):
        partition.check(config, 2, 1, 1)


def test_split_file_is_loaded_by_any_part_or_folder(tmp_path):
    """The folder holds no other files."""
    (tmp_path / "m").mkdir()
    matrices = tiny_gguf.write(tmp_path / "m" / "model.gguf", "Q8_0", split_max_tensors=7)
    part_paths = sorted((tmp_path / "m").glob("*.gguf"))
    assert len(part_paths) > 1
    for path in (*part_paths, tmp_path / "m"):
        assert_matrices_equal(load_host_weights(path), matrices)


def test_folder_with_several_gguf_files_is_rejected(tmp_path):
    for name in ("a", "b"):
        tiny_gguf.write(tmp_path / f"{name}.gguf", "Q8_0")
    with pytest.raises(ModelError, match=r"several GGUF files, a\.gguf, b\.gguf: give one of them"):
        hub.resolve(str(tmp_path))


def test_changed_file_gets_a_new_folder(tmp_path):
    file = tmp_path / "model.gguf"
    tiny_gguf.write(file, "Q8_0")
    old_folder = hub.resolve(str(file))
    assert hub.resolve(str(file)) == old_folder
    file.unlink()
    matrices = tiny_gguf.write(file, "Q4_0", seed=1)
    assert hub.resolve(str(file)) != old_folder
    assert_matrices_equal(load_host_weights(file), matrices)


def test_concurrent_processes_share_the_first_published_folder(tmp_path, monkeypatch):
    """As in containers with equal process ids: the slower process takes the published folder."""
    file = tmp_path / "model.gguf"
    matrices = tiny_gguf.write(file, "Q8_0")
    contents = gguf_folder.build_files
    folders = []

    def paused(items):
        first, *later_items = items
        yield first
        if not folders:
            folders.append(None)  # so that the faster process does not pause
            folders[0] = gguf_folder.make_folder(file)
        yield from later_items

    def slow_contents(file):
        texts, files = contents(file)
        return SimpleNamespace(items=lambda: paused(texts.items())), files

    monkeypatch.setattr(gguf_folder, "build_files", slow_contents)
    assert [gguf_folder.make_folder(file)] == folders == [*gguf_folder.home().iterdir()]
    assert_matrices_equal(load_host_weights(file), matrices)


def test_file_types_have_llama_cpp_names():
    names = {member.value: member.name for member in gguf.LlamaFileType}
    for number, name in FILE_TYPES.items():
        assert names[number].removeprefix("ALL_").removeprefix("MOSTLY_") == name


def test_format_name_follows_file_type_or_most_elements(tmp_path):
    """`general.file_type` has precedence."""
    file = tmp_path / "model.gguf"
    tiny_gguf.write(file, "Q5_0", v_proj_kind="Q8_0")
    tensors = read_file(file).tensors
    for number, name in ((15, "Q4_K_M"), (3, "Q4_1"), (9999, "Q5_0"), (None, "Q5_0")):
        values = {} if number is None else {"general.file_type": number}
        assert file_format(Metadata(values), tensors) == name
    config = read_config(make_folder(file))
    assert config.weights_format == config.file_format == "Q5_0"
    ollama_details = details(SimpleNamespace(config=config))  # in Ollama's model lists
    assert (ollama_details["format"], ollama_details["quantization_level"]) == ("gguf", "Q5_0")
    result = CliRunner().invoke(app, ["plan", str(file)])
    assert "weights in Q5_0" in result.output, result.output


def test_weights_format_of_requantized_file(tmp_path):
    tiny_gguf.write(tmp_path / "model.gguf", "F16")
    folder = make_folder(tmp_path / "model.gguf")
    assert read_config(folder).weights_format == "F16"
    assert read_config(folder, quantization="int8").weights_format == "int8"


def test_quantization_of_a_quantized_file_is_rejected(tmp_path):
    tiny_gguf.write(tmp_path / "model.gguf", "Q4_K")
    with pytest.raises(ModelError, match="'int8', and the checkpoint is quantised already"):
        load_host_weights(tmp_path / "model.gguf", quantization="int8")


def test_invalid_modules_in_quantization_config_are_rejected(tmp_path):
    tiny_gguf.write(tmp_path / "model.gguf", "Q4_0")
    folder = hub.resolve(str(tmp_path / "model.gguf"))
    config = json.loads((folder / "config.json").read_text())
    for wrong in ({"int9": []}, {"int4-32": "x"}, {"int4-32": ["re:("]}, [], None):
        config["quantization_config"]["modules"] = wrong
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=r"quantization_config\.modules"):
            read_config(folder)


def test_damaged_file_loads_or_raises_a_one_line_error(tmp_path):
    """Of a small file, truncated or with random bytes changed."""
    file = tmp_path / "model.gguf"
    rng = np.random.default_rng(0)
    tiny_gguf.write(file, "Q8_0", tiny_gguf.LLAMA | {"num_hidden_layers": 1})
    contents = file.read_bytes()
    for iteration in range(cases(200)):
        data = bytearray(contents)
        if iteration % 3 == 0:
            del data[int(rng.integers(len(data))) :]
        for _ in range(0 if iteration % 3 == 0 else int(rng.integers(1, 6))):
            data[int(rng.integers(4000 if iteration % 3 == 1 else len(data)))] = int(
                rng.integers(256)
            )
        file.unlink()
        file.write_bytes(bytes(data))
        try:
            load_host_weights(file)
        except ModelError as error:
            assert "\n" not in str(error)
