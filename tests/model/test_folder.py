"""Folders and files that are not models: errors that name the problem and a remedy."""

import json

import pytest

from quire.model.checkpoint import hub
from quire.model.checkpoint.loader import load_weights, read_config
from quire.model.config import ModelError
from quire.model.text.tokenizer import Tokenizer
from quire.tests.support import tiny
from quire.tests.support.tokenizer_zoo import ZOO, save

POINTER = (
    f"version https:{'//'}git-lfs.github.com/spec/v1\noid sha256:{'4d7a2146' * 8}\nsize 12345\n"
)
ADAPTER_CONFIG = {"peft_type": "LORA", "base_model_name_or_path": "owner/base"}


def load(folder):
    return load_weights(folder, read_config(folder), place=lambda spec, leaf: leaf)


def assert_rejected(work, *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        work()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_git_lfs_pointer_instead_of_a_file(tmp_path, name):
    tiny.write(tmp_path, shards=2 if "index" in name else 1)
    (tmp_path / name).write_text(POINTER)
    assert_rejected(lambda: load(tmp_path), name, "git-lfs pointer", "git lfs pull")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_git_lfs_pointer_instead_of_a_tokenizer(tmp_path, name):
    save(tmp_path, ZOO["byte_level"]())
    (tmp_path / name).write_text(POINTER)
    assert_rejected(lambda: Tokenizer(tmp_path), name, "git-lfs pointer", "git lfs pull")


def test_truncated_gguf_file_is_named(tmp_path):
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    for path in (file, tmp_path):
        assert_rejected(lambda path=path: load(hub.resolve(str(path))), str(file), "truncated")
    (tmp_path / "config.json").write_text(json.dumps(tiny.LLAMA))
    assert_rejected(lambda: load(tmp_path), str(file), "truncated")


def test_file_instead_of_a_folder_is_rejected(tmp_path):
    tiny.write(tmp_path)
    for name in ("config.json", "model.safetensors"):
        assert_rejected(
            lambda name=name: hub.resolve(str(tmp_path / name)),
            "is a file and not a folder",
            str(tmp_path),
        )
    (tmp_path / "config.json").rename(tmp_path / "other.json")
    assert_rejected(
        lambda: hub.resolve(str(tmp_path / "other.json")),
        "give a folder with config.json, or a GGUF file",
    )


@pytest.mark.parametrize("config", [False, True])
def test_adapter_folder_is_rejected_with_remedies(tmp_path, config):
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER_CONFIG))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    if config:
        (tmp_path / "config.json").write_text(json.dumps(tiny.LLAMA))
    assert_rejected(
        lambda: load(tmp_path),
        "adapter",
        "'LORA'",
        "'owner/base'",
        "--lora-modules",
        "merge_and_unload",
    )


def test_adapter_config_beside_a_model_is_ignored(tmp_path):
    tiny.write(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER_CONFIG))
    load(tmp_path)


def test_empty_folder_is_rejected(tmp_path):
    assert_rejected(lambda: load(tmp_path), "is empty", "config.json does not exist")


@pytest.mark.parametrize("config", [False, True])
def test_folder_with_pickled_weights_only_is_rejected(tmp_path, config):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    if config:
        (tmp_path / "config.json").write_text(json.dumps(tiny.LLAMA))
    assert_rejected(
        lambda: load(tmp_path), "pytorch_model.bin", "safetensors alone", "save_pretrained"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LlamaForTokenClassification", "labels tokens"),
        ("LlamaForRewardModel", "scores texts"),
        ("LlamaForProcessRewardModel", "scores texts"),
        ("LlamaForQuestionAnswering", "finds answers"),
        ("MistralModel", "makes hidden states"),
    ],
)
def test_unsupported_heads_are_rejected(tmp_path, name, message):
    tiny.write(tmp_path, tiny.LLAMA | {"architectures": [name]})
    assert_rejected(lambda: load(tmp_path), name, message, "not read yet")
    read_config(tmp_path, hf_overrides={"architectures": ["LlamaForCausalLM"]})
