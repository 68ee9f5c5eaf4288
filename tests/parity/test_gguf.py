"""Compares GGUF tensor names with those of llama.cpp, and tensors with those of transformers."""

import warnings

import numpy as np
import pytest

from quire.model.gguf.tensors import checkpoint_name, origins
from quire.tests.support.gguf_files import WRITTEN, File, family

gguf = pytest.importorskip("gguf")
pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ENDINGS = (".weight", ".bias")


@pytest.mark.parametrize("name", WRITTEN)
def test_gguf_tensor_names_match_llama_cpp(name):
    file = File(name)
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == file.architecture)
    table = gguf.get_tensor_name_map(number, file.metadata[f"{file.architecture}.block_count"])
    num_compared = 0
    for target in file.checkpoint:
        spellings = target, target.replace("model.layers.", "backbone.layers.")
        gguf_name = next(
            (
                gguf_name
                for spelling in spellings
                if (gguf_name := table.get_name(spelling, try_suffixes=ENDINGS))
            ),
            None,
        )
        # merged tensors have no name of their own, and the table spells a few names differently
        if gguf_name is None or gguf_name not in file.shapes:
            continue
        assert checkpoint_name(file.architecture, gguf_name) == target
        num_compared += 1
    assert num_compared > 10


@pytest.mark.parametrize("name", ["llama", "mistral-nemo", "qwen2", "gemma2", "lfm2"])
def test_gguf_tensors_match_transformers(name, tmp_path):
    file = File(name)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, file.architecture)
    writers_by_type = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in file.metadata.items():
        if key not in ("general.architecture", "general.file_type"):
            writers_by_type[type(value)](key, value)
    writer.add_uint32(
        f"{file.architecture}.vocab_size", len(file.checkpoint["model.embed_tokens.weight"])
    )
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(
        [str(number) for number in range(len(file.checkpoint["model.embed_tokens.weight"]))]
    )
    for key, value in file.tensors.items():
        writer.add_tensor(key, np.ascontiguousarray(value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file=path.name, dtype="float32"
        )
    config = file.config()
    canonical = getattr(family(config), "canonical", str)
    expected_tensors = {canonical(key): value.numpy() for key, value in model.state_dict().items()}
    num_compared = 0
    for key, origin in origins(file.architecture, file.shapes, config).items():
        if key in expected_tensors:
            np.testing.assert_allclose(
                origin.build(file.tensors.__getitem__),
                expected_tensors[key],
                atol=1e-6,
                err_msg=key,
            )
            num_compared += 1
    assert num_compared > 10
    for key in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    ):
        assert getattr(model.config, key) == config[key]
