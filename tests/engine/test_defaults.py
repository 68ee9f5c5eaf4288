"""The sampling parameters that a model brings: read from generation_config.json, and given to who
asks for none.
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


def read(folder, file=None, longest: int = 8192, **options):
    if file is not None:
        (folder / FILE).write_text(json.dumps(file))
    return model_defaults(folder, EngineOptions(**options), longest).requests


@pytest.mark.parametrize(
    ("file", "found"),
    [
        (QWEN, DEFAULTS),
        (None, {}),
        ({}, {}),
        # nothing that is not neutral
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
def test_what_a_file_says(tmp_path, file, found):
    assert read(tmp_path, file) == found


@pytest.mark.parametrize(
    ("file", "own", "found"),
    [
        (QWEN, {"temperature": 0.5}, DEFAULTS | {"temperature": 0.5}),
        (QWEN, {"temperature": 1.0, "top_k": 0}, {"repetition_penalty": 1.05, "top_p": 0.8}),
        (None, {"max_new_tokens": 9}, {"max_tokens": 9}),
        ({"do_sample": False}, {"temperature": 0.5}, {"temperature": 0.5}),
        ({"do_sample": False, "temperature": 0.5}, {"do_sample": True}, {"temperature": 0.5}),
        (QWEN, {"do_sample": False}, DEFAULTS | {"temperature": 0.0}),
    ],
)
def test_what_the_user_says_wins(tmp_path, file, own, found):
    assert read(tmp_path, file, override_generation_config=own) == found


def test_where_the_file_is(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / FILE).write_text(json.dumps({"top_p": 0.5}))
    assert read(tmp_path, QWEN, generation_config="auto") == DEFAULTS
    assert read(tmp_path, generation_config="vllm") == {}
    assert read(tmp_path, generation_config="vllm", override_generation_config={"top_p": 0.4}) == {
        "top_p": 0.4
    }
    assert read(tmp_path, generation_config=str(other)) == {"top_p": 0.5}
    with pytest.raises(ModelError, match=r"generation_config is '.*nowhere'; it can be auto"):
        read(tmp_path, generation_config=str(tmp_path / "nowhere"))


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
def test_a_bad_value_is_named(tmp_path, name, value):
    with pytest.raises(
        ModelError, match=rf"{FILE} of the model: {name}: .*--generation-config vllm"
    ):
        read(tmp_path, {name: value})
    with pytest.raises(ModelError, match=rf"override_generation_config: {name}: "):
        read(tmp_path, {}, override_generation_config={name: value})


def test_an_unknown_name_is_refused_where_the_user_gives_it(tmp_path):
    assert read(tmp_path, {"tempurature": 3}) == {}
    with pytest.raises(ModelError, match="tempurature: unknown field; did you mean 'temperature'"):
        read(tmp_path, override_generation_config={"tempurature": 3})
    with pytest.raises(ModelError, match="override_generation_config is 7"):
        read(tmp_path, override_generation_config=7)


def test_the_log_says_what_holds_and_what_does_not(tmp_path, caplog):
    caplog.set_level("INFO", "quire")
    read(tmp_path, QWEN | {"num_beams": 4, "typical_p": 1.0, "max_length": 4096})
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert "num_beams = 4" in said[0] and "typical_p" not in said[0]
    assert "max_length = 4096 counts the prompt too" in said[1]
    assert said[2].endswith("temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05")
    caplog.clear()
    read(
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
def test_conversations_use_llama_cpp_sampling_where_none_is_recommended(
    tmp_path, caplog, file, options, chat
):
    caplog.set_level("INFO", "quire")
    if file is not None:
        (tmp_path / FILE).write_text(json.dumps(file))
    made = model_defaults(tmp_path, EngineOptions(**options), 8192)
    assert made.chat == chat
    used = chat.items() >= LLAMA_CPP.items()
    assert made.requests == {
        name: value for name, value in chat.items() if not used or name not in LLAMA_CPP
    }
    messages = [
        record.getMessage()
        for record in caplog.records
        if "recommends no sampling" in record.getMessage()
    ]
    assert len(messages) == used and all(
        "temperature=0.8, top_p=0.95, top_k=40" in text for text in messages
    )


def test_bundled_model_keeps_its_sampling():
    made = model_defaults(hub.resolve("quill"), EngineOptions(), 8192)
    assert made.requests == made.chat == {}


def test_explicit_fields_win():
    given = SamplingParams(temperature=0.2, min_tokens=30, max_tokens=None)
    made = with_defaults(given, {"temperature", "min_tokens"}, DEFAULTS | {"max_tokens": 7})
    assert (made.temperature, made.top_p, made.top_k, made.repetition_penalty) == (
        0.2,
        0.8,
        20,
        1.05,
    )
    assert made.max_tokens == 30  # a default forbids nothing that was asked for
    assert with_defaults(given, {"max_tokens"}, {"max_tokens": 7}).max_tokens is None
    assert with_defaults(given, (), {}) is given


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "quill"
    shutil.copytree(hub.resolve("quill"), folder)
    ids = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps(ids | {"do_sample": False, "max_new_tokens": 7}))
    return LLM(str(folder), max_num_seqs=2, max_num_batched_tokens=16)


def test_a_model_with_defaults(llm):
    wanted = SamplingParams(temperature=0, max_tokens=7)
    assert llm.get_default_sampling_params() == wanted
    (expected,) = llm.generate("Once upon a time", wanted)
    for _ in range(2):
        assert (
            llm.generate("Once upon a time")[0].outputs[0].token_ids
            == expected.outputs[0].token_ids
        )
    *_, last = llm.stream("Once upon a time")
    assert last.outputs[0].token_ids == expected.outputs[0].token_ids
    assert len(llm.chat([{"role": "user", "content": "Hi"}])[0].outputs[0].token_ids) <= 7
    (neutral,) = llm.generate("Once upon a time", SamplingParams(seed=1, ignore_eos=True))
    # parameters that are given have their own defaults
    assert len(neutral.outputs[0].token_ids) == 16

    async def ask():
        served = AsyncLLM(engine=llm.engine)
        assert served.get_default_sampling_params() == wanted
        return [output async for output in served.generate("Once upon a time")][-1]

    assert asyncio.run(ask()).outputs[0].token_ids == expected.outputs[0].token_ids


def test_end_tokens_of_another_folder(tmp_path):
    own = hub.resolve("quill")
    (tmp_path / FILE).write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert Tokenizer(own).eos_token_ids == {2}
    assert Tokenizer(own, tmp_path).eos_token_ids == {2, 9}
    assert Tokenizer(own, overrides={"eos_token_id": 5}).eos_token_ids == {2, 5}
