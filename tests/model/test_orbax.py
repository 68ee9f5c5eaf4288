"""Orbax checkpoints of `quire convert`: identical weights, and errors for damaged ones."""

import gc
import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

from quire.model.checkpoint import hub, orbax, quantized
from quire.model.checkpoint.loader import load, read_config, weight_specs
from quire.model.config import ModelError
from quire.scripts import convert
from quire.tests.support import tiny
from quire.tests.support.golden.families_moe import MOE_VARIANTS
from quire.tests.support.golden.folder import HERE, write_folder

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def collect_garbage():
    """Collect orbax's pending reads after a failed read while warnings are ignored."""
    yield
    gc.collect()


def leaf_bits(tree) -> list[tuple]:
    return [
        (str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)
    ]


@pytest.fixture
def converted(tmp_path):
    """(safetensors folder, converted folder)."""
    source = tmp_path / "plain"
    out = tmp_path / "out"
    tiny.write(source, shards=2)
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("x")
    (source / "modeling.py").write_text("raise SystemExit")
    config = read_config(source)
    orbax.save(source, out, load(source, config, skip_packing=True), config.dtype)
    return source, out


def test_converted_folder_loads_identical_weights(converted):
    source, out = converted
    config = read_config(source)
    assert read_config(out) == config
    assert orbax.holds_weights(out)
    assert not orbax.holds_weights(source)
    progress = []
    weights = load(out, config, progress=progress.append, skip_packing=True)
    assert leaf_bits(weights) == leaf_bits(load(source, config, skip_packing=True))
    # packed for the CPU kernels, if there are any
    assert leaf_bits(load(out, config)) == leaf_bits(load(source, config))
    assert sum(progress) == sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    names = {path.name for path in out.iterdir()}
    assert names == {"config.json", "tokenizer.json", "chat_template.jinja", "weights"}


def test_dtype_may_change_at_conversion_and_at_load_time(converted, tmp_path):
    """All paths to bfloat16 give the same weights; norms stay float32."""
    source, out = converted
    half = tmp_path / "half"
    config = read_config(source, "bfloat16")
    orbax.save(source, half, load(source, config, skip_packing=True), config.dtype)
    assert read_config(half).dtype == "bfloat16"
    assert (
        leaf_bits(load(half, config))
        == leaf_bits(load(source, config))
        == leaf_bits(load(out, config))
    )
    assert load(half, config).final_norm_D.dtype == jnp.float32


def test_hf_overrides_are_written_to_the_config(tmp_path):
    """Converted and quantised folders have the overridden config."""
    tiny.write(tmp_path / "plain", tiny.LLAMA | {"mup_scale": 3.0})
    overrides = {"mup_scale": None, "rope_theta": 5e5}
    config = read_config(tmp_path / "plain", hf_overrides=overrides)
    weights = load(tmp_path / "plain", config, skip_packing=True)
    orbax.save(tmp_path / "plain", tmp_path / "out", weights, config.dtype, overrides)
    assert read_config(tmp_path / "out") == config
    quantized.save(
        tmp_path / "plain",
        tmp_path / "small",
        replace(config, quant="int8"),
        hf_overrides=overrides,
    )
    assert replace(read_config(tmp_path / "small"), quant=None, stored=None) == config


def test_load_format_safetensors_rejects_a_converted_folder(converted):
    source, out = converted
    config = read_config(source)
    load(source, config, load_format="safetensors")
    with pytest.raises(
        ModelError, match="load_format is 'safetensors', and .* is a converted checkpoint"
    ):
        load(out, config, load_format="safetensors")


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v3", "gemma4-moe"])
def test_dummy_weights_have_the_shapes_of_the_checkpoint(tmp_path, name):
    """The random values are finite and deterministic."""
    variant = next(variant for variant in MOE_VARIANTS if variant.name == name)
    (tmp_path / "config.json").write_text(json.dumps(variant.config))
    config = read_config(tmp_path)
    weights = load(tmp_path, config, skip_packing=True, load_format="dummy")
    shapes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), weights)
    assert shapes == jax.tree.map(
        lambda spec: (spec.shape, str(jnp.dtype(spec.dtype))), weight_specs(config)
    )
    assert leaf_bits(load(tmp_path, config, skip_packing=True, load_format="dummy")) == leaf_bits(
        weights
    )
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(weights))


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v3", "gemma4-moe"])
def test_families_with_special_weights_survive_conversion(tmp_path, name):
    """Packed experts, latent attention and per-layer embeddings."""
    variant = next(variant for variant in MOE_VARIANTS if variant.name == name)
    with np.load(HERE / f"{name}.npz") as arrays:
        meta = json.loads(arrays["meta"].tobytes())
    source = write_folder(tmp_path / "plain", variant.config, meta["tensors"], meta["seed"])
    config = read_config(source)
    weights = load(source, config, skip_packing=True)
    orbax.save(source, tmp_path / "out", weights, config.dtype)
    assert read_config(tmp_path / "out") == config
    converted_weights = load(tmp_path / "out", config, skip_packing=True)
    assert jax.tree.structure(converted_weights) == jax.tree.structure(weights)
    assert leaf_bits(converted_weights) == leaf_bits(weights)


def test_existing_paths_are_not_overwritten(converted, tmp_path):
    source, out = converted
    contents = sorted(out.rglob("*"))
    file = tmp_path / "file"
    file.write_text("x")
    for path in (out, source, file, file / "below"):
        with pytest.raises(ModelError, match=r"already|cannot be made"):
            orbax.make_empty_folder(path)
    assert sorted(out.rglob("*")) == contents


def assert_rejected(folder, *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        load(folder, read_config(folder))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 3}, ("lacks", "layers.2.")),
        ({"num_hidden_layers": 1}, ("holds", "layers.1.")),
        ({"intermediate_size": 64}, ("[48, 32]", "[64, 32]")),
        ({"tie_word_embeddings": True}, ("holds", "head_VD")),
    ],
)
def test_config_that_does_not_match_the_weights_is_rejected(converted, change, words):
    _, out = converted
    (out / "config.json").write_text(
        json.dumps(json.loads((out / "config.json").read_text()) | change)
    )
    assert_rejected(out, *words)


def test_damaged_checkpoint_is_rejected_or_loads_correctly(converted):
    """With any file missing, empty or truncated."""
    source, out = converted
    expected = leaf_bits(load(source, read_config(source)))
    files = [path for path in sorted((out / "weights").rglob("*")) if path.is_file()]
    contents = {path: path.read_bytes() for path in files}
    num_rejected = 0
    for path, data in contents.items():
        for cut in (None, 0, len(data) // 2, max(len(data) - 3, 0)):
            path.unlink() if cut is None else path.write_bytes(data[:cut])
            try:
                assert leaf_bits(load(out, read_config(out))) == expected
            except ModelError as error:
                assert "\n" not in str(error)
                num_rejected += 1
            path.write_bytes(data)
    assert num_rejected >= len(files)
    assert leaf_bits(load(out, read_config(out))) == expected
    shutil.rmtree(out / "weights")
    (out / "weights").mkdir()
    assert_rejected(out, "weights")


def test_convert_command(tmp_path):
    app = Typer()
    app.command()(convert.main)
    result = CliRunner().invoke(app, ["quill", str(tmp_path / "out"), "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    assert "MiB" in result.output
    config = read_config(tmp_path / "out")
    assert config.dtype == "float32"
    assert leaf_bits(load(tmp_path / "out", config)) == leaf_bits(
        load(hub.resolve("quill"), config)
    )
    second_result = CliRunner().invoke(app, ["quill", str(tmp_path / "out")])
    assert isinstance(second_result.exception, ModelError)
