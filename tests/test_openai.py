"""OpenAI's protocol: bodies to requests, results to bodies, and what is refused by name."""

import json
from typing import Any

import pytest

from quire.serving.openai import (
    CHAT,
    COMPLETION,
    LABELS,
    NEUTRAL,
    SAMPLING,
    ChatRequest,
    CompletionRequest,
    Head,
    chat_response,
    completion_response,
    parse_chat,
    parse_completion,
)
from quire.serving.outputs import CompletionOutput, Logprob, RequestOutput
from quire.serving.request import RequestError, SamplingParams

ASK = [{"role": "user", "content": "Hi"}]
HEAD = Head("id-1", "quill", 1700000000, "quire-0")
VALUES: dict[str, Any] = {  # a value for each sampling field, as JSON has it
    "n": 3, "presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.1, "temperature": 0,
    "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 7, "stop": ["a", "b"], "stop_token_ids": [3], "ignore_eos": True,
    "max_tokens": 9, "min_tokens": 2, "prompt_logprobs": 1, "skip_special_tokens": False,
    "include_stop_str_in_output": True, "logit_bias": {"5": -1.5}, "allowed_token_ids": [1, 2], "bad_words": ["x"],
}  # fmt: skip


def chat(**fields) -> ChatRequest:
    return parse_chat({"messages": ASK, **fields})


def completion(**fields) -> CompletionRequest:
    return parse_completion({"prompt": "Once", **fields})


def refused(parse, **fields) -> str:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_plain_requests():
    assert chat() == ChatRequest(ASK, SamplingParams(max_tokens=None), None, {"add_generation_prompt": True})
    assert completion() == CompletionRequest(["Once"], SamplingParams(max_tokens=16), None)
    assert chat(model="m").model == completion(model="m").model == "m"


@pytest.mark.parametrize("parse", [chat, completion])
def test_every_sampling_field_is_applied(parse):
    assert set(VALUES) == set(SAMPLING)
    expected = SamplingParams(**VALUES)
    assert parse(**VALUES).params == expected
    for name, value in VALUES.items():
        assert getattr(parse(**{name: value}).params, name) == getattr(expected, name)


@pytest.mark.parametrize(("parse", "known"), [(chat, CHAT), (completion, COMPLETION)])
def test_null_is_as_if_not_given(parse, known):
    nulls = {name: None for name in known if name not in ("messages", "prompt")}
    assert parse(**nulls) == parse()


@pytest.mark.parametrize("parse", [chat, completion])
def test_labels_have_no_effect(parse):
    assert parse(**{name: {"any": ["thing"]} for name in LABELS}) == parse()


@pytest.mark.parametrize(("parse", "known"), [(chat, CHAT), (completion, COMPLETION)])
def test_what_is_not_implemented_is_refused_by_name(parse, known):
    for name in set(NEUTRAL) & set(known):
        assert parse(**{name: NEUTRAL[name]}) == parse()
        assert refused(parse, **{name: "x"}).startswith(f"{name}: is not implemented")
    assert refused(parse, stream=True).startswith("stream: ")
    assert refused(parse, stream=0).startswith("stream: ")
    assert refused(parse, temprature=1) == "temprature: unknown field; did you mean 'temperature'?"
    assert refused(parse, guided_json={}).startswith("guided_json: unknown field")
    assert refused(parse, response_format={"type": "json_object"}).startswith("response_format: ")


@pytest.mark.parametrize("parse", [chat, completion])
def test_wrong_values_are_refused_by_name(parse):
    assert refused(parse, temperature=-1).startswith("temperature: ")
    assert refused(parse, stop=["a", ""]).startswith("stop[1]: ")
    assert refused(parse, logit_bias={"x": 1}).startswith("logit_bias: ")
    assert refused(parse, model=5) == "model: must be a string, got 5"
    for body in (None, [], "x", 5):
        with pytest.raises(RequestError, match="body: must be a JSON object"):
            (parse_chat if parse is chat else parse_completion)(body)


def test_length_of_a_chat_answer():
    assert chat(max_completion_tokens=5).params.max_tokens == 5
    assert chat(max_tokens=6).params.max_tokens == 6
    assert refused(chat, max_tokens=5, max_completion_tokens=5).startswith("max_tokens: is the old name")
    assert refused(chat, max_completion_tokens=0).startswith("max_completion_tokens: ")


def test_logprobs_of_a_chat():
    assert chat(logprobs=False).params.logprobs is None
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).params.logprobs == 20
    assert refused(chat, logprobs=True, top_logprobs=21).startswith("top_logprobs: ")
    assert refused(chat, top_logprobs=2).startswith("top_logprobs: needs logprobs")
    assert refused(chat, logprobs=3).startswith("logprobs: must be true or false")
    assert completion(logprobs=3).params.logprobs == 3
    assert refused(completion, logprobs=True).startswith("logprobs: must be an integer")


def test_messages():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    given = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": []},
    ]
    assert chat(messages=given).messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo", "name": "Ann"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages: must be a list of one or more messages, got None"),
        ([], "messages: must be a list"),
        ("Hi", "messages: must be a list"),
        ([5], "messages[0]: must be an object"),
        ([*ASK, {"content": "x"}], "messages[1].role: must be one of system, developer, user, assistant, got None"),
        ([{"role": "tool", "content": "x"}], "messages[0].role: must be one of"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role: must be one of"),
        ([{"role": "user"}], "messages[0].content: must be a string, got None"),
        ([{"role": "user", "content": 5}], "messages[0].content: must be a string, got 5"),
        ([{"role": "user", "content": "\ud83d"}], "messages[0].content: must be valid Unicode"),
        ([{"role": "user", "content": "x", "tool_calls": [1]}], "messages[0].tool_calls: unknown field"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type: must be 'text'"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0].type: must be 'text', got 'x'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text: must be a string"),
        ([{"role": "user", "content": "x", "name": 1}], "messages[0].name: must be a string"),
    ],
)
def test_wrong_messages(messages, message):
    assert refused(chat, messages=messages).startswith(message)


def test_template_options():
    options = chat(chat_template_kwargs={"enable_thinking": False}, add_generation_prompt=False).template_options
    assert options == {"enable_thinking": False, "add_generation_prompt": False}
    for name in ("messages", "self", "add_generation_prompt", "chat_template"):
        assert refused(chat, chat_template_kwargs={name: 1}).startswith(f"chat_template_kwargs.{name}: ")
    assert refused(chat, chat_template_kwargs=[1]).startswith("chat_template_kwargs: must be a JSON object")
    assert refused(chat, add_generation_prompt=1).startswith("add_generation_prompt: ")


def test_prompts():
    for prompt, expected in (
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3], "x"], [[1], [2, 3], "x"]),
    ):
        assert completion(prompt=prompt).prompts == expected
    for prompt, message in (
        (None, "prompt: must be text, token ids, or a list"),
        ([], "prompt: must be text"),
        (5, "prompt: must be text"),
        ({"a": 1}, "prompt: must be text"),
        ([1, -1], "prompt[1]: must be an integer"),
        ([1, True], "prompt[1]: must be an integer"),
        ([1, "x"], "prompt[1]: must be an integer"),
        (["a", 5], "prompt[1]: must be a string"),
        ([[1, 1.5]], "prompt[0][1]: must be an integer"),
        ("\ud83d", "prompt: must be valid Unicode"),
        (["x"] * 2049, "prompt: must hold at most 2048"),
    ):
        assert refused(completion, prompt=prompt).startswith(message)


def answer(index: int = 0, **fields) -> CompletionOutput:
    """An answer of three tokens; the second is not among the two likeliest, the last is a part of a character."""
    logprobs = [
        {1: Logprob(-0.1, 1, "Hi"), 2: Logprob(-2.5, 2, "Ho")},
        {9: Logprob(-7.0, 40, " you"), 3: Logprob(-0.5, 1, " me"), 4: Logprob(-1.0, 2, " us")},
        {5: Logprob(float("-inf"), 2, "\ufffd"), 6: Logprob(-0.25, 1, "\ufffd")},
    ]
    fields = {"logprobs": logprobs, "finish_reason": "length", **fields}
    return CompletionOutput(index, "Hi you\ufffd", [1, 9, 5], -7.1, **fields)


def result(*answers: CompletionOutput, **fields) -> RequestOutput:
    return RequestOutput("0", "ask", [1, 2, 3, 4], answers, **fields)


def test_chat_response():
    output = result(answer(), answer(1, finish_reason="stop", stop_reason="END"), num_cached_tokens=2)
    body = chat_response(HEAD, output, SamplingParams(n=2, logprobs=2))
    assert json.loads(json.dumps(body, allow_nan=False)) == body
    assert {name: body[name] for name in ("id", "object", "created", "model", "system_fingerprint")} == {
        "id": "id-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "quill",
        "system_fingerprint": "quire-0",
    }
    assert body["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 6,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    first, second = body["choices"]
    assert first["message"] == {"role": "assistant", "content": "Hi you\ufffd"}
    assert (first["index"], first["finish_reason"], first["stop_reason"]) == (0, "length", None)
    assert (second["index"], second["finish_reason"], second["stop_reason"]) == (1, "stop", "END")
    hi, you, part = first["logprobs"]["content"]
    assert hi == {
        "token": "Hi",
        "logprob": -0.1,
        "bytes": [72, 105],
        "top_logprobs": [
            {"token": "Hi", "logprob": -0.1, "bytes": [72, 105]},
            {"token": "Ho", "logprob": -2.5, "bytes": [72, 111]},
        ],
    }
    assert you["logprob"] == -7.0
    assert [best["token"] for best in you["top_logprobs"]] == [" me", " us"]
    assert (part["bytes"], part["logprob"]) == (None, -9999.0)
    assert "prompt_logprobs" not in body


def test_chat_response_without_logprobs():
    body = chat_response(HEAD, result(answer(logprobs=None)), SamplingParams())
    assert body["choices"][0]["logprobs"] is None
    only = chat_response(HEAD, result(answer()), SamplingParams(logprobs=0))
    assert [token["top_logprobs"] for token in only["choices"][0]["logprobs"]["content"]] == [[], [], []]


def test_completion_response():
    prompt_logprobs = [None, {2: Logprob(-1.0, 3, "as")}]
    outputs = [result(answer(), answer(1)), result(answer(logprobs=None), prompt_logprobs=prompt_logprobs)]
    body = completion_response(HEAD, outputs)
    assert json.loads(json.dumps(body, allow_nan=False)) == body
    assert body["object"] == "text_completion"
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == 8 and body["usage"]["completion_tokens"] == 9
    assert body["choices"][0]["text"] == "Hi you\ufffd"
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["Hi", " you", "\ufffd"],
        "token_logprobs": [-0.1, -7.0, -9999.0],
        "top_logprobs": [{"Hi": -0.1, "Ho": -2.5}, {" you": -7.0, " me": -0.5, " us": -1.0}, {"\ufffd": -0.25}],
        "text_offset": [0, 2, 6],
    }
    assert "prompt_logprobs" not in body["choices"][0]
    assert body["choices"][2]["prompt_logprobs"] == [None, {"2": {"logprob": -1.0, "rank": 3, "decoded_token": "as"}}]


def test_tokens_without_a_tokenizer():
    bare = CompletionOutput(0, "", [7], logprobs=[{7: Logprob(-0.5, 1)}], finish_reason="stop")
    body = completion_response(HEAD, [result(bare)])
    assert body["choices"][0]["logprobs"]["tokens"] == ["token_id:7"]
    chatted = chat_response(HEAD, result(bare), SamplingParams(logprobs=1))
    assert chatted["choices"][0]["logprobs"]["content"][0]["bytes"] is None
