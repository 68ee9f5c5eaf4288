"""Multimodal models: only the text model is loaded, and the log names the other tensors."""

import json
import logging

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.model.checkpoint import loader
from quire.model.config import ModelError
from quire.tests.support import tiny
from quire.tests.support.golden.families import MISTRAL3
from quire.tests.support.published import PUBLISHED

OUTER = {
    name: value
    for name, value in MISTRAL3.items()
    if name not in ("torch_dtype", "tie_word_embeddings")
}
VISION = (
    "vision_tower.ln_pre.weight",
    "vision_tower.patch_conv.weight",
    "multi_modal_projector.norm.weight",
)


def write_multimodal_model(folder, **text) -> dict:
    """Write a multimodal folder with a tiny Llama text model; return the text model's tensors."""
    tiny.write(folder)
    stored = load_file(folder / "model.safetensors")
    prefixed = {f"language_model.{name}": value for name, value in stored.items()}
    save_file(
        prefixed | {name: np.ones(3, np.float32) for name in VISION}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(OUTER | {"text_config": tiny.LLAMA | text}))
    return stored


def test_text_model_of_a_multimodal_folder_is_loaded(tmp_path, caplog):
    stored = write_multimodal_model(tmp_path / "whole")
    tiny.write(tmp_path / "text", tensors=stored)
    with caplog.at_level(logging.INFO, "quire"):
        multimodal_weights, text_weights = (
            loader.load_weights(tmp_path / name, loader.read_config(tmp_path / name))
            for name in ("whole", "text")
        )
    assert loader.read_config(tmp_path / "whole") == loader.read_config(tmp_path / "text")
    np.testing.assert_array_equal(multimodal_weights.head_VD, text_weights.head_VD)
    np.testing.assert_array_equal(
        multimodal_weights.layers[1].attention.qkv_DGH, text_weights.layers[1].attention.qkv_DGH
    )
    assert [record.getMessage() for record in caplog.records] == [
        ("tensors that are not part of the text model: multi_modal_projector (1), vision_tower (2)")
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": [1]}, r"text_config = \[1\]; it must be an object"),
        ({"text_config": None}, "lacks 'text_config'"),
        (
            {"text_config": tiny.LLAMA | {"model_type": "mistral3"}},
            "'mistral3', which is not supported in another",
        ),
        (
            {"text_config": tiny.LLAMA | {"model_type": 3}},
            "model_type 3, which is not supported in another",
        ),
        ({"logit_bias": 2.0}, "logit_bias = 2.0 is not understood"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}},
            "'fp8' is not supported",
        ),
    ],
)
def test_error_names_the_unsupported_option(change, message):
    hf = OUTER | {"text_config": tiny.LLAMA} | change
    with pytest.raises(ModelError, match=message):
        loader.family_for(hf).config(hf)


def test_outer_config_keys_have_precedence():
    hf = PUBLISHED["Ministral-3-3B"].config
    read = loader.family_for(hf).config
    assert (read(hf).tied, read(hf).dtype, read(hf).family) == (True, "bfloat16", "ministral3")
    inner = hf["text_config"] | {"dtype": "float32", "tie_word_embeddings": False}
    assert read(hf | {"text_config": inner}) == read(hf)
    alone = {
        name: value for name, value in hf.items() if name not in ("dtype", "tie_word_embeddings")
    }
    assert (
        read(alone | {"text_config": inner}).tied,
        read(alone | {"text_config": inner}).dtype,
    ) == (False, "float32")
