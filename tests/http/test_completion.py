"""OpenAI's completions: bodies to requests, answers to bodies and events, as OpenAI's own client
reads them.
"""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_type_hints

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.completion_create_params import CompletionCreateParamsStreaming

from quire.model.text.tokenizer import Tokenizer
from quire.serving.api.errors import RequestError
from quire.serving.api.outputs import Logprob
from quire.serving.api.params import SamplingParams
from quire.serving.http import prompting
from quire.serving.http.settings import Formats
from quire.serving.parsing.pieces import Said
from quire.serving.protocol.answers import completion as completion_answer
from quire.serving.protocol.answers.answer import (
    AnsweredPrompt,
    ChoicePart,
    CompletionRequest,
    FinishedChoice,
    ResponseHead,
    Usage,
)
from quire.serving.protocol.answers.shapes import DONE
from quire.serving.protocol.completion import FIELDS, parse
from quire.tests.support.answers import Server, unknown_client_fields, written
from quire.tests.support.cases import cases
from quire.tests.support.tokenizer_zoo import BOS, ZOO, save

HEAD = ResponseHead("cmpl-1", "quill", 1700000000, "quire-0", [AnsweredPrompt("ask", [1, 2])])
USAGE = Usage(8, 9, 4)
USED = {
    "prompt_tokens": 8,
    "completion_tokens": 9,
    "total_tokens": 17,
    "prompt_tokens_details": {"cached_tokens": 4},
}
OURS = {"drafted", "stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs"}


def completion(**fields) -> CompletionRequest:
    return parse({"prompt": "Once", **fields})


def refused(**fields) -> str:
    with pytest.raises(RequestError) as caught:
        completion(**fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_plain_request():
    expected = CompletionRequest(["Once"], SamplingParams(max_tokens=16), None)
    assert completion() == expected
    assert completion(model="m") == replace(expected, model="m")
    assert completion(add_special_tokens=False) == replace(expected, add_special_tokens=False)
    assert completion(echo=True) == replace(expected, echo=True)


def test_every_field_of_the_client_is_known():
    assert set(get_type_hints(CompletionCreateParamsStreaming)) <= {*FIELDS}


def test_logprobs_and_best_of():
    assert completion(logprobs=3).params.logprobs == 3
    assert refused(logprobs=True).startswith("logprobs: must be an integer")
    assert completion(n=2, best_of=5).params == SamplingParams(n=2, best_of=5)
    assert refused(n=3, best_of=2).startswith("best_of: must be an integer from 3 to 128")


def test_echo_asks_for_the_log_probabilities_of_the_prompt():
    found = completion(echo=True, logprobs=2)
    assert (found.params.prompt_logprobs, found.wants_prompt_logprobs) == (2, False)
    found = completion(echo=True, logprobs=2, prompt_logprobs=5)
    assert (found.params.prompt_logprobs, found.wants_prompt_logprobs) == (5, True)
    assert completion(prompt_logprobs=0).wants_prompt_logprobs
    assert completion(logprobs=2).params.prompt_logprobs is None


def test_nothing_is_written_only_with_echo():
    found = completion(echo=True, max_tokens=0)
    assert found.silent and found.params.max_tokens == 1
    assert not completion(echo=True, max_tokens=1).silent
    assert refused(max_tokens=0).startswith("max_tokens: must be")
    assert refused(echo=True, max_tokens=False).startswith("max_tokens: must be")


def test_what_cannot_be_streamed():
    assert completion(stream=True, echo=True, n=2).delivery.stream
    assert refused(stream=True, best_of=2).startswith("best_of: cannot be streamed")
    assert refused(stream=True, prompt_logprobs=1).startswith("prompt_logprobs: cannot be streamed")
    assert refused(stream=True, echo=True, logprobs=1).startswith(
        "echo: with logprobs cannot be streamed"
    )


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
        assert refused(prompt=prompt).startswith(message)


def answer(index: int = 0, **fields) -> FinishedChoice:
    """An answer of three tokens; the second is not among the two likeliest, the last is a part of a
    character.
    """
    logprobs = [
        {1: Logprob(-0.1, 1, "Hi"), 2: Logprob(-2.5, 2, "Ho")},
        {9: Logprob(-7.0, 40, " you"), 3: Logprob(-0.5, 1, " me"), 4: Logprob(-1.0, 2, " us")},
        {5: Logprob(float("-inf"), 2, "\ufffd"), 6: Logprob(-0.25, 1, "\ufffd")},
    ]
    return replace(
        FinishedChoice(index, "Hi you\ufffd", "length", token_ids=[1, 9, 5], logprobs=logprobs),
        **fields,
    )


def respond(
    request: CompletionRequest,
    *answers: FinishedChoice,
    head: ResponseHead = HEAD,
    usage: Usage = USAGE,
) -> dict[str, Any]:
    body = completion_answer.response(head, request, None, answers, usage)
    assert json.loads(json.dumps(body, allow_nan=False)) == body
    check(body)
    return body


def check(body: dict[str, Any]) -> None:
    """The client's own type takes it, but for what OpenAI has not: other ends, and none as long as
    it is streamed.
    """
    body = json.loads(json.dumps(body))
    for choice in body["choices"]:
        if choice["finish_reason"] in (None, "timeout", "abort"):
            choice["finish_reason"] = "stop"
        if choice["logprobs"] is not None:  # the first token of a prompt has none
            for name in ("token_logprobs", "top_logprobs"):
                choice["logprobs"][name] = [
                    each for each in choice["logprobs"][name] if each is not None
                ]
    assert unknown_client_fields(Completion, body) <= OURS


def test_answers_in_full():
    prompts = [
        AnsweredPrompt("one", [1, 2]),
        AnsweredPrompt("two", [3, 4], [None, {4: Logprob(-1.0, 3, "as")}]),
    ]
    request = completion(prompt=["one", "two"], n=2, logprobs=2, prompt_logprobs=0)
    body = respond(
        request,
        answer(),
        answer(1),
        answer(2, logprobs=None),
        answer(3, finish_reason="stop", stop_reason=7),
        head=replace(HEAD, prompts=prompts),
    )
    assert (body["object"], body["id"], body["usage"]) == ("text_completion", "cmpl-1", USED)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    first, _, third, fourth = body["choices"]
    assert first == {
        "index": 0,
        "text": "Hi you\ufffd",
        "logprobs": {
            "tokens": ["Hi", " you", "\ufffd"],
            "token_logprobs": [-0.1, -7.0, -9999.0],
            "top_logprobs": [
                {"Hi": -0.1, "Ho": -2.5},
                {" you": -7.0, " me": -0.5, " us": -1.0},
                {"\ufffd": -0.25},
            ],
            "text_offset": [0, 2, 6],
        },
        "finish_reason": "length",
        "stop_reason": None,
        "prompt_logprobs": None,
        "token_ids": None,
        "prompt_token_ids": None,
    }
    assert third["logprobs"] is None
    assert third["prompt_logprobs"] == [
        None,
        {"4": {"logprob": -1.0, "rank": 3, "decoded_token": "as"}},
    ]
    assert (fourth["finish_reason"], fourth["stop_reason"]) == ("stop", 7)


def test_tokens_without_a_tokenizer():
    bare = FinishedChoice(0, "", "stop", token_ids=[7], logprobs=[{7: Logprob(-0.5, 1)}])
    found = respond(completion(logprobs=0), bare)["choices"][0]["logprobs"]
    assert found == {
        "tokens": ["token_id:7"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"token_id:7": -0.5}],
        "text_offset": [0],
    }


@pytest.mark.parametrize(
    ("text", "first", "offsets"), [("It is", "<s>", [0, 0, 2]), ("It is", "It", [0, 2, 5])]
)
def test_echo(text, first, offsets):
    """The prompt is said again, with its log-probabilities; a token that the tokenizer put to it
    has no place in it.
    """
    entries = [None, {2: Logprob(-1.0, 3, "It" if first == "<s>" else " is")}]
    head = replace(HEAD, prompts=[AnsweredPrompt(text, [1, 2], entries, first)])
    one = FinishedChoice(0, " so", "stop", token_ids=[9], logprobs=[{9: Logprob(-0.5, 1, " so")}])
    (choice,) = respond(completion(echo=True, logprobs=1, return_token_ids=True), one, head=head)[
        "choices"
    ]
    assert choice["text"] == "It is so"
    assert choice["logprobs"]["tokens"] == [first, "It" if first == "<s>" else " is", " so"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -0.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == offsets
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([9], [1, 2])
    assert choice["prompt_logprobs"] is None  # they stand in logprobs already
    ids = completion(echo=True, logprobs=1, return_tokens_as_token_ids=True)
    named = respond(ids, one, head=head)["choices"][0]["logprobs"]
    assert (
        named["tokens"] == ["token_id:1", "token_id:2", "token_id:9"]
        and named["text_offset"] == offsets
    )
    assert named["top_logprobs"] == [None, {"token_id:2": -1.0}, {"token_id:9": -0.5}]
    silent = completion(echo=True, logprobs=1, max_tokens=0, return_token_ids=True)
    (choice,) = respond(silent, one, head=head)["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == (
        "It is",
        [first, "It" if first == "<s>" else " is"],
    )
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([], [1, 2])
    assert (
        respond(completion(echo=True), replace(one, logprobs=None), head=head)["choices"][0]["text"]
        == "It is so"
    )


def streamed(
    request: CompletionRequest, parts: list[ChoicePart], head: ResponseHead = HEAD
) -> bytes:
    stream = completion_answer.CompletionStream(head, request, None)
    data = stream.begin(Usage(8, 0, 4))
    for number, part in enumerate(parts, 1):
        stream.set_usage(Usage(8, number, 4))
        data += stream.part(part)
    return data + stream.end(USAGE)


def chunks_of(data: bytes) -> list[dict[str, Any]]:
    """The chunks of a stream that ends as it must."""
    assert data.endswith(DONE)
    found = []
    for block in data.removesuffix(DONE).decode().split("\n\n")[:-1]:
        assert block.startswith("data: ") and "\n" not in block
        found.append(json.loads(block.removeprefix("data: ")))
        if "error" not in found[-1]:
            check(found[-1])
    return found


@settings(max_examples=cases(150))
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.booleans())
def test_the_texts_of_a_stream_joined_are_the_whole_answers(data, num_prompts, each, echo, scored):
    """Several prompts with several answers each, whose parts come in any order."""
    scored = scored and not echo
    lines = [data.draw(written(calls=False, scored=scored)) for _ in range(num_prompts * each)]
    prompts = [AnsweredPrompt(f"prompt {i} ", [i, 7]) for i in range(num_prompts)]
    head = replace(HEAD, prompts=prompts)
    random = data.draw(st.randoms(use_true_random=False))
    asked: dict[str, Any] = {
        "n": each,
        "echo": echo,
        "return_token_ids": True,
        "logprobs": 1 if scored else None,
    }
    request = completion(prompt=[prompt.text for prompt in prompts], **asked)
    left = [[replace(part, index=index) for part in line.parts] for index, line in enumerate(lines)]
    parts = []
    while any(left):
        parts.append(random.choice([line for line in left if line]).pop(0))
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks_of(
        streamed(replace(request, delivery=replace(request.delivery, stream=True)), parts, head)
    ):
        (choice,) = chunk["choices"]
        first = choice["index"] not in found
        made = found.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": []})
        assert "finish_reason" not in made and ("prompt_token_ids" in choice) == first
        if first:
            made["prompt"] = choice["prompt_token_ids"]
        made["text"] += choice["text"]
        made["ids"] += choice["token_ids"]
        made["logprobs"].append(choice["logprobs"])
        if choice["finish_reason"] is not None:
            made |= {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
    answers = [replace(line.answer, index=index) for index, line in enumerate(lines)]
    for choice in respond(request, *answers, head=head)["choices"]:
        made = found[choice["index"]]
        assert made["text"] == choice["text"] and made["ids"] == choice["token_ids"]
        assert made["prompt"] == choice["prompt_token_ids"] == [choice["index"] // each, 7]
        assert choice["text"].startswith(f"prompt {choice['index'] // each} " if echo else "")
        assert (made["finish_reason"], made["stop_reason"]) == (
            choice["finish_reason"],
            choice["stop_reason"],
        )
        if scored:
            for name, values in choice["logprobs"].items():
                assert sum((part[name] for part in made["logprobs"]), []) == values


@settings(max_examples=cases(30))
@given(written(calls=False))
def test_the_client_reads_answers_and_streams(one):
    server = Server(streamed(completion(stream=True), list(one.parts)))
    client = openai.OpenAI(api_key="k", base_url="http://127.0.0.1/v1", http_client=server.http)
    stream = client.completions.create(model="quill", prompt="x", stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    assert parse(server.asked).delivery.stream
    assert "".join(chunk.text for chunk in chunks) == (one.answer.content or "")
    assert chunks[-1].finish_reason == one.answer.finish_reason


def test_usage_in_a_stream():
    parts = [
        ChoicePart(0, [Said("a")]),
        ChoicePart(0, [Said("")]),
        ChoicePart(0, [Said("b")], "stop"),
    ]
    plain = chunks_of(streamed(completion(stream=True), parts))
    assert [chunk["choices"][0]["text"] for chunk in plain] == ["a", "b"] and not any(
        "usage" in one for one in plain
    )
    for continuous, shown in ((False, [None, None]), (True, [1, 3])):
        options = {"include_usage": True, "continuous_usage_stats": continuous}
        *chunks, last = chunks_of(streamed(completion(stream=True, stream_options=options), parts))
        assert [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks] == shown
        assert (last["usage"], last["choices"]) == (USED, [])


def test_a_silent_stream_says_the_prompt_only():
    parts = [
        ChoicePart(0, [Said("a")], None, None, [5]),
        ChoicePart(0, [Said("b")], "length", None, [6]),
    ]
    asked = completion(stream=True, echo=True, max_tokens=0, return_token_ids=True)
    found = [chunk["choices"][0] for chunk in chunks_of(streamed(asked, parts))]
    assert [(one["text"], one["token_ids"], one["finish_reason"]) for one in found] == [
        ("ask", [], None),
        ("", [], "length"),
    ]


def test_drafted_tokens_are_told_to_those_who_ask():
    part = ChoicePart(0, [], None, None, [5, 6, 7], drafted=[0, 1])
    for options, told in (({}, None), ({"include_drafted": True}, [0, 1])):
        asked = completion(stream=True, stream_options=options)
        (shown,) = chunks_of(streamed(asked, [replace(part, pieces=[Said("a")])]))
        assert shown["choices"][0].get("drafted") == told
        assert bool(chunks_of(streamed(asked, [part]))) == (told is not None), (
            "also where there is no text yet"
        )


def test_a_stream_that_fails_says_so_and_ends():
    stream = completion_answer.CompletionStream(HEAD, completion(stream=True), None)
    data = (
        stream.begin(Usage(3, 0))
        + stream.part(ChoicePart(0, [Said("a")]))
        + stream.fail(429, "it broke", "queue")
    )
    *_, last = chunks_of(data)
    assert last == {
        "error": {"message": "it broke", "type": "rate_limit_error", "param": "queue", "code": None}
    }
    client = openai.OpenAI(
        api_key="k", base_url="http://127.0.0.1/v1", http_client=Server(data).http
    )
    with pytest.raises(openai.APIError, match="it broke"):
        list(client.completions.create(model="quill", prompt="x", stream=True))


def test_a_gap_is_filled_in_the_models_own_form(tmp_path):
    """What stands before and after is between the model's markers, and neither can bring markers of
    its own.
    """
    core = ZOO["byte_level"]()
    names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    core.add_special_tokens(names)
    tokenizer = Tokenizer(save(tmp_path, core))
    engine: Any = SimpleNamespace(tokenizer=tokenizer, max_len=100)
    asked = parse({"prompt": ["def f(", "a"], "suffix": "): pass"})
    prepared = prompting.completion(engine, asked, Formats())
    texts = [
        tokenizer.decode(ask.tokens, skip_special_tokens=False) for ask in prepared.engine_requests
    ]
    assert [text.removeprefix(BOS) for text in texts] == [
        f"<|fim_prefix|>{before}<|fim_suffix|>): pass<|fim_middle|>" for before in ("def f(", "a")
    ]
    assert (
        prompting.completion(engine, parse({"prompt": "a", "suffix": ""}), Formats())
        .engine_requests[0]
        .text
        == "a"
    )
    with pytest.raises(RequestError, match="echo: has no place for a suffix"):
        parse({"prompt": "a", "suffix": "b", "echo": True})
