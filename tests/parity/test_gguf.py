"""GGUF files against llama.cpp's own table of names, and against what transformers reads from
them.
"""

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
def test_names_are_those_of_llama_cpp(name):
    file = File(name)
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == file.architecture)
    table = gguf.get_tensor_name_map(number, file.metadata[f"{file.architecture}.block_count"])
    seen = 0
    for target in file.checkpoint:
        spellings = target, target.replace("model.layers.", "backbone.layers.")
        own = next(
            (own for each in spellings if (own := table.get_name(each, try_suffixes=ENDINGS))), None
        )
        # Some have no name of their own, and stand in a tensor with others; the table knows other
        # spellings of a few.
        if own is None or own not in file.shapes:
            continue
        assert checkpoint_name(file.architecture, own) == target
        seen += 1
    assert seen > 10


@pytest.mark.parametrize("name", ["llama", "mistral-nemo", "qwen2", "gemma2", "lfm2"])
def test_transformers_reads_the_same(name, tmp_path):
    file = File(name)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, file.architecture)
    kinds = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in file.metadata.items():
        if key not in ("general.architecture", "general.file_type"):
            kinds[type(value)](key, value)
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
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file=path.name, dtype="float32"
        )
    config = file.config()
    canonical = getattr(family(config), "canonical", str)
    found = {canonical(key): value.numpy() for key, value in theirs.state_dict().items()}
    compared = 0
    for key, origin in origins(file.architecture, file.shapes, config).items():
        if key in found:
            np.testing.assert_allclose(
                origin.build(file.tensors.__getitem__), found[key], atol=1e-6, err_msg=key
            )
            compared += 1
    assert compared > 10
    for key in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    ):
        assert getattr(theirs.config, key) == config[key]
