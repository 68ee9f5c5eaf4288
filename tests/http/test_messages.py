"""Anthropic messages: parsing request bodies, and response bodies and events that Anthropic's
client reads.
"""

import json
from collections.abc import Sequence
from typing import Any, get_type_hints

import anthropic
import msgspec
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsStreaming
from anthropic.types.shared import ErrorResponse
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.serving.api.errors import RequestError
from quire.serving.api.params import RequestOptions, SamplingParams
from quire.serving.parsing.pieces import Arguments, CallStart, ReasoningPiece, TextPiece
from quire.serving.protocol import messages
from quire.serving.protocol.answers import messages as message_answers
from quire.serving.protocol.answers.answer import (
    ChatRequest,
    ChoicePart,
    Delivery,
    FinishedChoice,
    ResponseHead,
    ToolCall,
    Usage,
)
from quire.serving.protocol.context import (
    THOUGHTS,
    TOOLS,
    ClearThoughts,
    drop_oldest_turns,
    edit_messages,
)
from quire.serving.protocol.messages import (
    COUNT_FIELDS,
    FIELDS,
    LABELS,
    NEUTRAL,
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

HEAD = ResponseHead("msg_1", "quill", 1700000000, "quire-0")
USAGE = Usage(30, 12, 16, 5, stored_tokens=8)
USAGE_BODY = {
    "input_tokens": 6,
    "cache_creation_input_tokens": 8,
    "cache_read_input_tokens": 16,
    "output_tokens": 12,
    "output_tokens_details": {"thinking_tokens": 5},
}
HI_MESSAGES = [{"role": "user", "content": "Hi"}]
MINIMAL_BODY = {"model": "quill", "max_tokens": 50, "messages": HI_MESSAGES}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "look_up", "description": "Weather", "input_schema": SCHEMA}
CACHE_CONTROL = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SAMPLING_VALUES: dict[str, Any] = {  # a JSON value for each sampling field
    "presence_penalty": 0.5,
    "frequency_penalty": -1,
    "repetition_penalty": 1.1,
    "temperature": 0,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "seed": 7,
    "stop_token_ids": [3],
    "ignore_eos": True,
    "max_tokens": 9,
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
    "messages": (
        [{"role": "user", "content": "Ho"}],
        lambda request: request.messages[0]["content"] == "Ho",
    ),
    "system": (
        "Be kind.",
        lambda request: request.messages[0] == {"role": "system", "content": ("Be kind.")},
    ),
    "tools": ([TOOL], lambda request: bool(request.tools)),
    "tool_choice": ({"type": "none"}, lambda request: request.tool_choice == "none"),
    "thinking": (
        {"type": "disabled"},
        lambda request: request.template_options.get("enable_thinking") is False,
    ),
    "output_config": (
        {"effort": "low"},
        lambda request: request.template_options.get("reasoning_effort") == "low",
    ),
    "stop_sequences": (["END"], lambda request: request.params.stop == ("END",)),
    "stream": (True, lambda request: request.delivery == Delivery(stream=True)),
    "request_id": ("mine", lambda request: request.delivery.request_id == "mine"),
    "truncate_prompt_tokens": (5, lambda request: request.truncate_prompt_tokens == 5),
    "truncation_side": ("right", lambda request: request.truncation_side == "right"),
    "add_generation_prompt": (
        False,
        lambda request: not request.template_options["add_generation_prompt"],
    ),
    "context_management": (
        {"edits": [{"type": THOUGHTS}]},
        lambda request: request.edits == (ClearThoughts(),),
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
}


def parse_request(**fields) -> ChatRequest:
    return messages.parse(MINIMAL_BODY | fields)


def rejection_message(parse_body=parse_request, **fields) -> str:
    with pytest.raises(RequestError) as caught:
        parse_body(**fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def parsed_messages(*turns: Any, **fields) -> list[dict[str, Any]]:
    return parse_request(messages=list(turns), **fields).messages


def user_turn(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant_turn(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def text_block(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def tool_use_block(number: int) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"t{number}", "name": "f", "input": {"n": number}}


def tool_result_block(number: int, content: Any, **fields) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"t{number}", "content": content, **fields}


def stream_data(answer: Sequence[ChoicePart]) -> bytes:
    stream = message_answers.MessagesStream(HEAD, parse_request(), MINIMAL_BODY)
    data = stream.begin(Usage(30, 0, 0))
    for choice_part in answer:
        stream.set_usage(USAGE)
        data += stream.part(choice_part)
    return data + stream.end(USAGE)


def response_body(answer: FinishedChoice) -> dict[str, Any]:
    return message_answers.response(HEAD, parse_request(), MINIMAL_BODY, [answer], USAGE)


def check_client_type(kind: Any, value: Any) -> None:
    assert unknown_client_fields(kind, value) <= set()


def anthropic_client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        api_key="k", base_url="http://localhost", http_client=server.http, max_retries=0
    )


def accumulate_stream(data: bytes) -> Any:
    """The message that the client's own accumulator builds from the events."""
    with anthropic_client(Server(data)).messages.stream(**MINIMAL_BODY) as stream:
        return stream.get_final_message()


def read_response(body: dict[str, Any]) -> Any:
    return anthropic_client(Server(msgspec.json.encode(body))).messages.create(**MINIMAL_BODY)


def test_plain_request():
    expected = ChatRequest(
        HI_MESSAGES, SamplingParams(max_tokens=50), "quill", {"add_generation_prompt": True}
    )
    assert parse_request() == expected


def test_every_sampling_field_is_applied():
    assert set(SAMPLING_VALUES) | {"structured_outputs"} == set(SAMPLING_FIELDS)
    expected = SamplingParams(**SAMPLING_VALUES)
    assert parse_request(**SAMPLING_VALUES).params == expected
    for name, value in SAMPLING_VALUES.items():
        assert getattr(parse_request(**{name: value}).params, name) == getattr(expected, name)


def test_every_other_field_is_applied():
    assert set(OTHER_FIELDS) | set(LABELS) | set(SAMPLING_FIELDS) == set(FIELDS)
    for name, (value, is_applied) in OTHER_FIELDS.items():
        extra = {"truncate_prompt_tokens": 5} if name == "truncation_side" else {}
        assert is_applied(parse_request(**extra, **{name: value})) and not is_applied(
            parse_request(**extra)
        ), name


def test_metadata_fields_have_no_effect():
    assert parse_request(**{name: {"any": ["thing"]} for name in LABELS}) == parse_request()


def test_null_fields_equal_absent_fields():
    field_names = {*FIELDS, *NEUTRAL, *REFUSED} - set(MINIMAL_BODY)
    assert parse_request(**dict.fromkeys(field_names)) == parse_request()


def test_unimplemented_fields_are_rejected_by_name():
    for name, value in NEUTRAL.items():
        assert parse_request(**{name: value}) == parse_request()
        assert rejection_message(**{name: "x"}).startswith(f"{name}: is not implemented")
    for name in REFUSED:
        assert rejection_message(**{name: "x"}) == f"{name}: {REFUSED[name]}"
    assert (
        rejection_message(temprature=1) == "temprature: unknown field; did you mean 'temperature'?"
    )
    assert rejection_message(max_tokens=None).startswith(
        "max_tokens: must be an integer of 1 or more, got None"
    )
    assert rejection_message(max_tokens=0).startswith("max_tokens: ")
    assert rejection_message(stop_sequences=["a", ""]).startswith(
        "stop_sequences[1]: must be a string of 1 to"
    )


def test_every_anthropic_field_is_handled():
    field_names = {*FIELDS, *NEUTRAL, *REFUSED}
    assert set(get_type_hints(MessageCreateParamsStreaming)) <= field_names
    assert set(get_type_hints(MessageCountTokensParams)) <= {*COUNT_FIELDS, *NEUTRAL}


def test_count_tokens_uses_the_same_prompt():
    fields = {
        "messages": [user_turn(text_block("a")), assistant_turn(text_block("b"))],
        "system": "Be kind.",
        "tools": [TOOL],
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "output_config": {"effort": "high"},
    }
    count_request = messages.parse_count(fields)
    request = parse_request(**fields)
    assert (count_request.messages, count_request.tools, count_request.template_options) == (
        request.messages, request.tools, request.template_options,
    )  # fmt: skip
    assert rejection_message(
        lambda **fields: messages.parse_count(fields), messages=HI_MESSAGES, max_tokens=3
    ).startswith("max_tokens: unk")
    check_client_type(MessageTokensCount, {"input_tokens": 3})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        ({"output_config": {}}, None),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ],
)
def test_output_format_becomes_structured_outputs(fields, expected):
    assert parse_request(**fields).params == SamplingParams(
        max_tokens=50, structured_outputs=expected
    )


def test_invalid_output_config_is_rejected():
    json_schema = {"type": "json_schema", "schema": SCHEMA}
    error = rejection_message(
        output_config={"format": json_schema}, structured_outputs={"regex": "a"}
    )
    assert error.startswith("output_config.format: and structured_outputs")
    assert rejection_message(output_config={"format": {"type": "xml"}}).startswith(
        "output_config.format.type: must be json_sch"
    )
    assert rejection_message(output_config={"format": {"type": "json_schema"}}).startswith(
        "output_config.format.schema: must"
    )
    assert rejection_message(output_config={"effort": "extreme"}).startswith(
        "output_config.effort: must be one of low, medium"
    )
    assert rejection_message(output_config={"style": 1}).startswith(
        "output_config.style: unknown field"
    )
    assert rejection_message(output_config=3).startswith("output_config: must be a JSON object")


def test_thinking():
    def template_options(**thinking) -> dict[str, Any]:
        return parse_request(thinking=thinking).template_options

    default_options = {"add_generation_prompt": True}
    assert template_options(type="enabled", budget_tokens=1024) == default_options | {
        "enable_thinking": True,
        "thinking_budget": 1024,
    }
    assert template_options(type="enabled", display="summarized") == default_options | {
        "enable_thinking": True
    }
    assert template_options(type="disabled") == default_options | {"enable_thinking": False}
    assert template_options(type="adaptive") == default_options
    kwargs = {"enable_thinking": False}  # the more specific option wins
    assert (
        parse_request(thinking={"type": "enabled"}, chat_template_kwargs=kwargs).template_options
        == default_options | kwargs
    )
    assert rejection_message(thinking={"type": "between_tools"}).startswith(
        "thinking.type: must be enabled or adaptive or dis"
    )
    assert rejection_message(thinking={"type": "enabled", "budget_tokens": 0}).startswith(
        "thinking.budget_tokens: must be an"
    )
    assert rejection_message(thinking={"type": "adaptive", "budget_tokens": 9}).startswith(
        "thinking.budget_tokens: unknown"
    )
    assert rejection_message(thinking={"type": "enabled", "display": "omitted"}).startswith(
        "thinking.display: must be 'summ"
    )


def test_tools():
    function = {"name": "look_up", "description": "Weather", "parameters": SCHEMA}
    ignored_fields = {
        "type": "custom",
        "strict": True,
        "eager_input_streaming": True,
        **CACHE_CONTROL,
    }
    for tool in (TOOL, TOOL | ignored_fields):
        assert parse_request(tools=[tool]).tools == [{"type": "function", "function": function}]
    assert parse_request(
        tools=[TOOL | {"type": None, "strict": None, "input_examples": None}]
    ) == parse_request(tools=[TOOL])
    for kind in ("bash_20250124", "web_search_20250305", "text_editor_20250728", "mcp_toolset"):
        assert rejection_message(tools=[TOOL, {"type": kind, "name": "x"}]).startswith(
            "tools[1].type: must be 'custom' or null"
        )
    assert rejection_message(tools=[TOOL | {"name": "a b"}]).startswith("tools[0].name: must be")
    assert rejection_message(tools=[TOOL | {"input_schema": None}]).startswith(
        "tools[0].input_schema: must be a JSON object"
    )
    assert rejection_message(tools=[TOOL | {"defer_loading": True}]).startswith(
        "tools[0].defer_loading: unknown field"
    )
    assert rejection_message(tools=["x"]).startswith("tools[0]: must be a JSON object")
    assert rejection_message(tools=TOOL).startswith("tools: must be a list")


def test_tool_choice():
    def parse_tool_choice(**choice) -> tuple[str, bool]:
        request = parse_request(tools=[TOOL], tool_choice=choice)
        return request.tool_choice, request.parallel_tool_calls

    assert parse_tool_choice(type="auto") == ("auto", True)
    assert parse_tool_choice(type="none") == ("none", True)
    assert parse_tool_choice(type="any", disable_parallel_tool_use=True) == ("required", False)
    assert parse_tool_choice(type="tool", name="look_up", disable_parallel_tool_use=False) == (
        "function:look_up",
        True,
    )
    assert rejection_message(tools=[TOOL], tool_choice={"type": "tool", "name": "x"}).startswith(
        "tool_choice.name: must be the"
    )
    assert rejection_message(tools=[TOOL], tool_choice={"type": "tool"}).startswith(
        "tool_choice.name: must be the"
    )
    assert rejection_message(tool_choice={"type": "any"}).startswith(
        "tool_choice.type: is 'any' and tools are missing"
    )
    assert rejection_message(tool_choice={"type": "required"}).startswith(
        "tool_choice.type: must be auto or any or tool or none"
    )
    assert rejection_message(tool_choice={"type": "auto", "name": "x"}).startswith(
        "tool_choice.name: unknown field"
    )


def test_content_blocks_become_messages():
    thinking = {"type": "thinking", "thinking": "Long.", "signature": "s"}

    def tool_call(number: int) -> dict[str, Any]:
        return {
            "id": f"t{number}",
            "type": "function",
            "function": {"name": "f", "arguments": {"n": number}},
        }

    assert parsed_messages(
        {"role": "system", "content": [text_block("Rules.")]},
        user_turn(text_block("a") | CACHE_CONTROL, text_block("b")),
        user_turn(text_block("c")),
        assistant_turn(
            thinking,
            text_block("I will.") | {"citations": None},
            tool_use_block(0) | {"caller": {"type": "direct"}},
            tool_use_block(1),
        ),
        user_turn(
            tool_result_block(1, "one", is_error=True),
            tool_result_block(0, [text_block("zero"), text_block("0")], is_error=False),
        ),
        user_turn(text_block("Go on."), text_block("!")),
        assistant_turn(tool_use_block(2)),
        user_turn({"type": "tool_result", "tool_use_id": "t2"}),
        assistant_turn(text_block("So"), text_block(" be it.")),
        {"role": "assistant", "content": " Amen."},
        {"role": "user", "content": "d"},
        assistant_turn(),
        {"role": "system", "content": "Late."},
        system=[text_block("Be kind.") | CACHE_CONTROL, text_block("Be brief.")],
    ) == [
        {"role": "system", "content": "Be kind.\nBe brief.\n\nRules."},
        {"role": "user", "content": "a\nb\nc"},
        {
            "role": "assistant",
            "content": "I will.",
            "reasoning_content": "Long.",
            "tool_calls": [tool_call(0), tool_call(1)],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "Error: one", "name": "f"},
        {"role": "tool", "tool_call_id": "t0", "content": "zero\n0", "name": "f"},
        {"role": "user", "content": "Go on.\n!"},
        {"role": "assistant", "content": "", "tool_calls": [tool_call(2)]},
        {"role": "tool", "tool_call_id": "t2", "content": "", "name": "f"},
        {"role": "assistant", "content": "So be it. Amen."},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": ""},
        {"role": "system", "content": "Late."},
    ]


def test_final_assistant_message_is_continued():
    conversation = [*HI_MESSAGES, assistant_turn(text_block("Once"))]
    continue_options = {"add_generation_prompt": False, "continue_final_message": True}
    new_turn_options = {"add_generation_prompt": True}
    assert parse_request(messages=conversation).template_options == continue_options
    # no text to continue
    assert (
        parse_request(messages=[*HI_MESSAGES, assistant_turn(text_block(" "))]).template_options
        == new_turn_options
    )
    assert (
        parse_request(messages=conversation, add_generation_prompt=True).template_options
        == new_turn_options
    )
    assert (
        parse_request(messages=conversation, continue_final_message=False).template_options
        == new_turn_options
    )
    assert rejection_message(messages=[*HI_MESSAGES, assistant_turn(tool_use_block(1))]).startswith(
        "messages[1].content: has a tool_use and no tool_re"
    )
    assert parse_request(messages=[{"role": "user", "content": "x", "name": "y"}]).ignored == (
        "messages[].name",
    )


@pytest.mark.parametrize(
    ("turn", "error"),
    [
        ("Hi", "messages[1]: must be a JSON object"),
        (
            {"role": "tool", "content": "x"},
            "messages[1].role: must be one of user, assistant, system",
        ),
        ({"role": "user"}, "messages[1].content: must be a string, got None"),
        (user_turn(), "messages[1].content: must be a list of 1 to"),
        (
            user_turn({"type": "image", "source": {}}),
            "messages[1].content[0].source.type: must be base64 or url",
        ),
        (
            user_turn(text_block("a"), {"type": "document"}),
            "messages[1].content[1].type: must be text or tool_result or image",
        ),
        (
            user_turn(tool_use_block(1)),
            "messages[1].content[0].type: must be text or tool_result or image, got 'tool_use'",
        ),
        (user_turn({"type": "text"}), "messages[1].content[0].text: must be a string"),
        (
            user_turn(tool_result_block(1, "x")),
            ("messages[1].content[0].tool_use_id: must be the id of a call that stands before it"),
        ),
        (
            user_turn(tool_result_block(1, [{"type": "image"}])),
            "messages[1].content[0].content[0].source.type: must be base64 or url",
        ),
        (
            user_turn(tool_result_block(1, "x", is_error=1)),
            "messages[1].content[0].is_error: must be true or false",
        ),
        (
            assistant_turn(tool_result_block(1, "x")),
            "messages[1].content[0].type: must be text or thinking or tool_use",
        ),
        (
            assistant_turn({"type": "redacted_thinking", "data": "x"}),
            "messages[1].content[0].type: must be text or",
        ),
        (
            assistant_turn({"type": "server_tool_use"}),
            "messages[1].content[0].type: must be text or",
        ),
        (
            assistant_turn(tool_use_block(1) | {"input": "{}"}),
            "messages[1].content[0].input: must be a JSON object",
        ),
        (
            assistant_turn(tool_use_block(1) | {"id": None}),
            "messages[1].content[0].id: must be a string",
        ),
        (
            {"role": "system", "content": [{"type": "image"}]},
            "messages[1].content[0].type: must be text",
        ),
    ],
)
def test_invalid_turns_are_rejected(turn, error):
    assert rejection_message(messages=[*HI_MESSAGES, turn]).startswith(error)


def test_invalid_messages_are_rejected():
    for value in (None, [], 3, {"role": "user"}):
        assert rejection_message(messages=value).startswith(
            "messages: must be a list of 1 to 4096, got"
        )
    assert rejection_message(system={"type": "text"}).startswith("system: must be a string")
    assert rejection_message(system=[{"type": "image"}]).startswith("system[0].type: must be text")


@settings(max_examples=cases(400))
@given(st.data())
def test_mutated_bodies_raise_only_request_errors(data):
    """One value of a valid body is replaced by arbitrary data."""
    valid_body = MINIMAL_BODY | {
        "messages": [
            user_turn(text_block("a")),
            assistant_turn(text_block("b"), tool_use_block(1)),
            user_turn(tool_result_block(1, [text_block("c")])),
        ],
        "system": [text_block("s")],
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "look_up"},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "output_config": {"effort": "low"},
        "stop_sequences": ["a"],
    }
    body = json.loads(json.dumps(valid_body))
    replace_random_value(data, body)
    try:
        assert isinstance(messages.parse(body), ChatRequest)
    except RequestError as error:
        assert "\n" not in error.message


@given(written())
def test_stream_events_open_and_close_blocks_in_order(answer: Written):
    """Each block is opened and closed once and in order; its deltas join to its text."""
    events = events_of(stream_data(answer.parts))
    for event in events:
        check_client_type(RawMessageStreamEvent, event)
    assert events[0]["type"] == "message_start" and events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] == 30
    assert events[0]["message"]["stop_reason"] is None
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["usage"] == USAGE_BODY
    blocks: list[tuple[str, Any]] = []
    open_block = None
    block_text = ""
    for event in events[1:-2]:
        assert event["index"] == len(blocks)
        if event["type"] == "content_block_start":
            assert open_block is None
            open_block = event["content_block"]
            block_text = ""
            continue
        assert open_block is not None
        if event["type"] == "content_block_delta":
            kind = event["delta"].pop("type")
            value = event["delta"].popitem()[1]
            assert value and kind == {
                "text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta",
            }[open_block["type"]]  # fmt: skip
            block_text += value
            continue
        assert event["type"] == "content_block_stop"
        if open_block["type"] == "tool_use":
            assert open_block["input"] == {}
            blocks.append(("call", ToolCall(open_block["id"], open_block["name"], block_text)))
        else:
            blocks.append(("said" if open_block["type"] == "text" else "thought", block_text))
        open_block = None
    assert open_block is None and blocks == answer.blocks


@settings(max_examples=cases(80))
@given(written(), written(ordered=True))
def test_anthropic_client_accumulates_the_stream(answer: Written, ordered: Written):
    for written_answer in (answer, ordered):
        streamed_message = accumulate_stream(stream_data(written_answer.parts))
        body = response_body(written_answer.answer)
        check_client_type(Message, body)
        blocks: list[tuple[str, Any]] = []
        for block in streamed_message.content:
            if block.type == "tool_use":
                blocks.append(("call", (block.id, block.name, block.input)))
            else:
                blocks.append(
                    ("said", block.text) if block.type == "text" else ("thought", block.thinking)
                )
        assert blocks == [
            (kind, (value.id, value.name, json.loads(value.arguments)) if kind == "call" else value)
            for kind, value in written_answer.blocks
        ]
        message = read_response(body)
        assert (streamed_message.stop_reason, streamed_message.stop_sequence) == (
            message.stop_reason,
            message.stop_sequence,
        )
        assert streamed_message.usage.to_dict() == message.usage.to_dict() == USAGE_BODY
        if written_answer is ordered:
            assert (
                streamed_message.to_dict() == message.to_dict() | {"stop_details": None}
                and message.to_dict() == body
            )


@settings(max_examples=cases(80))
@given(written(), st.booleans())
def test_sent_back_message_becomes_the_same_messages(answer: Written, is_streaming: bool):
    message = (
        accumulate_stream(stream_data(answer.parts))
        if is_streaming
        else read_response(response_body(answer.answer))
    )
    results = [
        tool_result_block(0, f"result of {call.id}") | {"tool_use_id": call.id}
        for call in answer.answer.calls
    ]
    server = Server(msgspec.json.encode(response_body(answer.answer)))
    conversation = [
        *HI_MESSAGES,
        {"role": "assistant", "content": message.content},
        *([user_turn(*results)] if results else []),
    ]
    anthropic_client(server).messages.create(model="quill", max_tokens=9, messages=conversation)
    expected: dict[str, Any] = {"role": "assistant", "content": answer.answer.content or ""}
    if answer.answer.reasoning:
        expected["reasoning_content"] = answer.answer.reasoning
    if answer.answer.calls:
        expected["tool_calls"] = [
            {"id": call.id, "type": "function",
             "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
            for call in answer.answer.calls
        ]  # fmt: skip
    tool_messages = [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": f"result of {call.id}",
            "name": call.name,
        }
        for call in answer.answer.calls
    ]
    assert messages.parse(server.asked).messages == [*HI_MESSAGES, expected, *tool_messages]


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", 7, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
        ("tool_calls", "END", ("tool_use", None)),
        ("timeout", None, ("pause_turn", None)),
        ("abort", None, ("pause_turn", None)),
    ],
)
def test_stop_reasons(finish_reason, stop_reason, expected):
    body = response_body(FinishedChoice(0, "Hi", finish_reason, stop_reason=stop_reason))
    assert (body["stop_reason"], body["stop_sequence"]) == expected
    delta = events_of(stream_data([ChoicePart(0, [TextPiece("Hi")], finish_reason, stop_reason)]))[
        -2
    ]["delta"]
    assert delta == {"stop_reason": expected[0], "stop_sequence": expected[1]}


def test_truncated_tool_arguments_become_empty_input():
    for arguments in ("", '{"a": 1', "[1]", "x"):
        body = response_body(
            FinishedChoice(0, None, "length", None, [ToolCall("c", "f", arguments)])
        )
        assert body["content"] == [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]
        check_client_type(Message, body)


def test_exact_events_of_a_short_stream():
    pieces = [
        ReasoningPiece("Hm"),
        TextPiece("Hi"),
        TextPiece(""),
        CallStart(0, "c", "f"),
        Arguments(0, "{}"),
    ]
    assert events_of(stream_data([ChoicePart(0, pieces, "tool_calls")]))[1:] == [
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "thinking", "thinking": "", "signature": ""},
        },
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "thinking_delta", "thinking": "Hm"},
        },
        {"type": "content_block_stop", "index": 0},
        {
            "type": "content_block_start",
            "index": 1,
            "content_block": {"type": "text", "text": "", "citations": None},
        },
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Hi"}},
        {"type": "content_block_stop", "index": 1},
        {
            "type": "content_block_start",
            "index": 2,
            "content_block": {"type": "tool_use", "id": "c", "name": "f", "input": {}},
        },
        {
            "type": "content_block_delta",
            "index": 2,
            "delta": {"type": "input_json_delta", "partial_json": "{}"},
        },
        {"type": "content_block_stop", "index": 2},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": USAGE_BODY,
        },
        {"type": "message_stop"},
    ]


@pytest.mark.parametrize(
    ("status", "kind", "exception_type"),
    [
        (400, "invalid_request_error", anthropic.BadRequestError),
        (401, "authentication_error", anthropic.AuthenticationError),
        (403, "permission_error", anthropic.PermissionDeniedError),
        (404, "not_found_error", anthropic.NotFoundError),
        (413, "request_too_large", anthropic.RequestTooLargeError),
        (422, "invalid_request_error", anthropic.UnprocessableEntityError),
        (429, "rate_limit_error", anthropic.RateLimitError),
        (500, "api_error", anthropic.InternalServerError),
        (503, "overloaded_error", anthropic.ServiceUnavailableError),
    ],
)
def test_error_bodies_raise_client_exceptions(status, kind, exception_type):
    body = message_answers.error(status, "no such thing", "model")
    assert body == {"type": "error", "error": {"type": kind, "message": "model: no such thing"}}
    assert message_answers.error(status, "model: no such thing", "model") == body
    assert message_answers.error(status, "broken", None)["error"]["message"] == "broken"
    if kind != "request_too_large":  # the client knows it by its status only
        check_client_type(ErrorResponse, body)
    with pytest.raises(exception_type) as caught:
        anthropic_client(Server(msgspec.json.encode(body), status)).messages.create(**MINIMAL_BODY)
    assert caught.value.body == body


@given(written(), st.integers(0, 4))
def test_failed_stream_ends_with_error_event(answer: Written, num_events: int):
    stream = message_answers.MessagesStream(HEAD, parse_request(), MINIMAL_BODY)
    data = stream.begin(Usage(3, 0)) if num_events else b""
    for choice_part in answer.parts[: max(0, num_events - 1)]:
        data += stream.part(choice_part)
    data += stream.fail(500, "it broke")
    assert events_of(data)[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "it broke"},
    }
    with pytest.raises(anthropic.APIStatusError, match="it broke"):
        accumulate_stream(data)


CONVERSATION = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "one"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm" * 9,
        "tool_calls": [
            {
                "id": f"t{i}",
                "type": "function",
                "function": {"name": "fg"[i % 2], "arguments": {"n": i}},
            }
            for i in range(4)
        ],
    },
    *(
        {"role": "tool", "tool_call_id": f"t{i}", "name": "fg"[i % 2], "content": "x" * 100}
        for i in range(4)
    ),
    {"role": "assistant", "content": "a", "reasoning_content": "oh"},
    {"role": "user", "content": "two"},
]


def json_size(value: Any) -> int:
    return len(json.dumps(value))


def edit_conversation(*edits: dict[str, Any]) -> tuple[Any, Any]:
    return edit_messages(
        CONVERSATION, parse_request(context_management={"edits": list(edits)}).edits, json_size
    )


def test_clear_tool_uses_edit():
    trigger = {"type": "tool_uses", "value": 4}
    conversation, (applied_edit,) = edit_conversation(
        {"type": TOOLS, "trigger": trigger, "keep": {"type": "tool_uses", "value": 1}}
    )
    results = [message["content"] for message in conversation if message["role"] == "tool"]
    assert ["cleared" in content for content in results] == [True] * 3 + [False] and results[
        3
    ] == "x" * 100
    assert applied_edit == {
        "type": TOOLS,
        "cleared_tool_uses": 3,
        "cleared_input_tokens": json_size(CONVERSATION) - json_size(conversation),
    }
    assert [call["function"]["arguments"] for call in conversation[2]["tool_calls"]] == [
        {"n": i} for i in range(4)
    ]
    keep = {"type": "tool_uses", "value": 0}
    conversation, (applied_edit,) = edit_conversation(
        {
            "type": TOOLS,
            "trigger": trigger,
            "keep": keep,
            "exclude_tools": ["f"],
            "clear_tool_inputs": ["g"],
        }
    )
    assert applied_edit["cleared_tool_uses"] == 2
    assert [call["function"]["arguments"] for call in conversation[2]["tool_calls"]] == [
        {"n": 0},
        {},
        {"n": 2},
        {},
    ]
    for edit in (
        {"type": TOOLS},  # below the default trigger
        {"type": TOOLS, "trigger": {"type": "tool_uses", "value": 5}},
        {
            "type": TOOLS,
            "trigger": trigger,
            "clear_at_least": {"type": "input_tokens", "value": 1000},
        },
    ):
        assert edit_conversation(edit) == (CONVERSATION, [])


def test_clear_thinking_edit():
    conversation, (applied_edit,) = edit_conversation({"type": THOUGHTS})
    assert [
        message.get("reasoning_content")
        for message in conversation
        if message["role"] == "assistant"
    ] == [None, "oh"]
    assert applied_edit["cleared_thinking_turns"] == 1
    assert edit_conversation({"type": THOUGHTS, "keep": "all"}) == (CONVERSATION, [])
    assert edit_conversation(
        {"type": THOUGHTS, "keep": {"type": "thinking_turns", "value": 2}}
    ) == (CONVERSATION, [])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"edit": []}, "context_management.edit: unknown field"),
        (
            {"edits": [{"type": "compact_20260112"}]},
            "context_management.edits[0].type: must be clear_tool_uses_20250919",
        ),
        (
            {"edits": [{"type": TOOLS, "keep": 3}]},
            "context_management.edits[0].keep.type: must be tool_uses",
        ),
        (
            {"edits": [{"type": TOOLS, "trigger": {"type": "input_tokens", "value": 0}}]},
            "context_management.edits[0].tr",
        ),
        (
            {"edits": [{"type": THOUGHTS, "keep": "some"}]},
            "context_management.edits[0].keep.type: must be thinking_turns",
        ),
    ],
)
def test_invalid_context_management_is_rejected(value, message):
    assert rejection_message(context_management=value).startswith(message)


def test_drop_oldest_turns():
    """Drops as few of the oldest turns as necessary; the system message and the last turn stay."""
    for limit in (10_000, json_size(CONVERSATION) - 1, 100, 1):
        kept_turns = drop_oldest_turns(
            CONVERSATION, lambda remaining, limit=limit: json_size(remaining) <= limit
        )
        assert kept_turns == (
            CONVERSATION if limit == 10_000 else [CONVERSATION[0], CONVERSATION[-1]]
        )
    turns = [{"role": "user", "content": str(i)} for i in range(10)]
    assert drop_oldest_turns(turns, lambda remaining: len(remaining) <= 4) == turns[-4:]
