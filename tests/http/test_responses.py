"""OpenAI's responses: bodies to requests, answers to bodies and events, as OpenAI's own client
reads them.
"""

import json
from collections.abc import Sequence
from typing import Any, get_type_hints

import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming

from quire.serving.api.errors import RequestError
from quire.serving.api.params import SamplingParams, Terms
from quire.serving.parsing.pieces import Arguments, CallStart, Said
from quire.serving.protocol import responses
from quire.serving.protocol.answers import responses as response_answers
from quire.serving.protocol.answers.answer import (
    ChoicePart,
    Delivery,
    FinishedChoice,
    ResponseHead,
    ResponsesRequest,
    ToolCall,
    Usage,
)
from quire.serving.protocol.responses import (
    FIELDS,
    INCLUDED,
    LOGPROBS,
    NEUTRAL,
    REASONING,
    REFUSED,
    SAMPLING_FIELDS,
)
from quire.tests.support.answers import (
    Server,
    Written,
    events_of,
    replace_random_value,
    unknown_client_fields,
    written,
)
from quire.tests.support.cases import cases

HEAD = ResponseHead("resp_1", "quill", 1700000000, "quire-0")
USAGE = Usage(30, 12, 16, 5)
USED = {
    "input_tokens": 30,
    "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
    "output_tokens": 12,
    "output_tokens_details": {"reasoning_tokens": 5},
    "total_tokens": 42,
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "name": "look_up",
    "description": "Weather",
    "parameters": SCHEMA,
    "strict": True,
}
ASK = {"model": "quill", "input": "Hi"}
FULL = ASK | {
    "instructions": "Be kind.",
    "tools": [TOOL],
    "tool_choice": {"type": "function", "name": "look_up"},
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "reasoning": {"effort": "high", "summary": "auto"},
    "metadata": {"a": "b"},
    "max_output_tokens": 99,
    "include": [LOGPROBS],
    "top_logprobs": 2,
    "temperature": 0.5,
    "parallel_tool_calls": False,
}
SAMPLED: dict[str, Any] = {  # a value for each sampling field, as JSON has it
    "presence_penalty": 0.5,
    "frequency_penalty": -1,
    "repetition_penalty": 1.1,
    "temperature": 0,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "seed": 7,
    "stop": ["a"],
    "stop_token_ids": [3],
    "ignore_eos": True,
    "min_tokens": 2,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "logit_bias": {"5": -1.5},
    "allowed_token_ids": [1, 2],
    "bad_words": ["x"],
}
# each other field: a value, and what tells that it is applied
OTHERS: dict[str, tuple[Any, Any]] = {
    "model": ("other", lambda found: found.model == "other"),
    "input": ("Ho", lambda found: found.messages == [{"role": "user", "content": "Ho"}]),
    "instructions": (
        "Be kind.",
        lambda found: found.messages[0] == {"role": "system", "content": ("Be kind.")},
    ),
    "max_output_tokens": (9, lambda found: found.params.max_tokens == 9),
    "top_logprobs": (3, lambda found: found.params.logprobs == 3),
    "include": ([LOGPROBS], lambda found: found.params.logprobs is not None),
    "stream": (True, lambda found: found.delivery == Delivery(stream=True)),
    "request_id": ("mine", lambda found: found.delivery.request_id == "mine"),
    "tools": ([TOOL], lambda found: bool(found.tools)),
    "tool_choice": ("none", lambda found: found.tool_choice == "none"),
    "truncation": ("auto", lambda found: found.drops_oldest),
    "parallel_tool_calls": (False, lambda found: not found.parallel_tool_calls),
    "reasoning": (
        {"effort": "low"},
        lambda found: found.template_options.get("reasoning_effort") == "low",
    ),
    "truncate_prompt_tokens": (5, lambda found: found.truncate_prompt_tokens == 5),
    "truncation_side": ("right", lambda found: found.truncation_side == "right"),
    "add_generation_prompt": (
        False,
        lambda found: not found.template_options["add_generation_prompt"],
    ),
    "continue_final_message": (
        True,
        lambda found: "continue_final_message" in found.template_options,
    ),
    "chat_template": ("{{ x }}", lambda found: "chat_template" in found.template_options),
    "chat_template_kwargs": ({"x": 1}, lambda found: found.template_options.get("x") == 1),
    "priority": (3, lambda found: found.terms == Terms(priority=3)),
    "cache_salt": ("s", lambda found: found.terms == Terms(cache_salt="s")),
    "timeout": (2.5, lambda found: found.terms == Terms(timeout=2.5)),
    "store": (False, lambda found: not found.store),
    "background": (True, lambda found: found.background),
    "enable_response_messages": (True, lambda found: found.shows_raw),
    "conversation": (
        {"id": "conv_1"},
        lambda found: found.messages[0] == {"role": "user", "content": "conv_1"},
    ),
    "previous_response_id": (
        "resp_1",
        lambda found: found.messages[0] == {"role": "user", "content": "resp_1"},
    ),
}
NEEDS: dict[str, dict[str, Any]] = {  # what else a field asks for
    "top_logprobs": {"include": [LOGPROBS]},
    "truncation_side": {"truncate_prompt_tokens": 5},
}
FAILURES = [
    (500, "server_error"),
    (400, "invalid_prompt"),
    (429, "rate_limit_exceeded"),
    (503, "server_error"),
]
LABELS = ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")


def parse(**given) -> ResponsesRequest:
    return responses.parse(
        ASK | given, history=lambda name, field: responses.input_items(name)
    )  # what was asked before is the name


def refused(**given) -> str:
    with pytest.raises(RequestError) as caught:
        parse(**given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def messages(*items: Any, **given) -> list[dict[str, Any]]:
    return parse(input=list(items), **given).messages


def streamed(answer: Sequence[ChoicePart], asked: dict[str, Any] = FULL) -> bytes:
    stream = response_answers.ResponsesStream(HEAD, responses.parse(asked), asked)
    data = stream.begin(Usage(30, 0))
    for part in answer:
        stream.set_usage(USAGE)
        data += stream.part(part)
    return data + stream.end(USAGE)


def whole(answer: FinishedChoice, asked: dict[str, Any] = FULL) -> dict[str, Any]:
    return response_answers.response(HEAD, responses.parse(asked), asked, [answer], USAGE)


def check(kind: Any, value: Any) -> None:
    assert unknown_client_fields(kind, value) <= {"store", "bytes", "name"}  # ours


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(api_key="k", base_url="http://localhost/v1", http_client=server.http)


def text(kind: str, value: str) -> list[dict[str, Any]]:
    return [{"type": kind, "text": value}]


def test_plain_request():
    expected = ResponsesRequest(
        [{"role": "user", "content": "Hi"}],
        SamplingParams(max_tokens=None),
        "quill",
        {"add_generation_prompt": True},
    )
    assert parse() == expected
    assert responses.parse({"input": "Hi"}).model is None


def test_every_sampling_field_is_applied():
    assert set(SAMPLED) | {"structured_outputs"} == set(SAMPLING_FIELDS)
    expected = SamplingParams(**SAMPLED, max_tokens=None)
    assert parse(**SAMPLED).params == expected
    for name, value in SAMPLED.items():
        assert getattr(parse(**{name: value}).params, name) == getattr(expected, name)


def test_every_other_field_is_applied():
    assert set(OTHERS) | set(LABELS) | {*SAMPLING_FIELDS, "text"} == set(FIELDS)
    for name, (value, applied) in OTHERS.items():
        extra = NEEDS.get(name, {})
        assert applied(parse(**extra, **{name: value})) and not applied(parse(**extra)), name


def test_labels_have_no_effect():
    assert parse(**{name: {"any": ["thing"]} for name in LABELS}) == parse()


def test_null_is_as_if_not_given():
    assert parse(**dict.fromkeys({*FIELDS, *NEUTRAL, *REFUSED} - {"model", "input"})) == parse()


def test_what_is_not_implemented_is_refused_by_name():
    for name, value in NEUTRAL.items():
        assert parse(**{name: value}) == parse()
        assert refused(**{name: "x"}).startswith(f"{name}: is not implemented")
    for name in REFUSED:
        assert refused(**{name: "x"}) == f"{name}: {REFUSED[name]}"
    assert refused(temprature=1) == "temprature: unknown field; did you mean 'temperature'?"
    assert refused(truncation="middle").startswith("truncation: must be auto or disabled")
    assert refused(background=True, store=False).startswith(
        "background: can only be used when store is true"
    )
    assert refused(background=1).startswith("background: must be true or false")
    with pytest.raises(RequestError, match="previous_response_id: goes on from what is stored"):
        responses.parse(ASK | {"previous_response_id": "resp_0"})


def test_every_field_of_the_client_is_known():
    assert set(get_type_hints(ResponseCreateParamsStreaming)) <= {*FIELDS, *NEUTRAL, *REFUSED}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"text": {"format": {"type": "json_object"}}}, {"json_object": True}),
        (
            {
                "text": {
                    "format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
                }
            },
            {"json": SCHEMA},
        ),
        ({"text": {"format": {"type": "text"}}}, None),
        ({"text": {}}, None),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ],
)
def test_the_form_of_the_text_is_a_sampling_parameter(asked, expected):
    assert parse(**asked).params == SamplingParams(max_tokens=None, structured_outputs=expected)


def test_forms_that_are_refused():
    schema = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    assert refused(text={"format": schema}, structured_outputs={"regex": "a"}).startswith(
        "text.format: and structured"
    )
    assert refused(text={"format": {"type": "xml"}}).startswith(
        "text.format.type: must be text or json_object or"
    )
    assert refused(text={"format": {"type": "json_schema", "name": "n"}}).startswith(
        "text.format.schema: must be"
    )
    assert refused(text={"format": {"type": "text", "schema": {}}}).startswith(
        "text.format.schema: unknown"
    )
    assert refused(text={"verbosity": "loud"}).startswith(
        "text.verbosity: must be one of low, medium, high"
    )
    assert parse(text={"verbosity": "low"}).template_options["verbosity"] == "low"
    assert refused(text="x").startswith("text: must be a JSON object")


def test_thinking():
    assert parse(reasoning={"effort": "none"}).template_options == {
        "add_generation_prompt": True, "reasoning_effort": "none", "enable_thinking": False,
    }  # fmt: skip
    asked = {"reasoning": {"effort": "none"}, "chat_template_kwargs": {"enable_thinking": True}}
    assert parse(**asked).template_options["enable_thinking"] is True  # the more exact one
    assert parse(reasoning={"effort": None, **REASONING}) == parse(reasoning={}) == parse()
    assert refused(reasoning={"effort": "extreme"}).startswith(
        "reasoning.effort: must be one of none, minimal"
    )
    for name in REASONING:
        assert refused(reasoning={name: "detailed"}).startswith(f"reasoning.{name}: must be")


def test_logprobs_need_both_fields():
    assert parse(include=[LOGPROBS]).params.logprobs == 0
    assert parse(include=list(INCLUDED), top_logprobs=20).params.logprobs == 20
    assert parse(include=["reasoning.encrypted_content"]) == parse(top_logprobs=0) == parse()
    assert refused(top_logprobs=2).startswith(
        "top_logprobs: needs message.output_text.logprobs in include"
    )
    assert refused(include=["file_search_call.results"]).startswith(
        "include[0]: must be message.output_text.logprobs"
    )
    assert refused(include=[LOGPROBS], top_logprobs=-2).startswith(
        "top_logprobs: must be an integer"
    )


def test_tools():
    function = {"name": "look_up", "description": "Weather", "parameters": SCHEMA}
    assert parse(tools=[TOOL]).tools == [{"type": "function", "function": function}]
    bare = parse(tools=[{"type": "function", "name": "f", "parameters": None}]).tools[0]["function"]
    assert bare == {"name": "f", "parameters": {"type": "object", "properties": {}}}
    for kind in ("web_search", "file_search", "mcp", "code_interpreter", "local_shell"):
        assert (
            refused(tools=[{"type": kind}])
            == f"tools[0].type: must be function or custom, got '{kind}'"
        )
    assert refused(tools=[TOOL, TOOL | {"name": "a b"}]).startswith("tools[1].name: must be")
    assert refused(tools=[TOOL | {"defer_loading": True}]).startswith(
        "tools[0].defer_loading: unknown field"
    )
    assert refused(tools=[TOOL] * 129).startswith("tools: must be a list of 0 to 128, got 129")


def test_tool_choice():
    for name in ("auto", "none", "required"):
        assert parse(tools=[TOOL], tool_choice=name).tool_choice == name
    assert (
        parse(tools=[TOOL], tool_choice={"type": "function", "name": "look_up"}).tool_choice
        == "function:look_up"
    )
    assert refused(tool_choice="required").startswith("tool_choice: ")
    assert refused(tool_choice="any", tools=[TOOL]).startswith("tool_choice: must be auto, none")
    other = {"type": "function", "name": "other"}
    assert refused(tool_choice=other, tools=[TOOL]).startswith(
        "tool_choice.name: must be the name of one"
    )
    assert refused(tool_choice={"type": "allowed_tools"}).startswith(
        "tool_choice.mode: must be auto or required"
    )
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "look_up"}],
    }
    found = parse(tool_choice=allowed, tools=[{"type": "custom", "name": "x"}, TOOL])
    assert found.tool_choice == "required" and [
        tool["function"]["name"] for tool in found.tools
    ] == ["look_up"]


def test_null_is_as_if_not_given_within_items():
    assert (
        messages({"type": None, "role": "user", "content": "Hi", "id": None, "phase": None})
        == parse().messages
    )
    thought = {
        "type": "reasoning",
        "id": "r",
        "summary": [],
        "content": None,
        "encrypted_content": None,
    }
    assert messages({"role": "user", "content": "Hi"}, thought) == parse().messages


def test_items_are_messages():
    parts = [*text("input_text", "a"), *text("input_text", "b")]
    assert messages(
        {"role": "developer", "content": "Rules."},
        {"type": "message", "role": "user", "content": parts, "status": "completed"},
        {"role": "assistant", "content": "Hello."},
        {
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "No."}],
            "phase": "commentary",
        },
        {"role": "user", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "system", "content": "Late."},
        instructions="Be kind.",
    ) == [
        {"role": "system", "content": "Be kind.\n\nRules."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "Hello."},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "system", "content": "Late."},
    ]


def test_a_turn_of_the_assistant_is_one_message():
    def call(number: int) -> dict[str, Any]:
        return {
            "type": "function_call",
            "call_id": f"c{number}",
            "name": "f",
            "arguments": f'{{"n": {number}}}',
        }

    def output(number: int, value: Any) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": f"c{number}", "output": value}

    def made(number: int) -> dict[str, Any]:
        return {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": "f", "arguments": {"n": number}},
        }

    assert messages(
        {"role": "user", "content": "Do."},
        {
            "type": "reasoning",
            "id": "r",
            "summary": text("summary_text", "short"),
            "content": text("reasoning_text", "Long."),
        },
        {
            "type": "message",
            "id": "m",
            "status": "completed",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "I will.", "annotations": [], "logprobs": []}
            ],
        },
        call(0),
        {"type": "reasoning", "id": "r", "summary": []},
        call(1),
        {"role": "assistant", "content": " Done."},
        output(1, "one"),
        output(0, text("input_text", "zero")),
        {"type": "reasoning", "summary": text("summary_text", "Only this.")},
        call(2),
        output(2, ""),
    ) == [
        {"role": "user", "content": "Do."},
        {
            "role": "assistant",
            "content": "I will. Done.",
            "reasoning_content": "Long.",
            "tool_calls": [made(0), made(1)],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one", "name": "f"},
        {"role": "tool", "tool_call_id": "c0", "content": "zero", "name": "f"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Only this.",
            "tool_calls": [made(2)],
        },
        {"role": "tool", "tool_call_id": "c2", "content": "", "name": "f"},
    ]


@pytest.mark.parametrize(
    ("item", "error"),
    [
        (
            {"type": "item_reference", "id": "m"},
            "input[0].type: must be message or function_call or",
        ),
        ({"id": "m"}, "input[0].type: must be message"),
        ("Hi", "input[0].type: must be message"),
        (
            {"role": "tool", "content": "x"},
            "input[0].role: must be one of user, assistant, system, developer",
        ),
        ({"role": "user"}, "input[0].content: must be a string, got None"),
        (
            {"role": "user", "content": [{"type": "input_image"}]},
            "input[0].content[0].type: must be input_text or",
        ),
        (
            {"role": "user", "content": [{"type": "input_text"}]},
            "input[0].content[0].text: must be a string",
        ),
        (
            {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{"},
            "input[0].arguments: must be a JSON",
        ),
        (
            {"type": "function_call", "name": "f", "arguments": "{}"},
            "input[0].call_id: must be a string",
        ),
        (
            {"type": "function_call_output", "call_id": "c", "output": "x"},
            "input[0].call_id: must be the id of a call",
        ),
        (
            {"type": "reasoning", "encrypted_content": "x"},
            "input[0].encrypted_content: cannot be read",
        ),
        ({"type": "reasoning", "summary": "x"}, "input[0].summary: must be a list"),
        ({"type": "web_search_call"}, "input[0].type: must be message"),
    ],
)
def test_items_that_are_refused(item, error):
    assert refused(input=[item]).startswith(error)


def test_input_that_is_refused():
    for value in (None, 3, {"role": "user"}):
        assert refused(input=value).startswith("input: must be text or a list of items, got")
    assert refused(input=[]).startswith("input: must be a list of 1 to 4096, got")
    assert parse(input=[{"role": "user", "content": "x", "nam": "y"}]).ignored == ("input[].nam",)
    assert refused(instructions=["x"]).startswith("instructions: must be a string")
    assert refused(max_output_tokens=0).startswith(
        "max_output_tokens: must be an integer of 1 or more, got 0"
    )
    assert refused(input="\ud800").startswith("input: must be valid Unicode")


@settings(max_examples=cases(400))
@given(st.data())
def test_no_body_raises_anything_else(data):
    """One place of a good body replaced by anything."""
    items = [
        {"role": "user", "content": text("input_text", "a")},
        {
            "type": "reasoning",
            "summary": text("summary_text", "s"),
            "content": text("reasoning_text", "t"),
        },
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": text("input_text", "a")},
    ]
    body = json.loads(json.dumps(FULL | {"input": items}))
    replace_random_value(data, body)
    try:
        assert isinstance(responses.parse(body), ResponsesRequest)
    except RequestError as error:
        assert "\n" not in error.message


@given(written())
def test_events_are_what_the_client_expects(answer: Written):
    """Each item is opened and closed once and in order, its text told in between and once more at
    its end.
    """
    events = events_of(streamed(answer.parts))
    for event in events:
        check(ResponseStreamEvent, event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    items = []
    text = ""
    part = None
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(items)
        if kind == "output_item.added":
            assert part is None
            part = event["item"]
            assert part["status"] == "in_progress" and not (
                part.get("content") or part.get("arguments")
            )
            text = ""
            continue
        assert part is not None
        if kind == "output_item.done":
            assert event["item"]["id"] == part["id"]
            assert event["item"].get("arguments", text) == text
            assert all(inner["text"] == text for inner in event["item"].get("content", []))
            items.append(event["item"])
            part = None
            continue
        assert event["item_id"] == part["id"] and event.get("content_index", 0) == 0
        if kind.endswith(".delta"):
            assert event["delta"]
            text += event["delta"]
        elif kind == "content_part.added":
            assert event["part"]["text"] == "" == text
        else:
            assert event.get("part", event).get("text", event.get("arguments")) == text
    assert part is None and last["response"]["output"] == items
    expected = {"said": "message", "thought": "reasoning", "call": "function_call"}
    assert [item["type"] for item in items] == [expected[kind] for kind, _ in answer.blocks]
    for item, (kind, value) in zip(items, answer.blocks, strict=True):
        if kind == "call":
            assert (item["call_id"], item["name"], item["arguments"]) == (
                value.id,
                value.name,
                value.arguments,
            )
        else:
            assert item["content"][0]["text"] == value
    assert len({item["id"] for item in items}) == len(items)


@given(written(ordered=True, scored=True))
def test_an_answer_whole_is_what_its_events_come_to(answer: Written):
    found = whole(answer.answer)
    events = events_of(streamed(answer.parts))
    check(Response, found)
    last = events[-1]["response"]
    for output in (found["output"], last["output"]) if answer.answer.calls else ():
        for item in output:  # in a stream, tokens after the text are not the message's
            for part in item.get("content", []):
                part.pop("logprobs", None)
    assert last == found
    ended = answer.answer.finish_reason in ("stop", "tool_calls")
    status = "completed" if ended else "incomplete"
    assert events[-1]["type"] == f"response.{status}" and found["status"] == status
    reason = {"reason": "max_output_tokens"} if answer.answer.finish_reason == "length" else None
    assert found["incomplete_details"] == reason and found["usage"] == USED
    statuses = [item["status"] for item in found["output"]]
    assert statuses == ["completed"] * (len(statuses) - 1) + [status] * bool(statuses)


@settings(max_examples=cases(60))
@given(written(), written(ordered=True))
def test_the_client_puts_a_stream_together(answer: Written, ordered: Written):
    for one in (answer, ordered):
        server = Server(streamed(one.parts))
        asked = {name: value for name, value in FULL.items() if name not in ("input", "model")}
        with client(server).responses.stream(model="quill", input="Hi", **asked) as stream:
            events = list(stream)
            texts = {
                event.output_index: event.snapshot for event in events if hasattr(event, "snapshot")
            }
            assert responses.parse(server.asked).delivery.stream
            last = events[-1].response
            if one.answer.finish_reason in ("stop", "tool_calls"):
                assert stream.get_final_response().output_text == (one.answer.content or "")
        said = [
            value if kind == "said" else value.arguments
            for kind, value in one.blocks
            if kind != "thought"
        ]
        assert [value for value in texts.values() if value] == [value for value in said if value]
        server = Server(msgspec.json.encode(whole(one.answer)))
        found = client(server).responses.create(model="quill", input="Hi")
        assert found.output_text == last.output_text == (one.answer.content or "")
        if one is ordered:
            plain = [json.loads(item.to_json()) for item in last.output]
            for item in plain:
                item.pop("parsed_arguments", None)
                for part in item.get("content") or []:
                    part.pop("parsed", None)
            assert plain == whole(one.answer)["output"]


@settings(max_examples=cases(60))
@given(written(), st.booleans())
def test_what_a_client_sends_back_is_what_was_said(answer: Written, streams: bool):
    server = Server(streamed(answer.parts))
    if streams:
        with client(server).responses.stream(model="quill", input="Hi") as stream:
            output = list(stream)[-1].response.output
    else:
        server.data = msgspec.json.encode(whole(answer.answer))
        output = client(server).responses.create(model="quill", input="Hi").output
    back: list[Any] = [{"role": "user", "content": "Hi"}, *output]
    back += [
        {"type": "function_call_output", "call_id": call.id, "output": f"result of {call.id}"}
        for call in answer.answer.calls
    ]
    server.data = msgspec.json.encode(whole(answer.answer))
    client(server).responses.create(model="quill", input=back)
    expected: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    if answer.blocks:
        expected.append({"role": "assistant", "content": answer.answer.content or ""})
        if answer.answer.reasoning:
            expected[-1]["reasoning_content"] = answer.answer.reasoning
        if answer.answer.calls:
            expected[-1]["tool_calls"] = [
                {"id": call.id, "type": "function",
                 "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
                for call in answer.answer.calls
            ]  # fmt: skip
    for call in answer.answer.calls:
        name = {"tool_call_id": call.id, "content": f"result of {call.id}", "name": call.name}
        expected.append({"role": "tool", **name})
    assert responses.parse(server.asked).messages == expected


@given(written(calls=False, scored=True))
def test_log_probabilities_stand_with_the_text(answer: Written):
    events = events_of(streamed(answer.parts))
    done: list[dict[str, Any]] = []
    for index, item in enumerate(events[-1]["response"]["output"]):
        here = [
            event for event in events if event.get("output_index") == index and "logprobs" in event
        ]
        told = [entry for event in here[:-1] for entry in event["logprobs"]]
        assert bool(here) == (item["type"] == "message")
        if here:
            assert here[-1]["logprobs"] == item["content"][0]["logprobs"]
            assert here[-1]["logprobs"][: len(told)] == told
            done += here[-1]["logprobs"]
    if [kind for kind, _ in answer.blocks if kind != "thought"] == ["said"] and answer.blocks[-1][
        0
    ] == "said":
        assert len(done) == len(answer.answer.token_ids)
    for i, entry in enumerate(done):
        assert (
            entry["token"] == (f"t{i}" if i % 3 else f"token_id:{i}") and entry["logprob"] >= -9999
        )
        assert entry["bytes"] == (list(f"t{i}".encode()) if i % 3 else [])
        assert [best["token"] for best in entry["top_logprobs"]][0] == (
            "t0" if i == 99 else "\ufffd"
        )


def test_a_response_says_again_what_was_asked():
    found = whole(FinishedChoice(0, "Hi", "stop"))
    for name in (
        "instructions",
        "metadata",
        "max_output_tokens",
        "tools",
        "tool_choice",
        "temperature",
        "top_logprobs",
    ):
        assert found[name] == FULL[name], name
    assert found["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert found["reasoning"] == {"effort": "high", "summary": None}
    assert not found["parallel_tool_calls"] and found["store"] and found["id"] == "resp_1"
    plain = whole(
        FinishedChoice(0, "Hi", "stop"),
        ASK | {"text": None, "reasoning": None, "tools": None, "tool_choice": None},
    )
    check(Response, plain)
    assert (
        plain["tools"] == []
        and plain["tool_choice"] == "auto"
        and plain["max_output_tokens"] is None
    )


def test_the_events_of_a_short_answer_in_full():
    parts = [
        ChoicePart(0, [Said("Hi"), CallStart(0, "c", "f")]),
        ChoicePart(0, [Arguments(0, "{}")], "tool_calls"),
    ]
    events = events_of(streamed(parts, ASK))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert events[-1]["response"]["output"][1] == {
        "type": "function_call",
        "id": "fc_1_resp_1",
        "status": "completed",
        "call_id": "c",
        "name": "f",
        "arguments": "{}",
    }
    assert (
        whole(FinishedChoice(0, None, "stop", None, [ToolCall("c", "f", "{}")]), ASK)["output"][0][
            "id"
        ]
        == "fc_0_resp_1"
    )


@given(written(), st.integers(0, 5), st.sampled_from(FAILURES))
def test_a_stream_that_fails_says_so_and_ends(answer: Written, when, end):
    status, code = end
    stream = response_answers.ResponsesStream(HEAD, parse(), ASK)
    data = stream.begin(Usage(3, 0)) if when else b""
    for part in answer.parts[: max(0, when - 1)]:
        data += stream.part(part)
    data += stream.fail(status, "it broke", "input")
    events = events_of(data)
    for event in events:
        check(ResponseStreamEvent, event)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "response.created" and kinds[-1] == "response.failed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")
    found = events[-1]["response"]
    assert found["status"] == "failed" and found["incomplete_details"] is None
    assert found["error"] == {"code": code, "message": "it broke", "param": "input"}
    with client(Server(data)).responses.stream(model="quill", input="Hi") as opened:
        assert list(opened)[-1].response.error.message == "it broke"
