"""Weights from safetensors: each array where it belongs, at little more memory than the model's
own.
"""

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
from quire.model.checkpoint.safetensors import fill, find_tensors
from quire.model.config import ModelError
from quire.model.weights import abstract
from quire.sharding.spec import ALIGNMENT, empty
from quire.tests.support import tiny

D = 32
N = 4
K = 2
H = 8
F = 48


def assert_same(weights, tensors: dict[str, np.ndarray], dtype=np.float32) -> None:
    """Every entry of every array against the entry of the checkpoint that it comes from."""

    def same(array, expected):
        assert (
            np.asarray(array).tobytes()
            == np.ascontiguousarray(expected.astype(array.dtype)).tobytes()
        )

    assert weights.embed_VD.dtype == dtype
    same(weights.embed_VD, tensors["model.embed_tokens.weight"])
    same(weights.final_norm_D, tensors["model.norm.weight"])
    for i, layer in enumerate(weights.layers):
        here = {name.removeprefix(f"model.layers.{i}."): value for name, value in tensors.items()}
        q, k, v = (here[f"self_attn.{x}_proj.weight"].reshape(-1, H, D) for x in "qkv")
        same(layer.attention.qkv_DGH, np.concatenate([q, k, v]).transpose(2, 0, 1))
        same(
            layer.attention.out_NHD,
            here["self_attn.o_proj.weight"].reshape(D, N, H).transpose(1, 2, 0),
        )
        gate, up, down = (here[f"mlp.{x}_proj.weight"] for x in ("gate", "up", "down"))
        same(layer.mlp.up_DGF, np.stack([gate, up]).transpose(2, 0, 1))
        same(layer.mlp.down_FD, down.T)
        same(layer.pre_attention_norm_D, here["input_layernorm.weight"])
        same(layer.pre_mlp_norm_D, here["post_attention_layernorm.weight"])


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    "stored", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name
)
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_load(tmp_path, shards, stored, wanted):
    config = tiny.LLAMA | {"torch_dtype": np.dtype(stored).name}
    tensors = tiny.write(tmp_path, config, tiny.draw(config, stored), shards)
    told = []
    weights = load_weights(tmp_path, read_config(tmp_path, wanted), progress=told.append)
    assert_same(weights, tensors, jnp.dtype(wanted))
    assert sum(told) == sum(array.nbytes for array in jax.tree.leaves(weights))


@pytest.mark.parametrize(
    ("stored", "asked", "made"),
    [
        ("float16", "auto", "bfloat16"), ("float32", "auto", "float32"), ("bfloat16", "auto", "bfloat16"),
        ("torch.bfloat16", "auto", "bfloat16"), ("bfloat16", "float32", "float32"), ("bfloat16", "float", "float32"),
        ("float32", "float16", "bfloat16"), ("float16", "half", "bfloat16"),
    ],
)  # fmt: skip
def test_dtype(tmp_path, stored, asked, made):
    (tmp_path / "config.json").write_text(json.dumps(tiny.LLAMA | {"torch_dtype": stored}))
    assert read_config(tmp_path, asked).dtype == made


@pytest.mark.parametrize("row", [0, 48, 95])
def test_a_head_that_is_not_the_embedding_it_is_said_to_be(tmp_path, row):
    config = tiny.LLAMA | {"tie_word_embeddings": True}
    tensors = tiny.draw(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tiny.write(tmp_path / "same", config, tensors)
    assert (
        loader.load_weights(tmp_path / "same", loader.read_config(tmp_path / "same")).head_VD
        is None
    )
    tensors["lm_head.weight"][row] += 1
    tiny.write(tmp_path / "other", config, tensors)
    with pytest.raises(ModelError, match="'lm_head.weight' that is not its embedding"):
        loader.load_weights(tmp_path / "other", loader.read_config(tmp_path / "other"))
    untied = loader.read_config(tmp_path / "other", hf_overrides={"tie_word_embeddings": False})
    np.testing.assert_array_equal(
        loader.load_weights(tmp_path / "other", untied).head_VD, tensors["lm_head.weight"]
    )


def test_float16_says_what_is_computed(tmp_path, caplog):
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


def test_dtype_that_is_not_known(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.LLAMA))
    for dtype in ("float64", "int8", ""):
        with pytest.raises(ModelError, match="bfloat16"):
            read_config(tmp_path, dtype)


def test_tied_head(tmp_path):
    """A tied model has no head of its own; a copy in the checkpoint is not read."""
    config = tiny.LLAMA | {"tie_word_embeddings": True}
    tensors = tiny.draw(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tiny.write(tmp_path, config, tensors)
    weights = load_weights(tmp_path, read_config(tmp_path))
    assert weights.head_VD is None
    assert_same(weights, tensors)


def test_one_file_goes_before_others(tmp_path):
    """Some folders hold the weights twice, in another maker's names."""
    tensors = tiny.write(tmp_path)
    save_file(
        {"tok_embeddings.weight": np.zeros((3, 3), np.float32)},
        tmp_path / "consolidated.safetensors",
    )
    assert_same(load_weights(tmp_path, read_config(tmp_path)), tensors)


def test_files_without_an_index(tmp_path):
    tensors = tiny.write(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_same(load_weights(tmp_path, read_config(tmp_path)), tensors)
    save_file({"model.norm.weight": np.zeros(D, np.float32)}, tmp_path / "more.safetensors")
    with pytest.raises(ModelError, match="both"):
        find_tensors(tmp_path)


def test_put_gets_each_leaf(tmp_path):
    """A caller may place the arrays; one on a CPU is taken over as it lies."""
    tiny.write(tmp_path)
    config = read_config(tmp_path)
    seen = []
    weights = load_weights(tmp_path, config, place=lambda spec, leaf: seen.append(leaf) or leaf)
    leaves = jax.tree.leaves(weights)
    assert [leaf.shape for leaf in leaves] == [
        spec.shape for spec in jax.tree.leaves(abstract(config))
    ]
    assert sorted(map(id, seen)) == sorted(map(id, leaves))  # threads put them in any order
    large = empty((512, 1024), np.float32)
    assert large.ctypes.data % ALIGNMENT == 0
    assert jax.device_put(large).unsafe_buffer_pointer() == large.ctypes.data


@pytest.mark.slow
def test_fill():
    """As plain assignment, for every order of axes on both sides and for parts of an array."""
    rng = np.random.default_rng(0)
    for axes in (1, 2, 3, 4):
        for there, here in itertools.product(itertools.permutations(range(axes)), repeat=2):
            shape = rng.integers(1, 40, axes)
            value = rng.standard_normal(shape[list(there)], np.float32).transpose(np.argsort(there))
            out = np.zeros(shape[list(here)] + 3, ml_dtypes.bfloat16).transpose(np.argsort(here))
            part = tuple(slice(1, 1 + size) for size in shape)
            expected = out.copy()
            expected[part] = value
            fill(out[part], value)
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
def test_peak_memory(tmp_path):
    """Loading 150 MB needs little more than 150 MB: no second copy, and one tensor at a time."""
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
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.4
