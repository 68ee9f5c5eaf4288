"""Default sampling parameters: read from generation_config.json, and used for requests without
their own.
"""

import asyncio
import json
import shutil

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.model.checkpoint import hub
from quire.model.config import ModelError
from quire.model.text.tokenizer import Tokenizer
from quire.serving.api.options import EngineOptions
from quire.serving.defaults import FILE, LLAMA_CPP, model_defaults, with_defaults

QWEN = {  # a published file
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "transformers_version": "4.37.0",
}
DEFAULTS = {"repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8}


def read_defaults(folder, file=None, max_model_len: int = 8192, **options):
    if file is not None:
        (folder / FILE).write_text(json.dumps(file))
    return model_defaults(folder, EngineOptions(**options), max_model_len).requests


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (QWEN, DEFAULTS),
        (None, {}),
        ({}, {}),
        # neutral values only
        ({"temperature": None, "top_p": 1.0, "top_k": 0, "min_p": 0.0}, {}),
        ({"temperature": 0, "top_k": -1}, {"temperature": 0.0}),
        ({"min_p": 0.1, "max_new_tokens": 2048}, {"min_p": 0.1, "max_tokens": 2048}),
        ({"do_sample": False}, {"temperature": 0.0}),  # greedy, as in transformers
        (
            {"do_sample": False, "temperature": 0.7, "top_p": 0.8},
            {"temperature": 0.0, "top_p": 0.8},
        ),
        ({"do_sample": True, "temperature": 0.6, "max_length": 4096}, {"temperature": 0.6}),
    ],
)
def test_generation_config_values_are_read(tmp_path, file, expected):
    assert read_defaults(tmp_path, file) == expected


@pytest.mark.parametrize(
    ("file", "overrides", "expected"),
    [
        (QWEN, {"temperature": 0.5}, DEFAULTS | {"temperature": 0.5}),
        (QWEN, {"temperature": 1.0, "top_k": 0}, {"repetition_penalty": 1.05, "top_p": 0.8}),
        (None, {"max_new_tokens": 9}, {"max_tokens": 9}),
        ({"do_sample": False}, {"temperature": 0.5}, {"temperature": 0.5}),
        ({"do_sample": False, "temperature": 0.5}, {"do_sample": True}, {"temperature": 0.5}),
        (QWEN, {"do_sample": False}, DEFAULTS | {"temperature": 0.0}),
    ],
)
def test_override_generation_config_wins(tmp_path, file, overrides, expected):
    assert read_defaults(tmp_path, file, override_generation_config=overrides) == expected


def test_generation_config_locations(tmp_path):
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    (other_folder / FILE).write_text(json.dumps({"top_p": 0.5}))
    assert read_defaults(tmp_path, QWEN, generation_config="auto") == DEFAULTS
    assert read_defaults(tmp_path, generation_config="vllm") == {}
    assert read_defaults(
        tmp_path, generation_config="vllm", override_generation_config={"top_p": 0.4}
    ) == {"top_p": 0.4}
    assert read_defaults(tmp_path, generation_config=str(other_folder)) == {"top_p": 0.5}
    with pytest.raises(ModelError, match=r"generation_config is '.*nowhere'; it can be auto"):
        read_defaults(tmp_path, generation_config=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_p", 0),
        ("top_k", 1.5),
        ("do_sample", 1),
        ("max_new_tokens", 0),
    ],
)
def test_invalid_values_are_refused_by_name(tmp_path, name, value):
    with pytest.raises(
        ModelError, match=rf"{FILE} of the model: {name}: .*--generation-config vllm"
    ):
        read_defaults(tmp_path, {name: value})
    with pytest.raises(ModelError, match=rf"override_generation_config: {name}: "):
        read_defaults(tmp_path, {}, override_generation_config={name: value})


def test_unknown_names_are_refused_in_overrides_only(tmp_path):
    assert read_defaults(tmp_path, {"tempurature": 3}) == {}
    with pytest.raises(ModelError, match="tempurature: unknown field; did you mean 'temperature'"):
        read_defaults(tmp_path, override_generation_config={"tempurature": 3})
    with pytest.raises(ModelError, match="override_generation_config is 7"):
        read_defaults(tmp_path, override_generation_config=7)


def test_log_names_applied_and_ignored_values(tmp_path, caplog):
    caplog.set_level("INFO", "quire")
    read_defaults(tmp_path, QWEN | {"num_beams": 4, "typical_p": 1.0, "max_length": 4096})
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3
    assert "num_beams = 4" in messages[0] and "typical_p" not in messages[0]
    assert "max_length = 4096 counts the prompt too" in messages[1]
    assert messages[2].endswith("temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05")
    caplog.clear()
    read_defaults(
        tmp_path,
        {"eos_token_id": 2, "max_length": 8192, "_from_model_config": True, "temperature": 1.0},
    )
    assert not caplog.records


@pytest.mark.parametrize(
    ("file", "options", "chat"),
    [
        (None, {}, LLAMA_CPP),
        ({"eos_token_id": 2, "do_sample": True}, {}, LLAMA_CPP),
        (
            {"repetition_penalty": 1.1, "max_new_tokens": 9},
            {},
            LLAMA_CPP | {"repetition_penalty": 1.1, "max_tokens": 9},
        ),
        (QWEN, {}, DEFAULTS),
        ({"temperature": 1.0}, {}, {}),  # neutral, but recommended
        ({"do_sample": False}, {}, {"temperature": 0.0}),
        (None, {"override_generation_config": {"top_p": 1.0}}, {}),
        (None, {"override_generation_config": {"do_sample": False}}, {"temperature": 0.0}),
        (None, {"generation_config": "vllm"}, {}),
    ],
)
def test_chats_use_llama_cpp_sampling_if_the_model_recommends_none(
    tmp_path, caplog, file, options, chat
):
    caplog.set_level("INFO", "quire")
    if file is not None:
        (tmp_path / FILE).write_text(json.dumps(file))
    defaults = model_defaults(tmp_path, EngineOptions(**options), 8192)
    assert defaults.chat == chat
    uses_llama_cpp = chat.items() >= LLAMA_CPP.items()
    assert defaults.requests == {
        name: value for name, value in chat.items() if not uses_llama_cpp or name not in LLAMA_CPP
    }
    messages = [
        record.getMessage()
        for record in caplog.records
        if "recommends no sampling" in record.getMessage()
    ]
    assert len(messages) == uses_llama_cpp and all(
        "temperature=0.8, top_p=0.95, top_k=40" in message for message in messages
    )


def test_bundled_model_keeps_its_sampling():
    defaults = model_defaults(hub.resolve("quill"), EngineOptions(), 8192)
    assert defaults.requests == defaults.chat == {}


def test_explicit_fields_override_defaults():
    params = SamplingParams(temperature=0.2, min_tokens=30, max_tokens=None)
    merged = with_defaults(params, {"temperature", "min_tokens"}, DEFAULTS | {"max_tokens": 7})
    assert (merged.temperature, merged.top_p, merged.top_k, merged.repetition_penalty) == (
        0.2,
        0.8,
        20,
        1.05,
    )
    assert merged.max_tokens == 30  # at least the request's min_tokens
    assert with_defaults(params, {"max_tokens"}, {"max_tokens": 7}).max_tokens is None
    assert with_defaults(params, (), {}) is params


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "quill"
    shutil.copytree(hub.resolve("quill"), folder)
    ids = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps(ids | {"do_sample": False, "max_new_tokens": 7}))
    return LLM(str(folder), max_num_seqs=2, max_num_batched_tokens=16)


def test_generation_uses_the_models_defaults(llm):
    expected_params = SamplingParams(temperature=0, max_tokens=7)
    assert llm.get_default_sampling_params() == expected_params
    (expected,) = llm.generate("Once upon a time", expected_params)
    for _ in range(2):
        assert (
            llm.generate("Once upon a time")[0].outputs[0].token_ids
            == expected.outputs[0].token_ids
        )
    *_, last_output = llm.stream("Once upon a time")
    assert last_output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert len(llm.chat([{"role": "user", "content": "Hi"}])[0].outputs[0].token_ids) <= 7
    (default_output,) = llm.generate("Once upon a time", SamplingParams(seed=1, ignore_eos=True))
    # explicit SamplingParams have their own defaults
    assert len(default_output.outputs[0].token_ids) == 16

    async def stream_async():
        async_llm = AsyncLLM(engine=llm.engine)
        assert async_llm.get_default_sampling_params() == expected_params
        return [output async for output in async_llm.generate("Once upon a time")][-1]

    assert asyncio.run(stream_async()).outputs[0].token_ids == expected.outputs[0].token_ids


def test_eos_tokens_of_generation_config_and_overrides(tmp_path):
    folder = hub.resolve("quill")
    (tmp_path / FILE).write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert Tokenizer(folder).eos_token_ids == {2}
    assert Tokenizer(folder, tmp_path).eos_token_ids == {2, 9}
    assert Tokenizer(folder, overrides={"eos_token_id": 5}).eos_token_ids == {2, 5}
