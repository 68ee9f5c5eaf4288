"""A converted folder: the same arrays, a whole model of its own, and clear words when it is
damaged.
"""

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
def collect():
    """After a read that fails orbax leaves its other reads to the garbage collector, which
    complains: here, unheard.
    """
    yield
    gc.collect()


def bits(tree) -> list[tuple]:
    return [
        (str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)
    ]


@pytest.fixture
def made(tmp_path):
    """(the folder of safetensors, the converted one)"""
    plain = tmp_path / "plain"
    out = tmp_path / "out"
    tiny.write(plain, shards=2)
    (plain / "tokenizer.json").write_text("{}")
    (plain / "chat_template.jinja").write_text("x")
    (plain / "modeling.py").write_text("raise SystemExit")
    config = read_config(plain)
    orbax.save(plain, out, load(plain, config, skip_packing=True), config.dtype)
    return plain, out


def test_round_trip(made):
    plain, out = made
    config = read_config(plain)
    assert read_config(out) == config
    assert orbax.holds_weights(out)
    assert not orbax.holds_weights(plain)
    told = []
    weights = load(out, config, progress=told.append, skip_packing=True)
    assert bits(weights) == bits(load(plain, config, skip_packing=True))
    # laid out for the kernels, where there are some
    assert bits(load(out, config)) == bits(load(plain, config))
    assert sum(told) == sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    names = {path.name for path in out.iterdir()}
    assert names == {"config.json", "tokenizer.json", "chat_template.jinja", "weights"}


def test_other_dtypes(made, tmp_path):
    """Conversion may change the dtype, and so may reading."""
    plain, out = made
    half = tmp_path / "half"
    config = read_config(plain, "bfloat16")
    orbax.save(plain, half, load(plain, config, skip_packing=True), config.dtype)
    assert read_config(half).dtype == "bfloat16"
    assert bits(load(half, config)) == bits(load(plain, config)) == bits(load(out, config))
    assert load(half, config).final_norm_D.dtype == jnp.float32


def test_overrides_are_written(tmp_path):
    """What the folder says that was converted with overrides is what was converted."""
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


def test_one_format_is_asked_for(made):
    plain, out = made
    config = read_config(plain)
    load(plain, config, load_format="safetensors")
    with pytest.raises(
        ModelError, match="load_format is 'safetensors', and .* is a converted checkpoint"
    ):
        load(out, config, load_format="safetensors")


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v3", "gemma4-moe"])
def test_random_weights_of_every_kind(tmp_path, name):
    """Arrays and nodes have the shapes that the checkpoint's have, and the same values each
    time.
    """
    variant = next(variant for variant in MOE_VARIANTS if variant.name == name)
    (tmp_path / "config.json").write_text(json.dumps(variant.config))
    config = read_config(tmp_path)
    made = load(tmp_path, config, skip_packing=True, load_format="dummy")
    shapes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), made)
    assert shapes == jax.tree.map(
        lambda spec: (spec.shape, str(jnp.dtype(spec.dtype))), weight_specs(config)
    )
    assert bits(load(tmp_path, config, skip_packing=True, load_format="dummy")) == bits(made)
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(made))


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v3", "gemma4-moe"])
def test_families_with_more_in_their_trees(tmp_path, name):
    """Packed experts, latent attention, per-layer embeddings: whatever the tree holds."""
    variant = next(variant for variant in MOE_VARIANTS if variant.name == name)
    with np.load(HERE / f"{name}.npz") as arrays:
        meta = json.loads(arrays["meta"].tobytes())
    plain = write_folder(tmp_path / "plain", variant.config, meta["tensors"], meta["seed"])
    config = read_config(plain)
    weights = load(plain, config, skip_packing=True)
    orbax.save(plain, tmp_path / "out", weights, config.dtype)
    assert read_config(tmp_path / "out") == config
    again = load(tmp_path / "out", config, skip_packing=True)
    assert jax.tree.structure(again) == jax.tree.structure(weights)
    assert bits(again) == bits(weights)


def test_a_folder_that_holds_something_is_left_alone(made, tmp_path):
    plain, out = made
    before = sorted(out.rglob("*"))
    file = tmp_path / "file"
    file.write_text("x")
    for taken in (out, plain, file, file / "below"):
        with pytest.raises(ModelError, match=r"already|cannot be made"):
            orbax.make_empty_folder(taken)
    assert sorted(out.rglob("*")) == before


def refused(folder, *words: str) -> None:
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
def test_config_that_does_not_fit(made, change, words):
    _, out = made
    (out / "config.json").write_text(
        json.dumps(json.loads((out / "config.json").read_text()) | change)
    )
    refused(out, *words)


def test_damage(made):
    """Any file of the checkpoint missing, empty or cut short: refused, or never needed."""
    plain, out = made
    expected = bits(load(plain, read_config(plain)))
    files = [path for path in sorted((out / "weights").rglob("*")) if path.is_file()]
    kept = {path: path.read_bytes() for path in files}
    refusals = 0
    for path, data in kept.items():
        for cut in (None, 0, len(data) // 2, max(len(data) - 3, 0)):
            path.unlink() if cut is None else path.write_bytes(data[:cut])
            try:
                assert bits(load(out, read_config(out))) == expected
            except ModelError as error:
                assert "\n" not in str(error)
                refusals += 1
            path.write_bytes(data)
    assert refusals >= len(files)
    assert bits(load(out, read_config(out))) == expected
    shutil.rmtree(out / "weights")
    (out / "weights").mkdir()
    refused(out, "weights")


def test_command(tmp_path):
    app = Typer()
    app.command()(convert.main)
    done = CliRunner().invoke(app, ["quill", str(tmp_path / "out"), "--dtype", "float32"])
    assert done.exit_code == 0, done.output
    assert "MiB" in done.output
    config = read_config(tmp_path / "out")
    assert config.dtype == "float32"
    assert bits(load(tmp_path / "out", config)) == bits(load(hub.resolve("quill"), config))
    again = CliRunner().invoke(app, ["quill", str(tmp_path / "out")])
    assert isinstance(again.exception, ModelError)
