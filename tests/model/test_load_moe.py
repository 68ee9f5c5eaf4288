"""Checkpoint variants of mixture-of-experts models."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.model.checkpoint import loader
from quire.model.config import ModelError
from quire.tests.support.golden.families_moe import MOE_VARIANTS
from quire.tests.support.golden.folder import HERE, write_folder


@pytest.fixture
def write_variant(tmp_path):
    """A function that writes a variant's tiny model; it returns (folder, tensors)."""

    def write(name: str):
        variant = next(v for v in MOE_VARIANTS if v.name == name)
        with np.load(HERE / f"{name}.npz") as arrays:
            meta = json.loads(arrays["meta"].tobytes())
        model_folder = write_folder(tmp_path / name, variant.config, meta["tensors"], meta["seed"])
        tensors = {}
        for file in model_folder.glob("*.safetensors"):
            tensors |= load_file(file)
            file.unlink()
        (model_folder / "model.safetensors.index.json").unlink()
        return model_folder, tensors

    return write


def load(model_folder, tensors):
    save_file(
        {name: np.ascontiguousarray(value) for name, value in tensors.items()},
        model_folder / "model.safetensors",
    )
    config = loader.read_config(model_folder, "float32")
    return loader.load_weights(model_folder, config, place=lambda spec, leaf: leaf)


def assert_same_leaves(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "deepseek-v3"])
def test_fused_expert_tensors_load_alike(name, write_variant):
    """transformers 5's in-memory names (fused experts) load like the names that it writes."""
    model_folder, tensors = write_variant(name)
    expected = load(model_folder, tensors)
    fused = {
        key: value for key, value in tensors.items() if ".experts." not in key or ".shared_" in key
    }
    fused = {key.replace("block_sparse_moe", "mlp"): value for key, value in fused.items()}
    names = ("w1", "w3", "w2") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    for key in tensors:
        block, separator, _ = key.partition(f".experts.0.{names[0]}.weight")
        if not separator:
            continue
        E = sum(f"{block}.experts.{e}.{names[0]}.weight" in tensors for e in range(99))
        gate, up, down = (
            np.stack([tensors[f"{block}.experts.{e}.{x}.weight"] for e in range(E)]) for x in names
        )
        block = block.replace("block_sparse_moe", "mlp")
        fused[f"{block}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        fused[f"{block}.experts.down_proj"] = down
    assert len(fused) < len(tensors)
    assert_same_leaves(load(model_folder, fused), expected)


def test_error_names_the_missing_expert(write_variant):
    model_folder, tensors = write_variant("mixtral")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    with pytest.raises(
        ModelError, match=r"lacks the tensor 'model\.layers\.1\.mlp\.experts\.2\.w3\.weight'"
    ):
        load(model_folder, tensors)


def test_fp8_blocks_of_kv_b_proj_are_dequantized(write_variant):
    """Scales per 128x128 block; the last blocks are smaller."""
    model_folder, tensors = write_variant("deepseek-v3-small")
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    rng = np.random.default_rng(0)
    assert tensors[name].shape == (176, 32)
    fp8_codes = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    scale = rng.random((2, 1)).astype(np.float32) + 0.5
    dequantized = fp8_codes.astype(np.float32) * np.repeat(scale, 128, axis=0)[:176]
    expected = load(model_folder, tensors | {name: dequantized})
    config = json.loads((model_folder / "config.json").read_text())
    dense_names = [key.removesuffix(".weight") for key in tensors if key != name]
    method = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": dense_names,
    }
    (model_folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    assert_same_leaves(
        load(model_folder, tensors | {name: fp8_codes, f"{name}_scale_inv": scale}), expected
    )
    with pytest.raises(ModelError, match=r"kv_b_proj.weight_scale_inv' is \[1, 2\]"):
        load(model_folder, tensors | {name: fp8_codes, f"{name}_scale_inv": scale.T})


def test_mtp_layer_is_ignored_and_other_extra_tensors_are_rejected(write_variant):
    """Layer 3 of the checkpoint predicts a second token (MTP)."""
    model_folder, tensors = write_variant("deepseek-v3")
    expected = load(model_folder, tensors)
    extra = {
        "model.layers.3.eh_proj.weight": np.ones((2, 2)),
        "model.layers.3.mlp.gate.weight": np.ones(2),
    }
    assert_same_leaves(load(model_folder, tensors | extra), expected)
    with pytest.raises(ModelError, match=r"holds the tensor 'model\.layers\.2\.eh_proj\.weight'"):
        load(model_folder, tensors | {"model.layers.2.eh_proj.weight": np.ones(2)})


def test_gemma4_shared_kv_and_multimodal_tensors_are_ignored(write_variant):
    """Published files have unused K and V of layers that share a KV cache, and audio towers."""
    model_folder, tensors = write_variant("gemma4-shared")
    expected = load(model_folder, tensors)
    prefix = "model.language_model.layers"
    extra = {f"{prefix}.4.self_attn.{x}.weight": np.ones(3) for x in ("k_proj", "v_proj", "k_norm")}
    extra |= {"model.audio_tower.x": np.ones(1), "model.embed_audio.y": np.ones(1)}
    assert_same_leaves(load(model_folder, tensors | extra), expected)
    for name in (f"{prefix}.4.self_attn.o_norm.weight", f"{prefix}.1.self_attn.v_norm.weight"):
        with pytest.raises(ModelError, match="holds the tensor"):
            load(model_folder, tensors | {name: np.ones(3)})


def test_mxfp4_nan_scale_is_rejected(write_variant):
    model_folder, tensors = write_variant("gpt-oss")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name].copy()
    tensors[name][1, 2, 0] = 255
    with pytest.raises(ModelError, match=f"'{name}' holds 255"):
        load(model_folder, tensors)


def test_mxfp4_values_match_the_stored_codes(write_variant):
    """Random elements of an expert's matrices, dequantised one by one."""
    model_folder, tensors = write_variant("gpt-oss")
    moe = load(model_folder, tensors).layers[2].moe
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]

    def stored_value(kind: str, e: int, row: int, column: int) -> float:
        name = f"model.layers.2.mlp.experts.{kind}_proj"
        block, offset = divmod(column, 32)
        byte = int(tensors[f"{name}_blocks"][e, row, block, offset // 2])
        code = byte >> 4 if offset % 2 else byte & 15
        return values[code] * 2.0 ** (int(tensors[f"{name}_scales"][e, row, block]) - 127)

    rng = np.random.default_rng(0)
    up, down = (
        np.asarray(jax.tree.map(jax.numpy.asarray, w)[4], np.float32)
        for w in (moe.up_EDGF, moe.down_EFD)
    )
    assert (up.shape, down.shape) == ((64, 2, 96), (96, 64))
    for _ in range(300):
        d = rng.integers(64)
        g = rng.integers(2)
        f = rng.integers(96)
        assert up[d, g, f] == stored_value("gate_up", 4, 2 * f + g, d)
        assert down[f, d] == stored_value("down", 4, d, f)
