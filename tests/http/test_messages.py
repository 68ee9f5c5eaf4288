"""Anthropic's messages: bodies to requests, answers to bodies and events, as Anthropic's own client
reads them.
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
from quire.serving.api.params import SamplingParams, Terms
from quire.serving.parsing.pieces import Arguments, CallStart, Said, Thought
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
USED = {
    "input_tokens": 6,
    "cache_creation_input_tokens": 8,
    "cache_read_input_tokens": 16,
    "output_tokens": 12,
    "output_tokens_details": {"thinking_tokens": 5},
}
HI = [{"role": "user", "content": "Hi"}]
ASK = {"model": "quill", "max_tokens": 50, "messages": HI}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "look_up", "description": "Weather", "input_schema": SCHEMA}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SAMPLED: dict[str, Any] = {  # a value for each sampling field, as JSON has it
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
# each other field: a value, and what tells that it is applied
OTHERS: dict[str, tuple[Any, Any]] = {
    "model": ("other", lambda found: found.model == "other"),
    "messages": (
        [{"role": "user", "content": "Ho"}],
        lambda found: found.messages[0]["content"] == "Ho",
    ),
    "system": (
        "Be kind.",
        lambda found: found.messages[0] == {"role": "system", "content": ("Be kind.")},
    ),
    "tools": ([TOOL], lambda found: bool(found.tools)),
    "tool_choice": ({"type": "none"}, lambda found: found.tool_choice == "none"),
    "thinking": (
        {"type": "disabled"},
        lambda found: found.template_options.get("enable_thinking") is False,
    ),
    "output_config": (
        {"effort": "low"},
        lambda found: found.template_options.get("reasoning_effort") == "low",
    ),
    "stop_sequences": (["END"], lambda found: found.params.stop == ("END",)),
    "stream": (True, lambda found: found.delivery == Delivery(stream=True)),
    "request_id": ("mine", lambda found: found.delivery.request_id == "mine"),
    "truncate_prompt_tokens": (5, lambda found: found.truncate_prompt_tokens == 5),
    "truncation_side": ("right", lambda found: found.truncation_side == "right"),
    "add_generation_prompt": (
        False,
        lambda found: not found.template_options["add_generation_prompt"],
    ),
    "context_management": (
        {"edits": [{"type": THOUGHTS}]},
        lambda found: found.edits == (ClearThoughts(),),
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
}


def parse(**given) -> ChatRequest:
    return messages.parse(ASK | given)


def refused(ask=parse, **given) -> str:
    with pytest.raises(RequestError) as caught:
        ask(**given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def turns(*given: Any, **others) -> list[dict[str, Any]]:
    return parse(messages=list(given), **others).messages


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def used(number: int) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"t{number}", "name": "f", "input": {"n": number}}


def result(number: int, content: Any, **others) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"t{number}", "content": content, **others}


def streamed(answer: Sequence[ChoicePart]) -> bytes:
    stream = message_answers.MessagesStream(HEAD, parse(), ASK)
    data = stream.begin(Usage(30, 0, 0))
    for part in answer:
        stream.set_usage(USAGE)
        data += stream.part(part)
    return data + stream.end(USAGE)


def whole(answer: FinishedChoice) -> dict[str, Any]:
    return message_answers.response(HEAD, parse(), ASK, [answer], USAGE)


def check(kind: Any, value: Any) -> None:
    assert unknown_client_fields(kind, value) <= set()


def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        api_key="k", base_url="http://localhost", http_client=server.http, max_retries=0
    )


def put_together(data: bytes) -> Any:
    """What the client's own accumulator makes of events."""
    with client(Server(data)).messages.stream(**ASK) as stream:
        return stream.get_final_message()


def read_whole(body: dict[str, Any]) -> Any:
    return client(Server(msgspec.json.encode(body))).messages.create(**ASK)


def test_plain_request():
    expected = ChatRequest(
        HI, SamplingParams(max_tokens=50), "quill", {"add_generation_prompt": True}
    )
    assert parse() == expected


def test_every_sampling_field_is_applied():
    assert set(SAMPLED) | {"structured_outputs"} == set(SAMPLING_FIELDS)
    expected = SamplingParams(**SAMPLED)
    assert parse(**SAMPLED).params == expected
    for name, value in SAMPLED.items():
        assert getattr(parse(**{name: value}).params, name) == getattr(expected, name)


def test_every_other_field_is_applied():
    assert set(OTHERS) | set(LABELS) | set(SAMPLING_FIELDS) == set(FIELDS)
    for name, (value, applied) in OTHERS.items():
        extra = {"truncate_prompt_tokens": 5} if name == "truncation_side" else {}
        assert applied(parse(**extra, **{name: value})) and not applied(parse(**extra)), name


def test_labels_have_no_effect():
    assert parse(**{name: {"any": ["thing"]} for name in LABELS}) == parse()


def test_null_is_as_if_not_given():
    known = {*FIELDS, *NEUTRAL, *REFUSED} - set(ASK)
    assert parse(**dict.fromkeys(known)) == parse()


def test_what_is_not_implemented_is_refused_by_name():
    for name, value in NEUTRAL.items():
        assert parse(**{name: value}) == parse()
        assert refused(**{name: "x"}).startswith(f"{name}: is not implemented")
    for name in REFUSED:
        assert refused(**{name: "x"}) == f"{name}: {REFUSED[name]}"
    assert refused(temprature=1) == "temprature: unknown field; did you mean 'temperature'?"
    assert refused(max_tokens=None).startswith(
        "max_tokens: must be an integer of 1 or more, got None"
    )
    assert refused(max_tokens=0).startswith("max_tokens: ")
    assert refused(stop_sequences=["a", ""]).startswith(
        "stop_sequences[1]: must be a string of 1 to"
    )


def test_every_field_of_the_client_is_known():
    known = {*FIELDS, *NEUTRAL, *REFUSED}
    assert set(get_type_hints(MessageCreateParamsStreaming)) <= known
    assert set(get_type_hints(MessageCountTokensParams)) <= {*COUNT_FIELDS, *NEUTRAL}


def test_tokens_are_counted_of_the_same_prompt():
    asked = {
        "messages": [user(text("a")), assistant(text("b"))],
        "system": "Be kind.",
        "tools": [TOOL],
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "output_config": {"effort": "high"},
    }
    counted = messages.parse_count(asked)
    sent = parse(**asked)
    assert (counted.messages, counted.tools, counted.template_options) == (
        sent.messages, sent.tools, sent.template_options,
    )  # fmt: skip
    assert refused(
        lambda **given: messages.parse_count(given), messages=HI, max_tokens=3
    ).startswith("max_tokens: unk")
    check(MessageTokensCount, {"input_tokens": 3})


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        ({"output_config": {}}, None),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ],
)
def test_the_form_of_the_text_is_a_sampling_parameter(asked, expected):
    assert parse(**asked).params == SamplingParams(max_tokens=50, structured_outputs=expected)


def test_output_config_that_is_refused():
    form = {"type": "json_schema", "schema": SCHEMA}
    both = refused(output_config={"format": form}, structured_outputs={"regex": "a"})
    assert both.startswith("output_config.format: and structured_outputs")
    assert refused(output_config={"format": {"type": "xml"}}).startswith(
        "output_config.format.type: must be json_sch"
    )
    assert refused(output_config={"format": {"type": "json_schema"}}).startswith(
        "output_config.format.schema: must"
    )
    assert refused(output_config={"effort": "extreme"}).startswith(
        "output_config.effort: must be one of low, medium"
    )
    assert refused(output_config={"style": 1}).startswith("output_config.style: unknown field")
    assert refused(output_config=3).startswith("output_config: must be a JSON object")


def test_thinking():
    def options(**thinking) -> dict[str, Any]:
        return parse(thinking=thinking).template_options

    plain = {"add_generation_prompt": True}
    assert options(type="enabled", budget_tokens=1024) == plain | {
        "enable_thinking": True,
        "thinking_budget": 1024,
    }
    assert options(type="enabled", display="summarized") == plain | {"enable_thinking": True}
    assert options(type="disabled") == plain | {"enable_thinking": False}
    assert options(type="adaptive") == plain
    kwargs = {"enable_thinking": False}  # the more exact one
    assert (
        parse(thinking={"type": "enabled"}, chat_template_kwargs=kwargs).template_options
        == plain | kwargs
    )
    assert refused(thinking={"type": "between_tools"}).startswith(
        "thinking.type: must be enabled or adaptive or dis"
    )
    assert refused(thinking={"type": "enabled", "budget_tokens": 0}).startswith(
        "thinking.budget_tokens: must be an"
    )
    assert refused(thinking={"type": "adaptive", "budget_tokens": 9}).startswith(
        "thinking.budget_tokens: unknown"
    )
    assert refused(thinking={"type": "enabled", "display": "omitted"}).startswith(
        "thinking.display: must be 'summ"
    )


def test_tools():
    function = {"name": "look_up", "description": "Weather", "parameters": SCHEMA}
    more = {"type": "custom", "strict": True, "eager_input_streaming": True, **CACHED}
    for tool in (TOOL, TOOL | more):
        assert parse(tools=[tool]).tools == [{"type": "function", "function": function}]
    assert parse(tools=[TOOL | {"type": None, "strict": None, "input_examples": None}]) == parse(
        tools=[TOOL]
    )
    for kind in ("bash_20250124", "web_search_20250305", "text_editor_20250728", "mcp_toolset"):
        assert refused(tools=[TOOL, {"type": kind, "name": "x"}]).startswith(
            "tools[1].type: must be 'custom' or null"
        )
    assert refused(tools=[TOOL | {"name": "a b"}]).startswith("tools[0].name: must be")
    assert refused(tools=[TOOL | {"input_schema": None}]).startswith(
        "tools[0].input_schema: must be a JSON object"
    )
    assert refused(tools=[TOOL | {"defer_loading": True}]).startswith(
        "tools[0].defer_loading: unknown field"
    )
    assert refused(tools=["x"]).startswith("tools[0]: must be a JSON object")
    assert refused(tools=TOOL).startswith("tools: must be a list")


def test_tool_choice():
    def chosen(**choice) -> tuple[str, bool]:
        found = parse(tools=[TOOL], tool_choice=choice)
        return found.tool_choice, found.parallel_tool_calls

    assert chosen(type="auto") == ("auto", True)
    assert chosen(type="none") == ("none", True)
    assert chosen(type="any", disable_parallel_tool_use=True) == ("required", False)
    assert chosen(type="tool", name="look_up", disable_parallel_tool_use=False) == (
        "function:look_up",
        True,
    )
    assert refused(tools=[TOOL], tool_choice={"type": "tool", "name": "x"}).startswith(
        "tool_choice.name: must be the"
    )
    assert refused(tools=[TOOL], tool_choice={"type": "tool"}).startswith(
        "tool_choice.name: must be the"
    )
    assert refused(tool_choice={"type": "any"}).startswith(
        "tool_choice.type: is 'any' and tools are missing"
    )
    assert refused(tool_choice={"type": "required"}).startswith(
        "tool_choice.type: must be auto or any or tool or none"
    )
    assert refused(tool_choice={"type": "auto", "name": "x"}).startswith(
        "tool_choice.name: unknown field"
    )


def test_blocks_are_messages():
    thinking = {"type": "thinking", "thinking": "Long.", "signature": "s"}

    def call(number: int) -> dict[str, Any]:
        return {
            "id": f"t{number}",
            "type": "function",
            "function": {"name": "f", "arguments": {"n": number}},
        }

    assert turns(
        {"role": "system", "content": [text("Rules.")]},
        user(text("a") | CACHED, text("b")),
        user(text("c")),
        assistant(
            thinking,
            text("I will.") | {"citations": None},
            used(0) | {"caller": {"type": "direct"}},
            used(1),
        ),
        user(result(1, "one", is_error=True), result(0, [text("zero"), text("0")], is_error=False)),
        user(text("Go on."), text("!")),
        assistant(used(2)),
        user({"type": "tool_result", "tool_use_id": "t2"}),
        assistant(text("So"), text(" be it.")),
        {"role": "assistant", "content": " Amen."},
        {"role": "user", "content": "d"},
        assistant(),
        {"role": "system", "content": "Late."},
        system=[text("Be kind.") | CACHED, text("Be brief.")],
    ) == [
        {"role": "system", "content": "Be kind.\nBe brief.\n\nRules."},
        {"role": "user", "content": "a\nb\nc"},
        {
            "role": "assistant",
            "content": "I will.",
            "reasoning_content": "Long.",
            "tool_calls": [call(0), call(1)],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "Error: one", "name": "f"},
        {"role": "tool", "tool_call_id": "t0", "content": "zero\n0", "name": "f"},
        {"role": "user", "content": "Go on.\n!"},
        {"role": "assistant", "content": "", "tool_calls": [call(2)]},
        {"role": "tool", "tool_call_id": "t2", "content": "", "name": "f"},
        {"role": "assistant", "content": "So be it. Amen."},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": ""},
        {"role": "system", "content": "Late."},
    ]


def test_an_answer_that_has_begun_goes_on():
    begun = [*HI, assistant(text("Once"))]
    goes_on = {"add_generation_prompt": False, "continue_final_message": True}
    anew = {"add_generation_prompt": True}
    assert parse(messages=begun).template_options == goes_on
    # there is nothing to go on from
    assert parse(messages=[*HI, assistant(text(" "))]).template_options == anew
    assert parse(messages=begun, add_generation_prompt=True).template_options == anew
    assert parse(messages=begun, continue_final_message=False).template_options == anew
    assert refused(messages=[*HI, assistant(used(1))]).startswith(
        "messages[1].content: has a tool_use and no tool_re"
    )
    assert parse(messages=[{"role": "user", "content": "x", "name": "y"}]).ignored == (
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
        (user(), "messages[1].content: must be a list of 1 to"),
        (
            user({"type": "image", "source": {}}),
            "messages[1].content[0].type: must be text or tool_result, got 'image'",
        ),
        (
            user(text("a"), {"type": "document"}),
            "messages[1].content[1].type: must be text or tool_result",
        ),
        (user(used(1)), "messages[1].content[0].type: must be text or tool_result, got 'tool_use'"),
        (user({"type": "text"}), "messages[1].content[0].text: must be a string"),
        (
            user(result(1, "x")),
            ("messages[1].content[0].tool_use_id: must be the id of a call that stands before it"),
        ),
        (
            user(result(1, [{"type": "image"}])),
            "messages[1].content[0].content[0].type: must be text, got 'image'",
        ),
        (
            user(result(1, "x", is_error=1)),
            "messages[1].content[0].is_error: must be true or false",
        ),
        (
            assistant(result(1, "x")),
            "messages[1].content[0].type: must be text or thinking or tool_use",
        ),
        (
            assistant({"type": "redacted_thinking", "data": "x"}),
            "messages[1].content[0].type: must be text or",
        ),
        (assistant({"type": "server_tool_use"}), "messages[1].content[0].type: must be text or"),
        (
            assistant(used(1) | {"input": "{}"}),
            "messages[1].content[0].input: must be a JSON object",
        ),
        (assistant(used(1) | {"id": None}), "messages[1].content[0].id: must be a string"),
        (
            {"role": "system", "content": [{"type": "image"}]},
            "messages[1].content[0].type: must be text",
        ),
    ],
)
def test_turns_that_are_refused(turn, error):
    assert refused(messages=[*HI, turn]).startswith(error)


def test_messages_that_are_refused():
    for value in (None, [], 3, {"role": "user"}):
        assert refused(messages=value).startswith("messages: must be a list of 1 to 4096, got")
    assert refused(system={"type": "text"}).startswith("system: must be a string")
    assert refused(system=[{"type": "image"}]).startswith("system[0].type: must be text")


@settings(max_examples=cases(400))
@given(st.data())
def test_no_body_raises_anything_else(data):
    """One place of a good body replaced by anything."""
    asked = ASK | {
        "messages": [user(text("a")), assistant(text("b"), used(1)), user(result(1, [text("c")]))],
        "system": [text("s")],
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "look_up"},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "output_config": {"effort": "low"},
        "stop_sequences": ["a"],
    }
    body = json.loads(json.dumps(asked))
    replace_random_value(data, body)
    try:
        assert isinstance(messages.parse(body), ChatRequest)
    except RequestError as error:
        assert "\n" not in error.message


@given(written())
def test_events_are_what_the_client_expects(answer: Written):
    """Each block is opened and closed once and in order, its text told in between."""
    events = events_of(streamed(answer.parts))
    for event in events:
        check(RawMessageStreamEvent, event)
    assert events[0]["type"] == "message_start" and events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] == 30
    assert events[0]["message"]["stop_reason"] is None
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["usage"] == USED
    found: list[tuple[str, Any]] = []
    begun = None
    told = ""
    for event in events[1:-2]:
        assert event["index"] == len(found)
        if event["type"] == "content_block_start":
            assert begun is None
            begun = event["content_block"]
            told = ""
            continue
        assert begun is not None
        if event["type"] == "content_block_delta":
            kind = event["delta"].pop("type")
            value = event["delta"].popitem()[1]
            assert value and kind == {
                "text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta",
            }[begun["type"]]  # fmt: skip
            told += value
            continue
        assert event["type"] == "content_block_stop"
        if begun["type"] == "tool_use":
            assert begun["input"] == {}
            found.append(("call", ToolCall(begun["id"], begun["name"], told)))
        else:
            found.append(("said" if begun["type"] == "text" else "thought", told))
        begun = None
    assert begun is None and found == answer.blocks


@settings(max_examples=cases(80))
@given(written(), written(ordered=True))
def test_the_client_puts_a_stream_together(answer: Written, ordered: Written):
    for one in (answer, ordered):
        found = put_together(streamed(one.parts))
        body = whole(one.answer)
        check(Message, body)
        blocks: list[tuple[str, Any]] = []
        for block in found.content:
            if block.type == "tool_use":
                blocks.append(("call", (block.id, block.name, block.input)))
            else:
                blocks.append(
                    ("said", block.text) if block.type == "text" else ("thought", block.thinking)
                )
        assert blocks == [
            (kind, (value.id, value.name, json.loads(value.arguments)) if kind == "call" else value)
            for kind, value in one.blocks
        ]
        same = read_whole(body)
        assert (found.stop_reason, found.stop_sequence) == (same.stop_reason, same.stop_sequence)
        assert found.usage.to_dict() == same.usage.to_dict() == USED
        if one is ordered:
            assert (
                found.to_dict() == same.to_dict() | {"stop_details": None}
                and same.to_dict() == body
            )


@settings(max_examples=cases(80))
@given(written(), st.booleans())
def test_what_a_client_sends_back_is_what_was_said(answer: Written, streams: bool):
    said = put_together(streamed(answer.parts)) if streams else read_whole(whole(answer.answer))
    results = [
        result(0, f"result of {call.id}") | {"tool_use_id": call.id} for call in answer.answer.calls
    ]
    server = Server(msgspec.json.encode(whole(answer.answer)))
    back = [
        *HI,
        {"role": "assistant", "content": said.content},
        *([user(*results)] if results else []),
    ]
    client(server).messages.create(model="quill", max_tokens=9, messages=back)
    expected: dict[str, Any] = {"role": "assistant", "content": answer.answer.content or ""}
    if answer.answer.reasoning:
        expected["reasoning_content"] = answer.answer.reasoning
    if answer.answer.calls:
        expected["tool_calls"] = [
            {"id": call.id, "type": "function",
             "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
            for call in answer.answer.calls
        ]  # fmt: skip
    told = [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": f"result of {call.id}",
            "name": call.name,
        }
        for call in answer.answer.calls
    ]
    assert messages.parse(server.asked).messages == [*HI, expected, *told]


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
def test_why_an_answer_has_stopped(finish_reason, stop_reason, expected):
    body = whole(FinishedChoice(0, "Hi", finish_reason, stop_reason=stop_reason))
    assert (body["stop_reason"], body["stop_sequence"]) == expected
    delta = events_of(streamed([ChoicePart(0, [Said("Hi")], finish_reason, stop_reason)]))[-2][
        "delta"
    ]
    assert delta == {"stop_reason": expected[0], "stop_sequence": expected[1]}


def test_arguments_that_were_cut_off():
    for arguments in ("", '{"a": 1', "[1]", "x"):
        body = whole(FinishedChoice(0, None, "length", None, [ToolCall("c", "f", arguments)]))
        assert body["content"] == [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]
        check(Message, body)


def test_the_events_of_a_short_answer_in_full():
    pieces = [Thought("Hm"), Said("Hi"), Said(""), CallStart(0, "c", "f"), Arguments(0, "{}")]
    assert events_of(streamed([ChoicePart(0, pieces, "tool_calls")]))[1:] == [
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
            "usage": USED,
        },
        {"type": "message_stop"},
    ]


@pytest.mark.parametrize(
    ("status", "kind", "raised"),
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
def test_errors(status, kind, raised):
    body = message_answers.error(status, "no such thing", "model")
    assert body == {"type": "error", "error": {"type": kind, "message": "model: no such thing"}}
    assert message_answers.error(status, "model: no such thing", "model") == body
    assert message_answers.error(status, "broken", None)["error"]["message"] == "broken"
    if kind != "request_too_large":  # which the client knows by its status alone
        check(ErrorResponse, body)
    with pytest.raises(raised) as caught:
        client(Server(msgspec.json.encode(body), status)).messages.create(**ASK)
    assert caught.value.body == body


@given(written(), st.integers(0, 4))
def test_a_stream_that_fails_says_so(answer: Written, when: int):
    stream = message_answers.MessagesStream(HEAD, parse(), ASK)
    data = stream.begin(Usage(3, 0)) if when else b""
    for part in answer.parts[: max(0, when - 1)]:
        data += stream.part(part)
    data += stream.fail(500, "it broke")
    assert events_of(data)[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "it broke"},
    }
    with pytest.raises(anthropic.APIStatusError, match="it broke"):
        put_together(data)


TALK = [
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


def size(talk: Any) -> int:
    return len(json.dumps(talk))


def managed(*edits: dict[str, Any]) -> tuple[Any, Any]:
    return edit_messages(TALK, parse(context_management={"edits": list(edits)}).edits, size)


def test_old_tool_results_are_cleared():
    few = {"type": "tool_uses", "value": 4}
    talk, (told,) = managed(
        {"type": TOOLS, "trigger": few, "keep": {"type": "tool_uses", "value": 1}}
    )
    results = [message["content"] for message in talk if message["role"] == "tool"]
    assert ["cleared" in text for text in results] == [True] * 3 + [False] and results[
        3
    ] == "x" * 100
    assert told == {
        "type": TOOLS,
        "cleared_tool_uses": 3,
        "cleared_input_tokens": size(TALK) - size(talk),
    }
    assert [call["function"]["arguments"] for call in talk[2]["tool_calls"]] == [
        {"n": i} for i in range(4)
    ]
    keep = {"type": "tool_uses", "value": 0}
    talk, (told,) = managed(
        {
            "type": TOOLS,
            "trigger": few,
            "keep": keep,
            "exclude_tools": ["f"],
            "clear_tool_inputs": ["g"],
        }
    )
    assert told["cleared_tool_uses"] == 2
    assert [call["function"]["arguments"] for call in talk[2]["tool_calls"]] == [
        {"n": 0},
        {},
        {"n": 2},
        {},
    ]
    for edit in (
        {"type": TOOLS},  # it has few tokens
        {"type": TOOLS, "trigger": {"type": "tool_uses", "value": 5}},
        {"type": TOOLS, "trigger": few, "clear_at_least": {"type": "input_tokens", "value": 1000}},
    ):
        assert managed(edit) == (TALK, [])


def test_old_thoughts_are_cleared():
    talk, (told,) = managed({"type": THOUGHTS})
    assert [
        message.get("reasoning_content") for message in talk if message["role"] == "assistant"
    ] == [None, "oh"]
    assert told["cleared_thinking_turns"] == 1
    assert managed({"type": THOUGHTS, "keep": "all"}) == (TALK, [])
    assert managed({"type": THOUGHTS, "keep": {"type": "thinking_turns", "value": 2}}) == (TALK, [])


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
def test_wrong_context_management(value, message):
    assert refused(context_management=value).startswith(message)


def test_what_is_dropped_where_not_all_fits():
    """As few of the oldest turns as must be; the system and the last turn stay."""
    for room in (10_000, size(TALK) - 1, 100, 1):
        found = drop_oldest_turns(TALK, lambda talk, room=room: size(talk) <= room)
        assert found == (TALK if room == 10_000 else [TALK[0], TALK[-1]])
    turns = [{"role": "user", "content": str(i)} for i in range(10)]
    assert drop_oldest_turns(turns, lambda talk: len(talk) <= 4) == turns[-4:]
