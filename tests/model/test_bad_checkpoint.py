"""Broken and hostile model folders: one-line errors, and no code of the folder is run."""

import json
import random
import struct
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from quire.model.checkpoint.loader import load_weights, read_config
from quire.model.checkpoint.safetensors import find_tensors
from quire.model.config import ModelError
from quire.model.weights import abstract
from quire.tests.support import tiny
from quire.tests.support.cases import cases
from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.golden.families_moe import MOE_VARIANTS


def load(folder):
    return load_weights(folder, read_config(folder), place=lambda spec, leaf: leaf)


def assert_rejected(folder, *words: str, work=load) -> str:
    """Check that `work` raises a one-line ModelError with `words`; return its message."""
    with pytest.raises(ModelError) as caught:
        work(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


def read_header(data: bytes) -> dict:
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def file_with_header(header, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_missing_files_are_named(tmp_path):
    assert_rejected(tmp_path / "nowhere", "config.json", "does not exist", work=read_config)
    assert_rejected(tmp_path, "config.json", "does not exist", work=read_config)
    (tmp_path / "config.json").write_text(json.dumps(tiny.LLAMA))
    assert_rejected(tmp_path, "safetensors")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    assert_rejected(tmp_path, "config.json", work=read_config)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl", "model.pth"])
def test_pickled_weights_are_rejected(tmp_path, name):
    tiny.write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    assert_rejected(tmp_path, name, "safetensors")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"7",
        b'"x"',
        b"\xff\xfe\x00",
        b"{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model_type": "llama", "hidden_size": NaN}',
        b'{"model_type": "llama", "hidden_size": 1e999}',
        b'{"model_type": "llama", "hidden_size": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda text: repr(text[:20]),
)
def test_invalid_config_json_is_rejected(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text)
    assert_rejected(tmp_path, work=read_config)


@pytest.mark.parametrize(
    "kind", [None, "gpt-neox", 3, ["llama"], {"llama": 1}, "", "../llama", "os"]
)
def test_unknown_model_type_is_rejected(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps(tiny.LLAMA | {"model_type": kind}))
    assert_rejected(tmp_path, "model type", "llama", work=read_config)


BASES = [variant.config for variant in (*VARIANTS, *MOE_VARIANTS)] + [tiny.LLAMA]
NUMBERS = [
    0,
    -1,
    1,
    2,
    3,
    7,
    2**31,
    2**40,
    2**63,
    -(2**63),
    10**30,
    0.0,
    -0.5,
    0.5,
    1e-300,
    1e300,
    float("inf"),
]
WRONG_VALUES = st.one_of(
    st.sampled_from(NUMBERS),
    st.none(),
    st.booleans(),
    st.text(max_size=5),
    st.integers(),
    st.floats(),
    st.lists(st.one_of(st.sampled_from(NUMBERS), st.none(), st.text(max_size=3)), max_size=4),
    st.dictionaries(
        st.sampled_from(["rope_type", "factor", "type", "x"]), st.sampled_from([*NUMBERS, "yarn"])
    ),
)


@settings(max_examples=cases(400))
@given(st.data())
def test_random_config_values_are_rejected_or_give_sensible_shapes(tmp_path_factory, data):
    """Values of wrong types, signs and sizes."""
    config = dict(data.draw(st.sampled_from(BASES)))
    for _ in range(data.draw(st.integers(1, 3))):
        node = config
        key = data.draw(st.sampled_from(sorted(config)))
        if isinstance(config[key], dict) and config[key] and data.draw(st.booleans()):
            node = config[key] = dict(config[key])
            key = data.draw(st.sampled_from(sorted(node)))
        if data.draw(st.integers(0, 9)) == 0:
            del node[key]
        else:
            node[key] = data.draw(WRONG_VALUES)
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "config.json").write_text(json.dumps(config))
    try:
        model_config = read_config(
            folder, "auto", data.draw(st.sampled_from([None, 1, 64, 100_000]))
        )
    except ModelError as error:
        assert "\n" not in str(error)
        return
    for spec in jax.tree.leaves(abstract(model_config)):
        assert all(type(size) is int and size > 0 for size in spec.shape)
    for layer in model_config.layers:
        scale = getattr(layer.attention, "scale", 1.0)  # not every mixer has a scale
        assert isinstance(scale, float)
        assert np.isfinite(scale)
        if layer.attention.rope is not None:
            assert np.isfinite([*layer.attention.rope.inv_freq, layer.attention.rope.factor]).all()
    assert isinstance(hash(model_config), int)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("gemma4_text", "hidden_size_per_layer_input", 0.5),
        ("gemma4_text", "hidden_size_per_layer_input", -8),
        ("llama", "num_hidden_layers", 10**9),
        ("llama", "head_dim", 10**9),
        ("llama", "vocab_size", 10**15),
        ("mixtral", "num_local_experts", 10**9),
    ],
)
def test_huge_config_numbers_are_rejected(tmp_path, family, key, value):
    """They are rejected before anything of that size is allocated."""
    base = next(config for config in BASES if config["model_type"] == family)
    (tmp_path / "config.json").write_text(json.dumps(base | {key: value}))
    assert_rejected(tmp_path, work=read_config)


def test_truncated_or_damaged_file_is_rejected(tmp_path):
    """Truncation anywhere is an error; a changed header byte is one unless it is insignificant."""
    tiny.write(tmp_path)
    file = tmp_path / "model.safetensors"
    rng = random.Random(0)
    contents = file.read_bytes()
    header = 8 + int.from_bytes(contents[:8], "little")
    cuts = {*range(12), header - 1, header, header + 1, len(contents) - 1}
    for cut in (
        cuts
        | {rng.randrange(len(contents)) for _ in range(150)}
        | {rng.randrange(header) for _ in range(50)}
    ):
        file.write_bytes(contents[:cut])
        assert_rejected(tmp_path, "model.safetensors")
    for _ in range(300):
        damaged = bytearray(contents)
        damaged[rng.randrange(header)] = rng.randrange(256)
        file.write_bytes(damaged)
        try:
            load(tmp_path)  # a change of white space or metadata has no effect
        except ModelError as error:
            assert "\n" not in str(error)


def test_file_truncated_after_opening_is_rejected(tmp_path):
    tiny.write(tmp_path)
    tensors = find_tensors(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    last = max(tensors.values(), key=lambda tensor: tensor.start)
    with pytest.raises(ModelError, match="truncated"):
        last.read()
    file.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        last.read()


GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
ENTRIES = [
    GOOD | {"shape": [2**20, 2**20]},
    GOOD | {"shape": [2**20, 2**20], "data_offsets": [0, 2**42]},
    GOOD | {"shape": [2**63, 2]},
    GOOD | {"shape": [-2, -2]},
    GOOD | {"shape": "22"},
    GOOD | {"shape": [2.0, 2.0]},
    GOOD | {"shape": [True, 4]},
    GOOD | {"shape": None},
    GOOD | {"data_offsets": [16, 0]},
    GOOD | {"data_offsets": [-16, 0]},
    GOOD | {"data_offsets": [0]},
    GOOD | {"data_offsets": "016"},
    GOOD | {"data_offsets": [0, 16, 16]},
    GOOD | {"data_offsets": {"0": 1, "16": 2}},
    GOOD | {"data_offsets": [8, 24]},
    GOOD | {"dtype": "F31"},
    GOOD | {"dtype": []},
    GOOD | {"dtype": "F64"},
    {"dtype": "F32"},
    [],
    None,
    5,
    "F32",
]


@pytest.mark.parametrize("entry", ENTRIES, ids=repr)
def test_false_tensor_entries_are_rejected(tmp_path, entry):
    """Sizes are checked against the file's size before anything is allocated."""
    (tmp_path / "model.safetensors").write_bytes(file_with_header({"x": entry}, bytes(16)))
    assert_rejected(tmp_path, "model.safetensors", "'x'", work=find_tensors)


def test_empty_tensor_of_a_huge_shape_is_rejected(tmp_path):
    """The header is valid, but nothing of that size is allocated."""
    tensors = {"model.norm.weight": GOOD | {"shape": [0, 2**70], "data_offsets": [0, 0]}}
    (tmp_path / "model.safetensors").write_bytes(file_with_header(tensors))
    (tmp_path / "config.json").write_text(json.dumps(tiny.LLAMA))
    assert_rejected(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(7),
        bytes(8),
        b"\xff" * 8,
        file_with_header([]),
        file_with_header(b"x"),
        file_with_header(b"\xff"),
        struct.pack("<Q", 2**62) + b"{}",
        file_with_header(b"[" * 100_000),
        file_with_header(b'{"a":' * 100_000),
    ],
    ids=lambda data: repr(data[:12]),
)
def test_invalid_headers_are_rejected(tmp_path, data):
    (tmp_path / "model.safetensors").write_bytes(data)
    assert_rejected(tmp_path, "model.safetensors", work=find_tensors)


def test_missing_extra_and_misshapen_tensors_are_rejected(tmp_path):
    tensors = tiny.draw(tiny.LLAMA)
    norm = "model.layers.1.input_layernorm.weight"
    tiny.write(tmp_path, tensors=tensors | {norm: np.ones(31, np.float32)})
    assert_rejected(tmp_path, norm, "[31]", "[32]")
    tiny.write(tmp_path, tensors=tensors | {norm: np.ones((32, 1), np.float32)})
    assert_rejected(tmp_path, norm, "[32, 1]", "[32]")
    tiny.write(tmp_path, tensors={name: value for name, value in tensors.items() if name != norm})
    assert_rejected(tmp_path, norm, "lacks")
    tiny.write(
        tmp_path,
        tensors=tensors | {"model.layers.1.self_attn.q_proj.bias": np.ones(32, np.float32)},
    )
    assert_rejected(tmp_path, "model.layers.1.self_attn.q_proj.bias", "do not have")


@pytest.mark.parametrize(
    "weight_map",
    [
        None,
        [],
        {},
        "model.safetensors",
        {"x": 3},
        {"x": "../secret.safetensors"},
        {"x": "/etc/passwd"},
        {"x": "a/b.safetensors"},
        {"x": "..\\b.safetensors"},
        {"x": "pytorch_model.bin"},
        {"x": ".."},
        {"x": ""},
        {"x": "gone.safetensors"},
        {"x": "other.safetensors"},
    ],
    ids=repr,
)
def test_invalid_index_files_are_rejected(tmp_path, weight_map):
    tiny.write(tmp_path / "model")
    save_file({"x": np.ones(3, np.float32)}, tmp_path / "secret.safetensors")
    save_file({"y": np.ones(3, np.float32)}, tmp_path / "model" / "other.safetensors")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )
    assert_rejected(tmp_path / "model", "safetensors", work=find_tensors)


LOAD_SCRIPT = """
import sys
from pathlib import Path
from quire.model.checkpoint.loader import load_weights, read_config

folder = Path(sys.argv[1])
load_weights(folder, read_config(folder))
assert not [name for name in sys.modules if name.startswith(("modeling", "configuration", "torch", "transformers"))]
"""


def test_loading_runs_no_code_of_the_folder(tmp_path):
    """Python files, `auto_map` and pickles are ignored; config and safetensors are read."""
    folder = tmp_path / "model"
    mark = tmp_path / "ran"
    remote = {"AutoConfig": "configuration_trap.Trap", "AutoModelForCausalLM": "modeling_trap.Trap"}
    tiny.write(folder, tiny.LLAMA | {"auto_map": remote, "trust_remote_code": None})
    code = f"open({str(mark)!r}, 'w').write('x')\n"
    for name in (
        "__init__",
        "configuration_trap",
        "modeling_trap",
        "sitecustomize",
        "conftest",
        "llama",
        "json",
    ):
        (folder / f"{name}.py").write_text(code)
    pickled = f"cbuiltins\nexec\n(S{code!r}\ntR.".encode()
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "optimizer.pkl"):
        (folder / name).write_bytes(pickled)
    process = subprocess.run(
        [sys.executable, "-c", LOAD_SCRIPT, str(folder)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
    )
    assert process.returncode == 0, process.stderr
    assert not mark.exists()
