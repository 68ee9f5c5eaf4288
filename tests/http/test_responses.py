"""Responses: parsing request bodies, and response bodies and events that OpenAI's client reads."""

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
from quire.serving.api.params import RequestOptions, SamplingParams
from quire.serving.parsing.pieces import Arguments, CallStart, TextPiece
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
USAGE_BODY = {
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
MINIMAL_BODY = {"model": "quill", "input": "Hi"}
FULL_BODY = MINIMAL_BODY | {
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
SAMPLING_VALUES: dict[str, Any] = {  # a JSON value for each sampling field
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
# each other field: a value, and a check that it is applied
OTHER_FIELDS: dict[str, tuple[Any, Any]] = {
    "model": ("other", lambda request: request.model == "other"),
    "input": ("Ho", lambda request: request.messages == [{"role": "user", "content": "Ho"}]),
    "instructions": (
        "Be kind.",
        lambda request: request.messages[0] == {"role": "system", "content": ("Be kind.")},
    ),
    "max_output_tokens": (9, lambda request: request.params.max_tokens == 9),
    "top_logprobs": (3, lambda request: request.params.logprobs == 3),
    "include": ([LOGPROBS], lambda request: request.params.logprobs is not None),
    "stream": (True, lambda request: request.delivery == Delivery(stream=True)),
    "request_id": ("mine", lambda request: request.delivery.request_id == "mine"),
    "tools": ([TOOL], lambda request: bool(request.tools)),
    "tool_choice": ("none", lambda request: request.tool_choice == "none"),
    "truncation": ("auto", lambda request: request.drops_oldest),
    "parallel_tool_calls": (False, lambda request: not request.parallel_tool_calls),
    "reasoning": (
        {"effort": "low"},
        lambda request: request.template_options.get("reasoning_effort") == "low",
    ),
    "truncate_prompt_tokens": (5, lambda request: request.truncate_prompt_tokens == 5),
    "truncation_side": ("right", lambda request: request.truncation_side == "right"),
    "add_generation_prompt": (
        False,
        lambda request: not request.template_options["add_generation_prompt"],
    ),
    "continue_final_message": (
        True,
        lambda request: "continue_final_message" in request.template_options,
    ),
    "chat_template": ("{{ x }}", lambda request: "chat_template" in request.template_options),
    "chat_template_kwargs": ({"x": 1}, lambda request: request.template_options.get("x") == 1),
    "priority": (3, lambda request: request.request_options == RequestOptions(priority=3)),
    "cache_salt": ("s", lambda request: request.request_options == RequestOptions(cache_salt="s")),
    "timeout": (2.5, lambda request: request.request_options == RequestOptions(timeout=2.5)),
    "store": (False, lambda request: not request.store),
    "background": (True, lambda request: request.background),
    "enable_response_messages": (True, lambda request: request.shows_raw),
    "conversation": (
        {"id": "conv_1"},
        lambda request: request.messages[0] == {"role": "user", "content": "conv_1"},
    ),
    "previous_response_id": (
        "resp_1",
        lambda request: request.messages[0] == {"role": "user", "content": "resp_1"},
    ),
}
COMPANION_FIELDS: dict[str, dict[str, Any]] = {  # further fields that a field needs
    "top_logprobs": {"include": [LOGPROBS]},
    "truncation_side": {"truncate_prompt_tokens": 5},
}
FAILURES = [
    (500, "server_error"),
    (400, "invalid_prompt"),
    (429, "rate_limit_exceeded"),
    (503, "server_error"),
]
IGNORED_FIELDS = ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")


def parse_request(**fields) -> ResponsesRequest:
    return responses.parse(
        MINIMAL_BODY | fields, history=lambda name, field: responses.input_items(name)
    )  # the stored history is the id itself


def rejection_message(**fields) -> str:
    with pytest.raises(RequestError) as caught:
        parse_request(**fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def parsed_messages(*items: Any, **fields) -> list[dict[str, Any]]:
    return parse_request(input=list(items), **fields).messages


def stream_data(answer: Sequence[ChoicePart], body: dict[str, Any] = FULL_BODY) -> bytes:
    stream = response_answers.ResponsesStream(HEAD, responses.parse(body), body)
    data = stream.begin(Usage(30, 0))
    for choice_part in answer:
        stream.set_usage(USAGE)
        data += stream.part(choice_part)
    return data + stream.end(USAGE)


def response_body(answer: FinishedChoice, body: dict[str, Any] = FULL_BODY) -> dict[str, Any]:
    return response_answers.response(HEAD, responses.parse(body), body, [answer], USAGE)


def check_client_type(kind: Any, value: Any) -> None:
    assert unknown_client_fields(kind, value) <= {"store", "bytes", "name"}  # Quire's additions


def openai_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(api_key="k", base_url="http://localhost/v1", http_client=server.http)


def text_parts(kind: str, value: str) -> list[dict[str, Any]]:
    return [{"type": kind, "text": value}]


def test_plain_request():
    expected = ResponsesRequest(
        [{"role": "user", "content": "Hi"}],
        SamplingParams(max_tokens=None),
        "quill",
        {"add_generation_prompt": True},
    )
    assert parse_request() == expected
    assert responses.parse({"input": "Hi"}).model is None


def test_every_sampling_field_is_applied():
    assert set(SAMPLING_VALUES) | {"structured_outputs"} == set(SAMPLING_FIELDS)
    expected = SamplingParams(**SAMPLING_VALUES, max_tokens=None)
    assert parse_request(**SAMPLING_VALUES).params == expected
    for name, value in SAMPLING_VALUES.items():
        assert getattr(parse_request(**{name: value}).params, name) == getattr(expected, name)


def test_every_other_field_is_applied():
    assert set(OTHER_FIELDS) | set(IGNORED_FIELDS) | {*SAMPLING_FIELDS, "text"} == set(FIELDS)
    for name, (value, is_applied) in OTHER_FIELDS.items():
        extra = COMPANION_FIELDS.get(name, {})
        assert is_applied(parse_request(**extra, **{name: value})) and not is_applied(
            parse_request(**extra)
        ), name


def test_metadata_fields_have_no_effect():
    assert parse_request(**{name: {"any": ["thing"]} for name in IGNORED_FIELDS}) == parse_request()


def test_null_fields_equal_absent_fields():
    assert (
        parse_request(**dict.fromkeys({*FIELDS, *NEUTRAL, *REFUSED} - {"model", "input"}))
        == parse_request()
    )


def test_unimplemented_fields_are_rejected_by_name():
    for name, value in NEUTRAL.items():
        assert parse_request(**{name: value}) == parse_request()
        assert rejection_message(**{name: "x"}).startswith(f"{name}: is not implemented")
    for name in REFUSED:
        assert rejection_message(**{name: "x"}) == f"{name}: {REFUSED[name]}"
    assert (
        rejection_message(temprature=1) == "temprature: unknown field; did you mean 'temperature'?"
    )
    assert rejection_message(truncation="middle").startswith("truncation: must be auto or disabled")
    assert rejection_message(background=True, store=False).startswith(
        "background: can only be used when store is true"
    )
    assert rejection_message(background=1).startswith("background: must be true or false")
    with pytest.raises(RequestError, match="previous_response_id: goes on from what is stored"):
        responses.parse(MINIMAL_BODY | {"previous_response_id": "resp_0"})


def test_every_openai_field_is_handled():
    assert set(get_type_hints(ResponseCreateParamsStreaming)) <= {*FIELDS, *NEUTRAL, *REFUSED}


@pytest.mark.parametrize(
    ("fields", "expected"),
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
def test_text_format_becomes_structured_outputs(fields, expected):
    assert parse_request(**fields).params == SamplingParams(
        max_tokens=None, structured_outputs=expected
    )


def test_invalid_text_formats_are_rejected():
    schema = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    assert rejection_message(text={"format": schema}, structured_outputs={"regex": "a"}).startswith(
        "text.format: and structured"
    )
    assert rejection_message(text={"format": {"type": "xml"}}).startswith(
        "text.format.type: must be text or json_object or"
    )
    assert rejection_message(text={"format": {"type": "json_schema", "name": "n"}}).startswith(
        "text.format.schema: must be"
    )
    assert rejection_message(text={"format": {"type": "text", "schema": {}}}).startswith(
        "text.format.schema: unknown"
    )
    assert rejection_message(text={"verbosity": "loud"}).startswith(
        "text.verbosity: must be one of low, medium, high"
    )
    assert parse_request(text={"verbosity": "low"}).template_options["verbosity"] == "low"
    assert rejection_message(text="x").startswith("text: must be a JSON object")


def test_reasoning_effort():
    assert parse_request(reasoning={"effort": "none"}).template_options == {
        "add_generation_prompt": True, "reasoning_effort": "none", "enable_thinking": False,
    }  # fmt: skip
    request = {"reasoning": {"effort": "none"}, "chat_template_kwargs": {"enable_thinking": True}}
    assert (
        parse_request(**request).template_options["enable_thinking"] is True
    )  # the more specific option wins
    assert (
        parse_request(reasoning={"effort": None, **REASONING})
        == parse_request(reasoning={})
        == parse_request()
    )
    assert rejection_message(reasoning={"effort": "extreme"}).startswith(
        "reasoning.effort: must be one of none, minimal"
    )
    for name in REASONING:
        assert rejection_message(reasoning={name: "detailed"}).startswith(
            f"reasoning.{name}: must be"
        )


def test_logprobs_need_both_fields():
    assert parse_request(include=[LOGPROBS]).params.logprobs == 0
    assert parse_request(include=list(INCLUDED), top_logprobs=20).params.logprobs == 20
    assert (
        parse_request(include=["reasoning.encrypted_content"])
        == parse_request(top_logprobs=0)
        == parse_request()
    )
    assert rejection_message(top_logprobs=2).startswith(
        "top_logprobs: needs message.output_text.logprobs in include"
    )
    assert rejection_message(include=["file_search_call.results"]).startswith(
        "include[0]: must be message.output_text.logprobs"
    )
    assert rejection_message(include=[LOGPROBS], top_logprobs=-2).startswith(
        "top_logprobs: must be an integer"
    )


def test_tools():
    function = {"name": "look_up", "description": "Weather", "parameters": SCHEMA}
    assert parse_request(tools=[TOOL]).tools == [{"type": "function", "function": function}]
    tool_function = parse_request(
        tools=[{"type": "function", "name": "f", "parameters": None}]
    ).tools[0]["function"]
    assert tool_function == {"name": "f", "parameters": {"type": "object", "properties": {}}}
    for kind in ("web_search", "file_search", "mcp", "code_interpreter", "local_shell"):
        assert (
            rejection_message(tools=[{"type": kind}])
            == f"tools[0].type: must be function or custom, got '{kind}'"
        )
    assert rejection_message(tools=[TOOL, TOOL | {"name": "a b"}]).startswith(
        "tools[1].name: must be"
    )
    assert rejection_message(tools=[TOOL | {"defer_loading": True}]).startswith(
        "tools[0].defer_loading: unknown field"
    )
    assert rejection_message(tools=[TOOL] * 129).startswith(
        "tools: must be a list of 0 to 128, got 129"
    )


def test_tool_choice():
    for name in ("auto", "none", "required"):
        assert parse_request(tools=[TOOL], tool_choice=name).tool_choice == name
    assert (
        parse_request(tools=[TOOL], tool_choice={"type": "function", "name": "look_up"}).tool_choice
        == "function:look_up"
    )
    assert rejection_message(tool_choice="required").startswith("tool_choice: ")
    assert rejection_message(tool_choice="any", tools=[TOOL]).startswith(
        "tool_choice: must be auto, none"
    )
    unknown_function = {"type": "function", "name": "other"}
    assert rejection_message(tool_choice=unknown_function, tools=[TOOL]).startswith(
        "tool_choice.name: must be the name of one"
    )
    assert rejection_message(tool_choice={"type": "allowed_tools"}).startswith(
        "tool_choice.mode: must be auto or required"
    )
    allowed_tools = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "look_up"}],
    }
    request = parse_request(
        tool_choice=allowed_tools, tools=[{"type": "custom", "name": "x"}, TOOL]
    )
    assert request.tool_choice == "required" and [
        tool["function"]["name"] for tool in request.tools
    ] == ["look_up"]


def test_null_item_fields_equal_absent_fields():
    assert (
        parsed_messages({"type": None, "role": "user", "content": "Hi", "id": None, "phase": None})
        == parse_request().messages
    )
    reasoning_item = {
        "type": "reasoning",
        "id": "r",
        "summary": [],
        "content": None,
        "encrypted_content": None,
    }
    assert (
        parsed_messages({"role": "user", "content": "Hi"}, reasoning_item)
        == parse_request().messages
    )


def test_input_items_become_messages():
    content_parts = [*text_parts("input_text", "a"), *text_parts("input_text", "b")]
    assert parsed_messages(
        {"role": "developer", "content": "Rules."},
        {"type": "message", "role": "user", "content": content_parts, "status": "completed"},
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


def test_assistant_items_merge_into_one_message():
    def function_call(number: int) -> dict[str, Any]:
        return {
            "type": "function_call",
            "call_id": f"c{number}",
            "name": "f",
            "arguments": f'{{"n": {number}}}',
        }

    def function_output(number: int, value: Any) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": f"c{number}", "output": value}

    def tool_call(number: int) -> dict[str, Any]:
        return {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": "f", "arguments": {"n": number}},
        }

    assert parsed_messages(
        {"role": "user", "content": "Do."},
        {
            "type": "reasoning",
            "id": "r",
            "summary": text_parts("summary_text", "short"),
            "content": text_parts("reasoning_text", "Long."),
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
        function_call(0),
        {"type": "reasoning", "id": "r", "summary": []},
        function_call(1),
        {"role": "assistant", "content": " Done."},
        function_output(1, "one"),
        function_output(0, text_parts("input_text", "zero")),
        {"type": "reasoning", "summary": text_parts("summary_text", "Only this.")},
        function_call(2),
        function_output(2, ""),
    ) == [
        {"role": "user", "content": "Do."},
        {
            "role": "assistant",
            "content": "I will. Done.",
            "reasoning_content": "Long.",
            "tool_calls": [tool_call(0), tool_call(1)],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one", "name": "f"},
        {"role": "tool", "tool_call_id": "c0", "content": "zero", "name": "f"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Only this.",
            "tool_calls": [tool_call(2)],
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
            "input[0].content[0].image_url: must be a URL, got None",
        ),
        (
            {"role": "assistant", "content": [{"type": "input_image"}]},
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
def test_invalid_items_are_rejected(item, error):
    assert rejection_message(input=[item]).startswith(error)


def test_invalid_input_is_rejected():
    for value in (None, 3, {"role": "user"}):
        assert rejection_message(input=value).startswith(
            "input: must be text or a list of items, got"
        )
    assert rejection_message(input=[]).startswith("input: must be a list of 1 to 4096, got")
    assert parse_request(input=[{"role": "user", "content": "x", "nam": "y"}]).ignored == (
        "input[].nam",
    )
    assert rejection_message(instructions=["x"]).startswith("instructions: must be a string")
    assert rejection_message(max_output_tokens=0).startswith(
        "max_output_tokens: must be an integer of 1 or more, got 0"
    )
    assert rejection_message(input="\ud800").startswith("input: must be valid Unicode")


@settings(max_examples=cases(400))
@given(st.data())
def test_mutated_bodies_raise_only_request_errors(data):
    """One value of a valid body is replaced by arbitrary data."""
    items = [
        {"role": "user", "content": text_parts("input_text", "a")},
        {
            "type": "reasoning",
            "summary": text_parts("summary_text", "s"),
            "content": text_parts("reasoning_text", "t"),
        },
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": text_parts("input_text", "a"),
        },
    ]
    body = json.loads(json.dumps(FULL_BODY | {"input": items}))
    replace_random_value(data, body)
    try:
        assert isinstance(responses.parse(body), ResponsesRequest)
    except RequestError as error:
        assert "\n" not in error.message


@given(written())
def test_stream_events_open_and_close_items_in_order(answer: Written):
    """Each item is opened and closed once and in order; its deltas join to the text repeated at its
    end.
    """
    events = events_of(stream_data(answer.parts))
    for event in events:
        check_client_type(ResponseStreamEvent, event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    items = []
    text = ""
    open_item = None
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(items)
        if kind == "output_item.added":
            assert open_item is None
            open_item = event["item"]
            assert open_item["status"] == "in_progress" and not (
                open_item.get("content") or open_item.get("arguments")
            )
            text = ""
            continue
        assert open_item is not None
        if kind == "output_item.done":
            assert event["item"]["id"] == open_item["id"]
            assert event["item"].get("arguments", text) == text
            assert all(
                content_part["text"] == text for content_part in event["item"].get("content", [])
            )
            items.append(event["item"])
            open_item = None
            continue
        assert event["item_id"] == open_item["id"] and event.get("content_index", 0) == 0
        if kind.endswith(".delta"):
            assert event["delta"]
            text += event["delta"]
        elif kind == "content_part.added":
            assert event["part"]["text"] == "" == text
        else:
            assert event.get("part", event).get("text", event.get("arguments")) == text
    assert open_item is None and last["response"]["output"] == items
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
def test_last_event_equals_the_response(answer: Written):
    body = response_body(answer.answer)
    events = events_of(stream_data(answer.parts))
    check_client_type(Response, body)
    last = events[-1]["response"]
    for output in (body["output"], last["output"]) if answer.answer.calls else ():
        for item in output:  # in a stream, tokens after the text do not belong to the message
            for content_part in item.get("content", []):
                content_part.pop("logprobs", None)
    assert last == body
    is_complete = answer.answer.finish_reason in ("stop", "tool_calls")
    status = "completed" if is_complete else "incomplete"
    assert events[-1]["type"] == f"response.{status}" and body["status"] == status
    reason = {"reason": "max_output_tokens"} if answer.answer.finish_reason == "length" else None
    assert body["incomplete_details"] == reason and body["usage"] == USAGE_BODY
    statuses = [item["status"] for item in body["output"]]
    assert statuses == ["completed"] * (len(statuses) - 1) + [status] * bool(statuses)


@settings(max_examples=cases(60))
@given(written(), written(ordered=True))
def test_openai_client_accumulates_the_stream(answer: Written, ordered: Written):
    for written_answer in (answer, ordered):
        server = Server(stream_data(written_answer.parts))
        request_fields = {
            name: value for name, value in FULL_BODY.items() if name not in ("input", "model")
        }
        with openai_client(server).responses.stream(
            model="quill", input="Hi", **request_fields
        ) as stream:
            events = list(stream)
            texts = {
                event.output_index: event.snapshot for event in events if hasattr(event, "snapshot")
            }
            assert responses.parse(server.asked).delivery.stream
            last = events[-1].response
            if written_answer.answer.finish_reason in ("stop", "tool_calls"):
                assert stream.get_final_response().output_text == (
                    written_answer.answer.content or ""
                )
        expected_texts = [
            value if kind == "said" else value.arguments
            for kind, value in written_answer.blocks
            if kind != "thought"
        ]
        assert [value for value in texts.values() if value] == [
            value for value in expected_texts if value
        ]
        server = Server(msgspec.json.encode(response_body(written_answer.answer)))
        response = openai_client(server).responses.create(model="quill", input="Hi")
        assert response.output_text == last.output_text == (written_answer.answer.content or "")
        if written_answer is ordered:
            items = [json.loads(item.to_json()) for item in last.output]
            for item in items:
                item.pop("parsed_arguments", None)
                for content_part in item.get("content") or []:
                    content_part.pop("parsed", None)
            assert items == response_body(written_answer.answer)["output"]


@settings(max_examples=cases(60))
@given(written(), st.booleans())
def test_sent_back_output_becomes_the_same_messages(answer: Written, is_streaming: bool):
    server = Server(stream_data(answer.parts))
    if is_streaming:
        with openai_client(server).responses.stream(model="quill", input="Hi") as stream:
            output = list(stream)[-1].response.output
    else:
        server.data = msgspec.json.encode(response_body(answer.answer))
        output = openai_client(server).responses.create(model="quill", input="Hi").output
    conversation: list[Any] = [{"role": "user", "content": "Hi"}, *output]
    conversation += [
        {"type": "function_call_output", "call_id": call.id, "output": f"result of {call.id}"}
        for call in answer.answer.calls
    ]
    server.data = msgspec.json.encode(response_body(answer.answer))
    openai_client(server).responses.create(model="quill", input=conversation)
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
def test_logprobs_accompany_the_text(answer: Written):
    events = events_of(stream_data(answer.parts))
    all_logprobs: list[dict[str, Any]] = []
    for index, item in enumerate(events[-1]["response"]["output"]):
        item_events = [
            event for event in events if event.get("output_index") == index and "logprobs" in event
        ]
        streamed_logprobs = [entry for event in item_events[:-1] for entry in event["logprobs"]]
        assert bool(item_events) == (item["type"] == "message")
        if item_events:
            assert item_events[-1]["logprobs"] == item["content"][0]["logprobs"]
            assert item_events[-1]["logprobs"][: len(streamed_logprobs)] == streamed_logprobs
            all_logprobs += item_events[-1]["logprobs"]
    if [kind for kind, _ in answer.blocks if kind != "thought"] == ["said"] and answer.blocks[-1][
        0
    ] == "said":
        assert len(all_logprobs) == len(answer.answer.token_ids)
    for i, entry in enumerate(all_logprobs):
        assert (
            entry["token"] == (f"t{i}" if i % 3 else f"token_id:{i}") and entry["logprob"] >= -9999
        )
        assert entry["bytes"] == (list(f"t{i}".encode()) if i % 3 else [])
        assert [alternative["token"] for alternative in entry["top_logprobs"]][0] == (
            "t0" if i == 99 else "\ufffd"
        )


def test_response_repeats_request_fields():
    body = response_body(FinishedChoice(0, "Hi", "stop"))
    for name in (
        "instructions",
        "metadata",
        "max_output_tokens",
        "tools",
        "tool_choice",
        "temperature",
        "top_logprobs",
    ):
        assert body[name] == FULL_BODY[name], name
    assert body["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert body["reasoning"] == {"effort": "high", "summary": None}
    assert not body["parallel_tool_calls"] and body["store"] and body["id"] == "resp_1"
    default_body = response_body(
        FinishedChoice(0, "Hi", "stop"),
        MINIMAL_BODY | {"text": None, "reasoning": None, "tools": None, "tool_choice": None},
    )
    check_client_type(Response, default_body)
    assert (
        default_body["tools"] == []
        and default_body["tool_choice"] == "auto"
        and default_body["max_output_tokens"] is None
    )


def test_exact_events_of_a_short_stream():
    choice_parts = [
        ChoicePart(0, [TextPiece("Hi"), CallStart(0, "c", "f")]),
        ChoicePart(0, [Arguments(0, "{}")], "tool_calls"),
    ]
    events = events_of(stream_data(choice_parts, MINIMAL_BODY))
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
        response_body(
            FinishedChoice(0, None, "stop", None, [ToolCall("c", "f", "{}")]), MINIMAL_BODY
        )["output"][0]["id"]
        == "fc_0_resp_1"
    )


@given(written(), st.integers(0, 5), st.sampled_from(FAILURES))
def test_failed_stream_ends_with_response_failed(answer: Written, num_events, failure):
    status, code = failure
    stream = response_answers.ResponsesStream(HEAD, parse_request(), MINIMAL_BODY)
    data = stream.begin(Usage(3, 0)) if num_events else b""
    for choice_part in answer.parts[: max(0, num_events - 1)]:
        data += stream.part(choice_part)
    data += stream.fail(status, "it broke", "input")
    events = events_of(data)
    for event in events:
        check_client_type(ResponseStreamEvent, event)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "response.created" and kinds[-1] == "response.failed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")
    response = events[-1]["response"]
    assert response["status"] == "failed" and response["incomplete_details"] is None
    assert response["error"] == {"code": code, "message": "it broke", "param": "input"}
    with openai_client(Server(data)).responses.stream(model="quill", input="Hi") as stream_events:
        assert list(stream_events)[-1].response.error.message == "it broke"
