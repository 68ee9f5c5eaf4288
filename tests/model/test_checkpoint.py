"""Loading weights from safetensors: layout, dtypes, file selection and peak memory."""

import itertools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.model.checkpoint import loader
from quire.model.checkpoint.loader import load_weights, read_config
from quire.model.checkpoint.published.matrix import Matrix
from quire.model.checkpoint.safetensors import fill, find_tensors
from quire.model.config import ModelError
from quire.model.stored_format import StoredGroup
from quire.model.weights import abstract
from quire.sharding.spec import ALIGNMENT, empty
from quire.tests.support import tiny

D = 32
N = 4
K = 2
H = 8
F = 48


def assert_weights_match(weights, tensors: dict[str, np.ndarray], dtype=np.float32) -> None:
    """Compare all weights with the checkpoint's tensors in Quire's layout."""

    def same(array, expected):
        assert (
            np.asarray(array).tobytes()
            == np.ascontiguousarray(expected.astype(array.dtype)).tobytes()
        )

    assert weights.embed_VD.dtype == dtype
    same(weights.embed_VD, tensors["model.embed_tokens.weight"])
    same(weights.final_norm_D, tensors["model.norm.weight"])
    for i, layer in enumerate(weights.layers):
        layer_tensors = {
            name.removeprefix(f"model.layers.{i}."): value for name, value in tensors.items()
        }
        q, k, v = (layer_tensors[f"self_attn.{x}_proj.weight"].reshape(-1, H, D) for x in "qkv")
        same(layer.attention.qkv_DGH, np.concatenate([q, k, v]).transpose(2, 0, 1))
        same(
            layer.attention.out_NHD,
            layer_tensors["self_attn.o_proj.weight"].reshape(D, N, H).transpose(1, 2, 0),
        )
        gate, up, down = (layer_tensors[f"mlp.{x}_proj.weight"] for x in ("gate", "up", "down"))
        same(layer.mlp.up_DGF, np.stack([gate, up]).transpose(2, 0, 1))
        same(layer.mlp.down_FD, down.T)
        same(layer.pre_attention_norm_D, layer_tensors["input_layernorm.weight"])
        same(layer.pre_mlp_norm_D, layer_tensors["post_attention_layernorm.weight"])


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    "stored", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_load_matches_the_tensors_for_every_dtype(tmp_path, shards, stored, dtype):
    config = tiny.LLAMA | {"torch_dtype": np.dtype(stored).name}
    tensors = tiny.write(tmp_path, config, tiny.draw(config, stored), shards)
    progress = []
    weights = load_weights(tmp_path, read_config(tmp_path, dtype), progress=progress.append)
    assert_weights_match(weights, tensors, jnp.dtype(dtype))
    assert sum(progress) == sum(array.nbytes for array in jax.tree.leaves(weights))


@pytest.mark.parametrize(
    ("stored", "requested", "expected"),
    [
        ("float16", "auto", "bfloat16"),
        ("float32", "auto", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        ("torch.bfloat16", "auto", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("bfloat16", "float", "float32"),
        ("float32", "float16", "bfloat16"),
        ("float16", "half", "bfloat16"),
    ],
)
def test_dtype_option_and_checkpoint_dtype(tmp_path, stored, requested, expected):
    (tmp_path / "config.json").write_text(json.dumps(tiny.LLAMA | {"torch_dtype": stored}))
    assert read_config(tmp_path, requested).dtype == expected


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("row", [0, 48, 95])
def test_tied_head_that_differs_from_the_embedding_is_rejected(tmp_path, row):
    config = tiny.LLAMA | {"tie_word_embeddings": True}
    tensors = tiny.draw(config)
    tensors["lm_head.weight"] = tensors[EMBEDDING].copy()
    tiny.write(tmp_path / "same", config, tensors)
    assert (
        loader.load_weights(tmp_path / "same", loader.read_config(tmp_path / "same")).head_VD
        is None
    )
    tensors["lm_head.weight"][row] += 1
    tiny.write(tmp_path / "other", config, tensors)
    with pytest.raises(ModelError, match="'lm_head.weight' that is not its embedding"):
        loader.load_weights(tmp_path / "other", loader.read_config(tmp_path / "other"))
    quantised_head = Matrix(
        "lm_head", tensors["lm_head.weight"].shape, StoredGroup("int4", None), {}
    )
    with pytest.raises(ModelError, match="'lm_head.weight' that is not its embedding"):
        loader.check_tied(tmp_path, quantised_head, find_tensors(tmp_path / "same")[EMBEDDING])
    untied = loader.read_config(tmp_path / "other", hf_overrides={"tie_word_embeddings": False})
    np.testing.assert_array_equal(
        loader.load_weights(tmp_path / "other", untied).head_VD, tensors["lm_head.weight"]
    )


def test_float16_warns_that_bfloat16_is_computed(tmp_path, caplog):
    (tmp_path / "config.json").write_text(json.dumps(tiny.LLAMA))
    loader.warn_of_float16.cache_clear()
    for _ in range(2):
        read_config(tmp_path, "half")
    assert [record.getMessage() for record in caplog.records] == [
        (
            "dtype is half: computed in bfloat16, since float16 overflows; float32 keeps every "
            "bit of float16 weights"
        )
    ]


def test_unknown_dtype_is_rejected(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.LLAMA))
    for dtype in ("float64", "int8", ""):
        with pytest.raises(ModelError, match="bfloat16"):
            read_config(tmp_path, dtype)


def test_copy_of_a_tied_head_is_not_read(tmp_path):
    """Tied models have no head; the checkpoint's `lm_head` is ignored."""
    config = tiny.LLAMA | {"tie_word_embeddings": True}
    tensors = tiny.draw(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tiny.write(tmp_path, config, tensors)
    weights = load_weights(tmp_path, read_config(tmp_path))
    assert weights.head_VD is None
    assert_weights_match(weights, tensors)


def test_model_safetensors_has_precedence_over_other_files(tmp_path):
    """Some folders also hold the weights as `consolidated.safetensors` with other names."""
    tensors = tiny.write(tmp_path)
    save_file(
        {"tok_embeddings.weight": np.zeros((3, 3), np.float32)},
        tmp_path / "consolidated.safetensors",
    )
    assert_weights_match(load_weights(tmp_path, read_config(tmp_path)), tensors)


def test_shards_without_an_index(tmp_path):
    tensors = tiny.write(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_weights_match(load_weights(tmp_path, read_config(tmp_path)), tensors)
    save_file({"model.norm.weight": np.zeros(D, np.float32)}, tmp_path / "more.safetensors")
    with pytest.raises(ModelError, match="both"):
        find_tensors(tmp_path)


def test_place_callback_receives_every_leaf(tmp_path):
    """On CPUs JAX takes over aligned arrays without a copy."""
    tiny.write(tmp_path)
    config = read_config(tmp_path)
    placed = []
    weights = load_weights(tmp_path, config, place=lambda spec, leaf: placed.append(leaf) or leaf)
    leaves = jax.tree.leaves(weights)
    assert [leaf.shape for leaf in leaves] == [
        spec.shape for spec in jax.tree.leaves(abstract(config))
    ]
    assert sorted(map(id, placed)) == sorted(map(id, leaves))  # threads place them in any order
    large = empty((512, 1024), np.float32)
    assert large.ctypes.data % ALIGNMENT == 0
    assert jax.device_put(large).unsafe_buffer_pointer() == large.ctypes.data


@pytest.mark.slow
def test_fill_matches_assignment():
    """For every order of axes of source and target, and for slices."""
    rng = np.random.default_rng(0)
    for axes in (1, 2, 3, 4):
        for source_axes, target_axes in itertools.product(
            itertools.permutations(range(axes)), repeat=2
        ):
            shape = rng.integers(1, 40, axes)
            value = rng.standard_normal(shape[list(source_axes)], np.float32).transpose(
                np.argsort(source_axes)
            )
            out = np.zeros(shape[list(target_axes)] + 3, ml_dtypes.bfloat16).transpose(
                np.argsort(target_axes)
            )
            window = tuple(slice(1, 1 + size) for size in shape)
            expected = out.copy()
            expected[window] = value
            fill(out[window], value)
            assert out.tobytes() == expected.tobytes()


PEAK = """
import re, sys
from pathlib import Path
import jax
from quire.model.checkpoint import loader
from quire.model.checkpoint.loader import load_weights, read_config

jax.devices()
folder = Path(sys.argv[1])
before = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
weights = load_weights(folder, read_config(folder))
after = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
print((after - before) * 1024 / sum(array.nbytes for array in jax.tree.leaves(weights)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_of_loading_is_little_more_than_the_weights(tmp_path):
    """Peak memory of loading 150 MB is below 1.4 times the weights."""
    config = tiny.LLAMA | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_hidden_layers": 3,
        "vocab_size": 32000,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
    }
    ones = {name: np.ones(shape, ml_dtypes.bfloat16) for name, shape in tiny.shapes(config).items()}
    tiny.write(tmp_path, config, ones)
    process = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert process.returncode == 0, process.stderr
    assert float(process.stdout) < 1.4
