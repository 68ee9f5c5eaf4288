"""Completions: parsing request bodies, and response bodies and events that OpenAI's client
reads.
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
from quire.serving.parsing.pieces import TextPiece
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
USAGE_BODY = {
    "prompt_tokens": 8,
    "completion_tokens": 9,
    "total_tokens": 17,
    "prompt_tokens_details": {"cached_tokens": 4},
}
QUIRE_FIELDS = {"drafted", "stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs"}


def parse_completion(**fields) -> CompletionRequest:
    return parse({"prompt": "Once", **fields})


def rejection_message(**fields) -> str:
    with pytest.raises(RequestError) as caught:
        parse_completion(**fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_plain_request():
    expected = CompletionRequest(["Once"], SamplingParams(max_tokens=16), None)
    assert parse_completion() == expected
    assert parse_completion(model="m") == replace(expected, model="m")
    assert parse_completion(add_special_tokens=False) == replace(expected, add_special_tokens=False)
    assert parse_completion(echo=True) == replace(expected, echo=True)


def test_every_openai_field_is_handled():
    assert set(get_type_hints(CompletionCreateParamsStreaming)) <= {*FIELDS}


def test_logprobs_and_best_of():
    assert parse_completion(logprobs=3).params.logprobs == 3
    assert rejection_message(logprobs=True).startswith("logprobs: must be an integer")
    assert parse_completion(n=2, best_of=5).params == SamplingParams(n=2, best_of=5)
    assert rejection_message(n=3, best_of=2).startswith("best_of: must be an integer from 3 to 128")


def test_echo_with_logprobs_requests_prompt_logprobs():
    request = parse_completion(echo=True, logprobs=2)
    assert (request.params.prompt_logprobs, request.wants_prompt_logprobs) == (2, False)
    request = parse_completion(echo=True, logprobs=2, prompt_logprobs=5)
    assert (request.params.prompt_logprobs, request.wants_prompt_logprobs) == (5, True)
    assert parse_completion(prompt_logprobs=0).wants_prompt_logprobs
    assert parse_completion(logprobs=2).params.prompt_logprobs is None


def test_max_tokens_0_needs_echo():
    request = parse_completion(echo=True, max_tokens=0)
    assert request.silent and request.params.max_tokens == 1
    assert not parse_completion(echo=True, max_tokens=1).silent
    assert rejection_message(max_tokens=0).startswith("max_tokens: must be")
    assert rejection_message(echo=True, max_tokens=False).startswith("max_tokens: must be")


def test_options_that_cannot_be_streamed_are_rejected():
    assert parse_completion(stream=True, echo=True, n=2).delivery.stream
    assert rejection_message(stream=True, best_of=2).startswith("best_of: cannot be streamed")
    assert rejection_message(stream=True, prompt_logprobs=1).startswith(
        "prompt_logprobs: cannot be streamed"
    )
    assert rejection_message(stream=True, echo=True, logprobs=1).startswith(
        "echo: with logprobs cannot be streamed"
    )


def test_prompt_forms():
    for prompt, expected in (
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3], "x"], [[1], [2, 3], "x"]),
    ):
        assert parse_completion(prompt=prompt).prompts == expected
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
        assert rejection_message(prompt=prompt).startswith(message)


def finished_choice(index: int = 0, **fields) -> FinishedChoice:
    """A choice of three tokens: the second is not among the two likeliest, and the last is an
    incomplete character.
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


def response_body(
    request: CompletionRequest,
    *answers: FinishedChoice,
    head: ResponseHead = HEAD,
    usage: Usage = USAGE,
) -> dict[str, Any]:
    body = completion_answer.response(head, request, None, answers, usage)
    assert json.loads(json.dumps(body, allow_nan=False)) == body
    check_client_type(body)
    return body


def check_client_type(body: dict[str, Any]) -> None:
    """Check that the client's type accepts the body, apart from what OpenAI lacks: some finish
    reasons, and none in stream chunks.
    """
    body = json.loads(json.dumps(body))
    for choice in body["choices"]:
        if choice["finish_reason"] in (None, "timeout", "abort"):
            choice["finish_reason"] = "stop"
        if choice["logprobs"] is not None:  # the first token of a prompt has none
            for name in ("token_logprobs", "top_logprobs"):
                choice["logprobs"][name] = [
                    logprob for logprob in choice["logprobs"][name] if logprob is not None
                ]
    assert unknown_client_fields(Completion, body) <= QUIRE_FIELDS


def test_complete_response_body():
    prompts = [
        AnsweredPrompt("one", [1, 2]),
        AnsweredPrompt("two", [3, 4], [None, {4: Logprob(-1.0, 3, "as")}]),
    ]
    request = parse_completion(prompt=["one", "two"], n=2, logprobs=2, prompt_logprobs=0)
    body = response_body(
        request,
        finished_choice(),
        finished_choice(1),
        finished_choice(2, logprobs=None),
        finished_choice(3, finish_reason="stop", stop_reason=7),
        head=replace(HEAD, prompts=prompts),
    )
    assert (body["object"], body["id"], body["usage"]) == ("text_completion", "cmpl-1", USAGE_BODY)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    first_choice, _, third_choice, fourth_choice = body["choices"]
    assert first_choice == {
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
    assert third_choice["logprobs"] is None
    assert third_choice["prompt_logprobs"] == [
        None,
        {"4": {"logprob": -1.0, "rank": 3, "decoded_token": "as"}},
    ]
    assert (fourth_choice["finish_reason"], fourth_choice["stop_reason"]) == ("stop", 7)


def test_logprobs_without_tokenizer_use_token_ids():
    choice = FinishedChoice(0, "", "stop", token_ids=[7], logprobs=[{7: Logprob(-0.5, 1)}])
    logprobs = response_body(parse_completion(logprobs=0), choice)["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["token_id:7"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"token_id:7": -0.5}],
        "text_offset": [0],
    }


@pytest.mark.parametrize(
    ("text", "first_token", "offsets"), [("It is", "<s>", [0, 0, 2]), ("It is", "It", [0, 2, 5])]
)
def test_echo_returns_prompt_and_its_logprobs(text, first_token, offsets):
    """The prompt is repeated with its logprobs; a BOS token that the tokenizer added has no
    text.
    """
    entries = [None, {2: Logprob(-1.0, 3, "It" if first_token == "<s>" else " is")}]
    head = replace(HEAD, prompts=[AnsweredPrompt(text, [1, 2], entries, first_token)])
    finished = FinishedChoice(
        0, " so", "stop", token_ids=[9], logprobs=[{9: Logprob(-0.5, 1, " so")}]
    )
    (choice,) = response_body(
        parse_completion(echo=True, logprobs=1, return_token_ids=True), finished, head=head
    )["choices"]
    assert choice["text"] == "It is so"
    assert choice["logprobs"]["tokens"] == [
        first_token,
        "It" if first_token == "<s>" else " is",
        " so",
    ]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -0.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == offsets
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([9], [1, 2])
    assert choice["prompt_logprobs"] is None  # they are in logprobs already
    ids_request = parse_completion(echo=True, logprobs=1, return_tokens_as_token_ids=True)
    id_logprobs = response_body(ids_request, finished, head=head)["choices"][0]["logprobs"]
    assert (
        id_logprobs["tokens"] == ["token_id:1", "token_id:2", "token_id:9"]
        and id_logprobs["text_offset"] == offsets
    )
    assert id_logprobs["top_logprobs"] == [None, {"token_id:2": -1.0}, {"token_id:9": -0.5}]
    prompt_only_request = parse_completion(
        echo=True, logprobs=1, max_tokens=0, return_token_ids=True
    )
    (choice,) = response_body(prompt_only_request, finished, head=head)["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == (
        "It is",
        [first_token, "It" if first_token == "<s>" else " is"],
    )
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([], [1, 2])
    assert (
        response_body(parse_completion(echo=True), replace(finished, logprobs=None), head=head)[
            "choices"
        ][0]["text"]
        == "It is so"
    )


def stream_data(
    request: CompletionRequest, choice_parts: list[ChoicePart], head: ResponseHead = HEAD
) -> bytes:
    stream = completion_answer.CompletionStream(head, request, None)
    data = stream.begin(Usage(8, 0, 4))
    for number, choice_part in enumerate(choice_parts, 1):
        stream.set_usage(Usage(8, number, 4))
        data += stream.part(choice_part)
    return data + stream.end(USAGE)


def parse_chunks(data: bytes) -> list[dict[str, Any]]:
    """The chunks of a stream that ends with `[DONE]`."""
    assert data.endswith(DONE)
    chunks = []
    for block in data.removesuffix(DONE).decode().split("\n\n")[:-1]:
        assert block.startswith("data: ") and "\n" not in block
        chunks.append(json.loads(block.removeprefix("data: ")))
        if "error" not in chunks[-1]:
            check_client_type(chunks[-1])
    return chunks


@settings(max_examples=cases(150))
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.booleans())
def test_joined_stream_texts_equal_the_response(data, num_prompts, num_choices, echo, has_logprobs):
    """Several prompts with several choices each, whose parts arrive in any order."""
    has_logprobs = has_logprobs and not echo
    written_answers = [
        data.draw(written(calls=False, scored=has_logprobs))
        for _ in range(num_prompts * num_choices)
    ]
    prompts = [AnsweredPrompt(f"prompt {i} ", [i, 7]) for i in range(num_prompts)]
    head = replace(HEAD, prompts=prompts)
    random = data.draw(st.randoms(use_true_random=False))
    request_fields: dict[str, Any] = {
        "n": num_choices,
        "echo": echo,
        "return_token_ids": True,
        "logprobs": 1 if has_logprobs else None,
    }
    request = parse_completion(prompt=[prompt.text for prompt in prompts], **request_fields)
    remaining = [
        [replace(choice_part, index=index) for choice_part in written_answer.parts]
        for index, written_answer in enumerate(written_answers)
    ]
    choice_parts = []
    while any(remaining):
        choice_parts.append(
            random.choice([written_answer for written_answer in remaining if written_answer]).pop(0)
        )
    merged_choices: dict[int, dict[str, Any]] = {}
    for chunk in parse_chunks(
        stream_data(
            replace(request, delivery=replace(request.delivery, stream=True)), choice_parts, head
        )
    ):
        (choice,) = chunk["choices"]
        is_first_chunk = choice["index"] not in merged_choices
        merged = merged_choices.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": []})
        assert "finish_reason" not in merged and ("prompt_token_ids" in choice) == is_first_chunk
        if is_first_chunk:
            merged["prompt"] = choice["prompt_token_ids"]
        merged["text"] += choice["text"]
        merged["ids"] += choice["token_ids"]
        merged["logprobs"].append(choice["logprobs"])
        if choice["finish_reason"] is not None:
            merged |= {
                "finish_reason": choice["finish_reason"],
                "stop_reason": choice["stop_reason"],
            }
    answers = [
        replace(written_answer.answer, index=index)
        for index, written_answer in enumerate(written_answers)
    ]
    for choice in response_body(request, *answers, head=head)["choices"]:
        merged = merged_choices[choice["index"]]
        assert merged["text"] == choice["text"] and merged["ids"] == choice["token_ids"]
        assert merged["prompt"] == choice["prompt_token_ids"] == [choice["index"] // num_choices, 7]
        assert choice["text"].startswith(
            f"prompt {choice['index'] // num_choices} " if echo else ""
        )
        assert (merged["finish_reason"], merged["stop_reason"]) == (
            choice["finish_reason"],
            choice["stop_reason"],
        )
        if has_logprobs:
            for name, values in choice["logprobs"].items():
                assert sum((choice_part[name] for choice_part in merged["logprobs"]), []) == values


@settings(max_examples=cases(30))
@given(written(calls=False))
def test_openai_client_reads_the_stream(written_answer):
    server = Server(stream_data(parse_completion(stream=True), list(written_answer.parts)))
    client = openai.OpenAI(api_key="k", base_url="http://127.0.0.1/v1", http_client=server.http)
    stream = client.completions.create(model="quill", prompt="x", stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    assert parse(server.asked).delivery.stream
    assert "".join(chunk.text for chunk in chunks) == (written_answer.answer.content or "")
    assert chunks[-1].finish_reason == written_answer.answer.finish_reason


def test_stream_usage_options():
    choice_parts = [
        ChoicePart(0, [TextPiece("a")]),
        ChoicePart(0, [TextPiece("")]),
        ChoicePart(0, [TextPiece("b")], "stop"),
    ]
    chunks_without_usage = parse_chunks(stream_data(parse_completion(stream=True), choice_parts))
    assert [chunk["choices"][0]["text"] for chunk in chunks_without_usage] == [
        "a",
        "b",
    ] and not any("usage" in chunk for chunk in chunks_without_usage)
    for continuous, expected_counts in ((False, [None, None]), (True, [1, 3])):
        options = {"include_usage": True, "continuous_usage_stats": continuous}
        *chunks, last = parse_chunks(
            stream_data(parse_completion(stream=True, stream_options=options), choice_parts)
        )
        assert [
            chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks
        ] == expected_counts
        assert (last["usage"], last["choices"]) == (USAGE_BODY, [])


def test_stream_with_max_tokens_0_returns_the_prompt_only():
    choice_parts = [
        ChoicePart(0, [TextPiece("a")], None, None, [5]),
        ChoicePart(0, [TextPiece("b")], "length", None, [6]),
    ]
    request = parse_completion(stream=True, echo=True, max_tokens=0, return_token_ids=True)
    choices = [chunk["choices"][0] for chunk in parse_chunks(stream_data(request, choice_parts))]
    assert [
        (choice["text"], choice["token_ids"], choice["finish_reason"]) for choice in choices
    ] == [
        ("ask", [], None),
        ("", [], "length"),
    ]


def test_drafted_positions_are_streamed_on_request():
    choice_part = ChoicePart(0, [], None, None, [5, 6, 7], drafted=[0, 1])
    for options, drafted in (({}, None), ({"include_drafted": True}, [0, 1])):
        request = parse_completion(stream=True, stream_options=options)
        (chunk,) = parse_chunks(
            stream_data(request, [replace(choice_part, pieces=[TextPiece("a")])])
        )
        assert chunk["choices"][0].get("drafted") == drafted
        assert bool(parse_chunks(stream_data(request, [choice_part]))) == (drafted is not None), (
            "sent even without text"
        )


def test_failed_stream_ends_with_error_chunk():
    stream = completion_answer.CompletionStream(HEAD, parse_completion(stream=True), None)
    data = (
        stream.begin(Usage(3, 0))
        + stream.part(ChoicePart(0, [TextPiece("a")]))
        + stream.fail(429, "it broke", "queue")
    )
    *_, last = parse_chunks(data)
    assert last == {
        "error": {"message": "it broke", "type": "rate_limit_error", "param": "queue", "code": None}
    }
    client = openai.OpenAI(
        api_key="k", base_url="http://127.0.0.1/v1", http_client=Server(data).http
    )
    with pytest.raises(openai.APIError, match="it broke"):
        list(client.completions.create(model="quill", prompt="x", stream=True))


def test_suffix_uses_the_models_fill_in_the_middle_tokens(tmp_path):
    """Prompt and suffix are put between the fill-in-the-middle tokens; such tokens in the texts are
    not special.
    """
    tokenizer_model = ZOO["byte_level"]()
    names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    tokenizer_model.add_special_tokens(names)
    tokenizer = Tokenizer(save(tmp_path, tokenizer_model))
    engine: Any = SimpleNamespace(tokenizer=tokenizer, max_len=100)
    request = parse({"prompt": ["def f(", "a"], "suffix": "): pass"})
    prepared = prompting.completion(engine, request, Formats())
    texts = [
        tokenizer.decode(engine_request.tokens, skip_special_tokens=False)
        for engine_request in prepared.engine_requests
    ]
    assert [text.removeprefix(BOS) for text in texts] == [
        f"<|fim_prefix|>{prompt}<|fim_suffix|>): pass<|fim_middle|>" for prompt in ("def f(", "a")
    ]
    assert (
        prompting.completion(engine, parse({"prompt": "a", "suffix": ""}), Formats())
        .engine_requests[0]
        .text
        == "a"
    )
    with pytest.raises(RequestError, match="echo: has no place for a suffix"):
        parse({"prompt": "a", "suffix": "b", "echo": True})
