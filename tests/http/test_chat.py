"""Chat completions: parsing request bodies, and response bodies and events that OpenAI's client
reads.
"""

import json
from dataclasses import replace
from typing import Any, get_type_hints

import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming

from quire.serving.api.errors import RequestError
from quire.serving.api.outputs import Logprob
from quire.serving.api.params import SamplingParams
from quire.serving.parsing.pieces import Arguments, CallStart, ReasoningPiece, TextPiece
from quire.serving.protocol.answers import chat as chat_answer
from quire.serving.protocol.answers.answer import (
    AnsweredPrompt,
    ChatRequest,
    ChoicePart,
    FinishedChoice,
    ResponseHead,
    ToolCall,
    Usage,
)
from quire.serving.protocol.answers.shapes import DONE
from quire.serving.protocol.chat import FIELDS, NEUTRAL, REFUSED, parse
from quire.tests.support.answers import Server, Written, unknown_client_fields, written
from quire.tests.support.cases import cases

MESSAGES = [{"role": "user", "content": "Hi"}]
HEAD = ResponseHead("chatcmpl-1", "quill", 1700000000, "quire-0")
USAGE = Usage(30, 12, 16, 5)
USAGE_BODY = {
    "prompt_tokens": 30,
    "completion_tokens": 12,
    "total_tokens": 42,
    "prompt_tokens_details": {"cached_tokens": 16},
    "completion_tokens_details": {"reasoning_tokens": 5},
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "look_up", "description": "Weather", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
DIGITS = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]+"}}
CUSTOM = {"type": "custom", "custom": {"name": "sums", "description": "Adds", "format": DIGITS}}
QUIRE_FIELDS = {
    "drafted",
    "stop_reason",
    "reasoning",
    "reasoning_content",
    "token_ids",
    "prompt_token_ids",
    "prompt_logprobs",
}


def parse_chat(**fields) -> ChatRequest:
    return parse({"messages": MESSAGES, **fields})


def rejection_message(**fields) -> str:
    with pytest.raises(RequestError) as caught:
        parse_chat(**fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_plain_request():
    expected = ChatRequest(
        MESSAGES, SamplingParams(max_tokens=None), None, {"add_generation_prompt": True}
    )
    assert parse_chat() == expected
    assert parse_chat(model="m") == replace(expected, model="m")


def test_every_openai_field_is_handled():
    assert set(get_type_hints(CompletionCreateParamsStreaming)) <= {*FIELDS, *NEUTRAL, *REFUSED}
    for name, reason in REFUSED.items():
        assert rejection_message(**{name: {}}) == f"{name}: {reason}"


def test_max_tokens_and_max_completion_tokens():
    assert parse_chat(max_completion_tokens=5).params.max_tokens == 5
    assert parse_chat(max_tokens=6).params.max_tokens == 6
    assert rejection_message(max_tokens=5, max_completion_tokens=5).startswith(
        "max_tokens: is the old name"
    )
    assert rejection_message(max_completion_tokens=0).startswith("max_completion_tokens: ")


def test_logprobs():
    assert parse_chat(logprobs=False).params.logprobs is None
    assert parse_chat(logprobs=True).params.logprobs == 0
    assert parse_chat(logprobs=True, top_logprobs=20).params.logprobs == 20
    assert parse_chat(logprobs=True, top_logprobs=-1).params.logprobs == -1
    assert rejection_message(logprobs=True, top_logprobs=-2).startswith(
        "top_logprobs: must be an integer of -1 or more"
    )
    assert rejection_message(top_logprobs=2).startswith("top_logprobs: needs logprobs")
    assert rejection_message(logprobs=3).startswith("logprobs: must be true or false")


def test_random_seed_is_an_alias_of_seed():
    assert (
        parse_chat(random_seed=5).params == parse_chat(seed=5).params
        and "seed" in parse_chat(random_seed=5).explicit_params
    )
    assert (
        rejection_message(random_seed=5, seed=5)
        == "random_seed: is Mistral's name of seed; leave one of them out"
    )
    assert rejection_message(random_seed="x").startswith("random_seed: must be an integer")


def test_message_roles_and_contents():
    content_parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": content_parts, "name": "Ann"},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": []},
        {"role": "assistant", "content": None, "refusal": "No."},
        {
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "Never."}],
            "reasoning": "Hm.",
        },
        {"role": "assistant", "content": "So.", "reasoning_content": "Hm?", "parsed": {"a": 1}},
    ]
    assert parse_chat(messages=messages).messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo", "name": "Ann"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": "Never.", "reasoning_content": "Hm."},
        {"role": "assistant", "content": "So.", "reasoning_content": "Hm?"},
    ]


def test_tool_calls_and_results_in_messages():
    """Chat templates get arguments as objects, whether they were sent as text or as objects."""
    calls = [
        {
            "id": "a",
            "type": "function",
            "function": {"name": "look_up", "arguments": '{"city": "Z\\u00fcrich"}'},
        },
        {
            "id": "b",
            "index": 1,
            "function": {"name": "look_up", "arguments": {"city": "Rome"}, "parsed_arguments": {}},
        },
        {"type": "function", "function": {"name": "now", "arguments": ""}},
    ]
    sun = [{"type": "text", "text": "sun"}]
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": sun, "name": "look_up"},
    ]
    assert parse_chat(messages=messages).messages[1:] == [
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "look_up", "arguments": {"city": "Zürich"}},
                },
                {
                    "id": "b",
                    "type": "function",
                    "function": {"name": "look_up", "arguments": {"city": "Rome"}},
                },
                {"type": "function", "function": {"name": "now", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": "sun", "name": "look_up"},
    ]


def messages_with_call(**function) -> list[Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}", **function}}
    return [{"role": "assistant", "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages: must be a list of 1 to 4096 messages, got None"),
        ([], "messages: must be a list"),
        ("Hi", "messages: must be a list"),
        (MESSAGES * 4097, "messages: must be a list of 1 to 4096 messages, got 4097 of them"),
        ([5], "messages[0]: must be an object"),
        (
            [*MESSAGES, {"content": "x"}],
            "messages[1].role: must be one of system, developer, user, assistant, tool, fun",
        ),
        ([{"role": ["user"], "content": "x"}], "messages[0].role: must be one of"),
        ([{"role": "user"}], "messages[0].content: must be a string, got None"),
        ([{"role": "assistant"}], "messages[0].content: must be a string, got None"),
        (
            [{"role": "assistant", "content": "x", "refusal": "y"}],
            "messages[0].refusal: and content are both given",
        ),
        ([{"role": "user", "content": 5}], "messages[0].content: must be a string, got 5"),
        ([{"role": "user", "content": "\ud83d"}], "messages[0].content: must be valid Unicode"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0].image_url: must be a URL, got None",
        ),
        (
            [{"role": "assistant", "content": [{"type": "image_url"}]}],
            "messages[0].content[0].type: must be 'text'",
        ),
        (
            [{"role": "user", "content": ["x"]}],
            "messages[0].content[0].type: must be 'text', got 'x'",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0].text: must be a string",
        ),
        ([{"role": "user", "content": "x", "name": 1}], "messages[0].name: must be a string"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls: must be a list"),
        (
            [{"role": "assistant", "tool_calls": [{}]}],
            "messages[0].tool_calls[0]: must be an object with id",
        ),
        (messages_with_call(name=5), "messages[0].tool_calls[0].function.name: must be a string"),
        (
            messages_with_call(arguments="{"),
            "messages[0].tool_calls[0].function.arguments: must be a JSON object, as text",
        ),
        (
            messages_with_call(arguments="[1]"),
            "messages[0].tool_calls[0].function.arguments: must be a JSON object",
        ),
        (
            messages_with_call(arguments="[" * 100_000),
            "messages[0].tool_calls[0].function.arguments: must be a JSON object",
        ),
    ],
)
def test_invalid_messages_are_rejected(messages, message):
    assert rejection_message(messages=messages).startswith(message)


def test_unknown_message_fields_are_ignored_and_reported():
    content_parts = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]
    messages = [
        {
            "role": "user",
            "content": content_parts,
            "tool_calls": [1],
            "tool_call_id": "a",
            "audio": None,
        },
        *messages_with_call(parsed=1),
        {"role": "assistant", "content": "y", "annotations": [{}], "a\r\nb": 1, "x" * 65: 1},
    ]
    request = parse_chat(messages=messages)
    assert request.ignored == (
        "messages[].?",
        "messages[].annotations",
        "messages[].content[].cache_control",
        "messages[].tool_call_id",
        "messages[].tool_calls",
        "messages[].tool_calls[].function.parsed",
    )
    assert request.messages[0] == {"role": "user", "content": "x"}
    assert request.messages[2] == {"role": "assistant", "content": "y"}
    assert parse_chat(messages=MESSAGES).ignored == ()


def test_tools():
    assert parse_chat(tools=[TOOL]).tools == [TOOL]
    function_without_parameters = {
        "type": "function",
        "function": {"name": "now", "strict": True, "parameters": None},
    }
    expected = {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
    }
    assert parse_chat(tools=[function_without_parameters]).tools == [expected]
    assert parse_chat(tools=[]) == parse_chat()
    for value, message in (
        ("x", "tools: must be a list of 0 to 128, got 'x'"),
        ([TOOL] * 129, "tools: must be a list of 0 to 128, got 129 of them"),
        ([{"type": "web_search"}], "tools[0].type: must be function or custom, got 'web_search'"),
        ([{**TOOL, "strict": True}], "tools[0].strict: unknown field"),
        (
            [{"type": "function", "function": {**FUNCTION, "name": "a b"}}],
            "tools[0].function.name: must be 1 to",
        ),
        (
            [{"type": "function", "function": {**FUNCTION, "parameters": 5}}],
            "tools[0].function.parameters: must be a",
        ),
        (
            [{"type": "function", "function": {**FUNCTION, "description": 5}}],
            "tools[0].function.description: must be",
        ),
        (
            [{"type": "function", "function": {**FUNCTION, "strict": "yes"}}],
            "tools[0].function.strict: must be true",
        ),
        (
            [{"type": "function", "function": {**FUNCTION, "returns": 5}}],
            "tools[0].function.returns: unknown field",
        ),
    ):
        assert rejection_message(tools=value).startswith(message)
    large_function = {**FUNCTION, "parameters": {"enum": ["x" * 70_000]}}
    assert rejection_message(tools=[{"type": "function", "function": large_function}]).startswith(
        "tools[0].function.parameters: must be"
    )


def test_tool_choice():
    named_choice = {"type": "function", "function": {"name": "look_up"}}
    for value, expected in (
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        (named_choice, "function:look_up"),
    ):
        assert parse_chat(tools=[TOOL], tool_choice=value).tool_choice == expected
    assert parse_chat(tool_choice="none").tool_choice == "none"
    assert not parse_chat(tools=[TOOL], parallel_tool_calls=False).parallel_tool_calls
    for value, message in (
        ("any", "tool_choice: must be auto, none, required or"),
        ({"type": "function"}, "tool_choice.function: must be a JSON object"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools: must be a JSON object"),
        (
            {"type": "function", "function": {"name": "x"}},
            "tool_choice.function.name: must be the name of one of",
        ),
    ):
        assert rejection_message(tools=[TOOL], tool_choice=value).startswith(message)
    assert (
        rejection_message(tool_choice="required")
        == "tool_choice: is 'required' and tools are missing"
    )


def test_allowed_tools():
    """Only the allowed tools reach the model; both spellings of their names are accepted."""
    now_tool = {"type": "function", "function": {"name": "now"}}
    tool_choice = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [now_tool]},
    }
    request = parse_chat(tools=[TOOL, now_tool, CUSTOM], tool_choice=tool_choice)
    assert [tool["function"]["name"] for tool in request.tools] == [
        "now"
    ] and request.tool_choice == "required"
    tool_choice["allowed_tools"] |= {
        "mode": "auto",
        "tools": [{"type": "custom", "custom": {"name": "sums"}}],
    }
    assert [
        tool["function"]["name"]
        for tool in parse_chat(tools=[TOOL, CUSTOM], tool_choice=tool_choice).tools
    ] == ["sums"]
    for allowed_tools, message in (
        (
            {"mode": "any", "tools": [now_tool]},
            "tool_choice.allowed_tools.mode: must be auto or required, got 'any'",
        ),
        (
            {"mode": "auto", "tools": []},
            "tool_choice.allowed_tools.tools: must be a list of 1 to 128",
        ),
        (
            {"mode": "auto", "tools": [now_tool]},
            "tool_choice.allowed_tools.tools[0].function.name: must be the name",
        ),
    ):
        assert rejection_message(
            tools=[TOOL], tool_choice={"type": "allowed_tools", "allowed_tools": allowed_tools}
        ).startswith(message)


def test_custom_tools():
    """Custom tools become functions with one string parameter; their grammars are stored beside
    them.
    """
    request = parse_chat(tools=[TOOL, CUSTOM, {"type": "custom", "custom": {"name": "free"}}])
    assert request.custom == {"sums": {"regex": "[0-9]+"}, "free": None}
    function = request.tools[1]["function"]
    assert function["parameters"]["required"] == ["input"] and "[0-9]+" in str(
        function["parameters"]
    )
    named_choice = {"type": "custom", "custom": {"name": "sums"}}
    assert parse_chat(tools=[CUSTOM], tool_choice=named_choice).tool_choice == "function:sums"
    call = {"id": "a", "type": "custom", "custom": {"name": "sums", "input": "12"}}
    (message,) = parse_chat(messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    assert message["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "sums", "arguments": {"input": "12"}}}
    ]
    for tool_format, message in (
        ({"type": "json"}, "tools[0].custom.format.type: must be text or grammar"),
        ({"type": "grammar"}, "tools[0].custom.format.grammar: must be a JSON object"),
        (
            {"type": "grammar", "grammar": {"syntax": "ebnf", "definition": "x"}},
            "tools[0].custom.format.grammar.syntax",
        ),
        (
            {"type": "grammar", "grammar": {"syntax": "lark"}},
            "tools[0].custom.format.grammar.definition: must be a s",
        ),
    ):
        assert rejection_message(
            tools=[{"type": "custom", "custom": {"name": "x", "format": tool_format}}]
        ).startswith(message)


def test_deprecated_functions_and_function_call():
    request = parse_chat(functions=[FUNCTION], function_call={"name": "look_up"})
    assert (
        request.old_calls and request.tools == [TOOL] and request.tool_choice == "function:look_up"
    )
    assert (
        not request.parallel_tool_calls
        and parse_chat(functions=[FUNCTION], function_call="none").tool_choice == "none"
    )
    messages = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "look_up", "arguments": '{"city": "Rome"}'},
        },
        {"role": "function", "name": "look_up", "content": "sun"},
    ]
    called, result = parse_chat(messages=messages).messages[1:]
    assert called["tool_calls"][0]["function"] == {"name": "look_up", "arguments": {"city": "Rome"}}
    assert result == {
        "role": "tool",
        "name": "look_up",
        "content": "sun",
        "tool_call_id": called["tool_calls"][0]["id"],
    }
    assert rejection_message(functions=[FUNCTION], tools=[TOOL]).startswith(
        "tools: and functions are its new and its old name"
    )
    assert rejection_message(functions=[FUNCTION], tool_choice="auto").startswith(
        "tool_choice: and functions"
    )
    assert rejection_message(functions=[FUNCTION], function_call="any").startswith(
        "function_call: must be auto, none or"
    )
    assert rejection_message(functions=[FUNCTION], function_call={"name": "x"}).startswith(
        "function_call.name: must be the name"
    )
    body = chat_answer.response(
        HEAD,
        request,
        None,
        [FinishedChoice(0, None, "tool_calls", calls=[ToolCall("a", "look_up", "{}")])],
        USAGE,
    )
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
    assert choice["message"]["function_call"] == {"name": "look_up", "arguments": "{}"}


def test_response_format_does_not_constrain_forced_tool_call():
    json_request = {"response_format": {"type": "json_object"}, "tools": [TOOL]}
    assert parse_chat(**json_request).params.structured_outputs == {"json_object": True}
    for choice in ("required", {"type": "function", "function": {"name": "look_up"}}):
        assert parse_chat(**json_request, tool_choice=choice).params.structured_outputs is None
        assert rejection_message(
            response_format={"type": "x"}, tools=[TOOL], tool_choice=choice
        ).startswith("response_format.type")
        request = parse_chat(structured_outputs={"regex": "a"}, tools=[TOOL], tool_choice=choice)
        # It constrains the whole answer; prompting.py rejects it.
        assert request.params.structured_outputs == {"regex": "a"}


def test_template_options():
    request_fields = {
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": False,
    }
    assert parse_chat(**request_fields).template_options == {
        "enable_thinking": False,
        "add_generation_prompt": False,
    }
    assert parse_chat(reasoning_effort="low", chat_template="{{ x }}").template_options == {
        "add_generation_prompt": True, "chat_template": "{{ x }}", "reasoning_effort": "low",
    }  # fmt: skip
    continue_options = {"add_generation_prompt": False, "continue_final_message": True}
    assert parse_chat(continue_final_message=True).template_options == continue_options
    assert (
        parse_chat(continue_final_message=True, add_generation_prompt=False).template_options
        == continue_options
    )
    for name in (
        "messages",
        "tools",
        "self",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
    ):
        assert rejection_message(chat_template_kwargs={name: 1}).startswith(
            f"chat_template_kwargs.{name}: "
        )
    assert rejection_message(chat_template_kwargs=[1]).startswith(
        "chat_template_kwargs: must be a JSON object"
    )
    assert rejection_message(add_generation_prompt=1).startswith("add_generation_prompt: ")
    assert rejection_message(continue_final_message=True, add_generation_prompt=True).startswith(
        "continue_final_message: needs"
    )
    assert (
        rejection_message(chat_template="x" * 65_537)
        == "chat_template: must hold at most 65536 characters, got 65537"
    )
    assert rejection_message(reasoning_effort=3).startswith("reasoning_effort: must be a string")


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
    request: ChatRequest, *answers: FinishedChoice, head: ResponseHead = HEAD, usage: Usage = USAGE
) -> dict[str, Any]:
    body = chat_answer.response(head, request, None, answers, usage)
    assert json.loads(json.dumps(body, allow_nan=False)) == body
    check_client_type(ChatCompletion, body)
    return body


def check_client_type(kind: Any, body: dict[str, Any]) -> None:
    """Check that the client's type accepts the body, apart from finish reasons that OpenAI
    lacks.
    """
    body = json.loads(json.dumps(body))
    for choice in body["choices"]:
        choice["finish_reason"] = {"timeout": "length", "abort": "length"}.get(
            *[choice["finish_reason"]] * 2
        )
    assert unknown_client_fields(kind, body) <= QUIRE_FIELDS


def test_complete_response_body():
    request = parse_chat(n=2, logprobs=True, top_logprobs=2)
    body = response_body(
        request, finished_choice(), finished_choice(1, finish_reason="stop", stop_reason="END")
    )
    assert {
        name: body[name]
        for name in ("id", "object", "created", "model", "system_fingerprint", "usage")
    } == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "quill",
        "system_fingerprint": "quire-0",
        "usage": USAGE_BODY,
    }
    first_choice, second_choice = body["choices"]
    assert first_choice["message"] == {
        "role": "assistant",
        "content": "Hi you\ufffd",
        "reasoning": None,
    }
    assert (first_choice["index"], first_choice["finish_reason"], first_choice["stop_reason"]) == (
        0,
        "length",
        None,
    )
    assert (
        second_choice["index"],
        second_choice["finish_reason"],
        second_choice["stop_reason"],
    ) == (1, "stop", "END")
    hi_entry, you_entry, partial_character_entry = first_choice["logprobs"]["content"]
    assert hi_entry == {
        "token": "Hi",
        "logprob": -0.1,
        "bytes": [72, 105],
        "top_logprobs": [
            {"token": "Hi", "logprob": -0.1, "bytes": [72, 105]},
            {"token": "Ho", "logprob": -2.5, "bytes": [72, 111]},
        ],
    }
    assert you_entry["logprob"] == -7.0
    assert [alternative["token"] for alternative in you_entry["top_logprobs"]] == [" me", " us"]
    assert (partial_character_entry["bytes"], partial_character_entry["logprob"]) == (None, -9999.0)
    assert body["prompt_logprobs"] is body["prompt_token_ids"] is first_choice["token_ids"] is None
    logprobs = response_body(
        parse_chat(logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True),
        finished_choice(),
    )["choices"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs["content"]] == [
        "token_id:1",
        "token_id:9",
        "token_id:5",
    ]
    assert logprobs["content"][0]["top_logprobs"][1]["token"].startswith("token_id:")
    assert logprobs["content"][0]["bytes"] == [72, 105]


def test_logprobs_are_only_returned_on_request():
    assert (
        response_body(parse_chat(), finished_choice(logprobs=None))["choices"][0]["logprobs"]
        is None
    )
    body = response_body(parse_chat(logprobs=True), finished_choice())
    assert [token["top_logprobs"] for token in body["choices"][0]["logprobs"]["content"]] == [
        [],
        [],
        [],
    ]


def test_logprobs_without_tokenizer_use_token_ids():
    choice = FinishedChoice(0, "", "stop", token_ids=[7], logprobs=[{7: Logprob(-0.5, 1)}])
    (entry,) = response_body(parse_chat(logprobs=True, top_logprobs=1), choice)["choices"][0][
        "logprobs"
    ]["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:7", None)


def test_tool_calls_reasoning_and_token_ids_in_response():
    calls = [ToolCall("a", "look_up", '{"city": "Rome"}'), ToolCall("b", "now", "{}")]
    finished = FinishedChoice(0, None, "tool_calls", "Hm.", calls, token_ids=[4, 5])
    head = replace(HEAD, prompts=[AnsweredPrompt("x", [1, 2], [None, {2: Logprob(-1.0, 3, "as")}])])
    request = parse_chat(tools=[TOOL], return_token_ids=True, prompt_logprobs=0)
    body = response_body(request, finished, head=head, usage=Usage(2, 2))
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning": "Hm.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {
                "id": "a",
                "type": "function",
                "function": {"name": "look_up", "arguments": '{"city": "Rome"}'},
            },
            {"id": "b", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
    }
    assert (choice["finish_reason"], choice["token_ids"], body["prompt_token_ids"]) == (
        "tool_calls",
        [4, 5],
        [1, 2],
    )
    assert body["prompt_logprobs"] == [
        None,
        {"2": {"logprob": -1.0, "rank": 3, "decoded_token": "as"}},
    ]
    assert "completion_tokens_details" not in body["usage"]  # no reasoning


def test_include_reasoning_false_hides_reasoning():
    """Responses and streams omit the reasoning; usage still counts its tokens."""
    request = parse_chat(include_reasoning=False)
    usage = Usage(2, 5, 0, 3)
    body = response_body(request, FinishedChoice(0, "So.", "stop", "Hm."), usage=usage)
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "So.",
        "reasoning": None,
    }
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    choice_parts = [
        ChoicePart(0, [ReasoningPiece("Hm")]),
        ChoicePart(0, [ReasoningPiece("."), TextPiece("So")]),
        ChoicePart(0, [TextPiece(".")], "stop"),
    ]
    deltas = [
        chunk["choices"][0]["delta"]
        for chunk in parse_chunks(stream_data(request, choice_parts))
        if chunk["choices"]
    ]
    assert [delta.get("content") for delta in deltas] == ["", "So", "."]
    assert not any("reasoning" in name for delta in deltas for name in delta)


def test_echo_repeats_the_continued_message():
    messages = [*MESSAGES, {"role": "assistant", "content": "Hi "}]
    request = parse_chat(messages=messages, continue_final_message=True, echo=True, n=2)
    assert (
        response_body(request, FinishedChoice(0, "you", "stop"))["choices"][0]["message"]["content"]
        == "Hi you"
    )
    assert (
        response_body(parse_chat(echo=True), FinishedChoice(0, "you", "stop"))["choices"][0][
            "message"
        ]["content"]
        == "you"
    )
    chunks = parse_chunks(
        stream_data(
            request,
            [
                ChoicePart(0, [TextPiece("y")]),
                ChoicePart(1, [TextPiece("y")]),
                ChoicePart(0, [TextPiece("ou")], "stop"),
            ],
        )
    )
    texts = [(c["choices"][0]["index"], c["choices"][0]["delta"].get("content")) for c in chunks]
    assert texts == [(0, "Hi "), (1, "Hi "), (0, "y"), (1, "y"), (0, "ou")]


def stream_data(
    request: ChatRequest,
    choice_parts: list[ChoicePart],
    head: ResponseHead = HEAD,
    is_finished: bool = True,
) -> bytes:
    stream = chat_answer.ChatStream(head, request, None)
    data = stream.begin(Usage(30, 0, 16))
    for number, choice_part in enumerate(choice_parts, 1):
        stream.set_usage(Usage(30, number, 16))
        data += stream.part(choice_part)
    return data + stream.end(USAGE) if is_finished else data


def parse_chunks(data: bytes) -> list[dict[str, Any]]:
    """The chunks of a stream that ends with `[DONE]`."""
    assert data.endswith(DONE)
    chunks = []
    for block in data.removesuffix(DONE).decode().split("\n\n")[:-1]:
        assert block.startswith("data: ") and "\n" not in block
        chunks.append(json.loads(block.removeprefix("data: ")))
        if "error" not in chunks[-1]:
            check_client_type(ChatCompletionChunk, chunks[-1])
    return chunks


def test_end_token_is_sent_with_the_finish_reason():
    """Clients that build their text from logprobs would show `<|end|>` if it came beside text."""
    logprobs = [{4: Logprob(-0.1, 1, "Hi")}, {2: Logprob(-0.2, 1, "<|end|>")}]
    choice_part = ChoicePart(0, [TextPiece("Hi")], "stop", None, [4, 2], logprobs)
    request = parse_chat(logprobs=True, return_token_ids=True, stream=True)
    chunks = [
        chunk["choices"][0]
        for chunk in parse_chunks(stream_data(request, [choice_part]))
        if chunk["choices"]
    ]
    streamed_tokens = [
        (
            choice["delta"].get("content"),
            [entry["token"] for entry in choice["logprobs"]["content"]],
            choice["token_ids"],
        )
        for choice in chunks[1:]
    ]
    assert streamed_tokens == [("Hi", ["Hi"], [4]), ("", ["<|end|>"], [2])]
    assert [choice["finish_reason"] for choice in chunks] == [None, None, "stop"]
    # A stop text: the last token belongs to it.
    stopped = replace(choice_part, stop_reason="Hi", token_ids=[4], logprobs=logprobs[:1])
    assert (
        len([chunk for chunk in parse_chunks(stream_data(request, [stopped])) if chunk["choices"]])
        == 2
    )


def merge_chunks(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Merge chunks into one body for each choice index, in the format of a response's choices."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            is_first_chunk = choice["index"] not in choices
            merged = choices.setdefault(
                choice["index"], {"message": {"role": None, "content": ""}, "ids": [], "scores": []}
            )
            message = merged["message"]
            delta = choice["delta"]
            assert ("role" in delta) == is_first_chunk and "finish_reason" not in merged
            message["role"] = delta.get("role") or message["role"]
            message["content"] += delta.get("content") or ""
            if "reasoning" in delta:
                assert delta["reasoning"] == delta["reasoning_content"]
                message["reasoning"] = message.get("reasoning", "") + delta["reasoning"]
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if "id" in call:
                    assert call["index"] == len(calls)
                    calls.append(call | {"function": dict(call["function"])})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            merged["ids"] += choice.get("token_ids", [])
            merged["scores"] += (choice["logprobs"] or {"content": []})["content"]
            if choice["finish_reason"] is not None:
                merged |= {
                    "finish_reason": choice["finish_reason"],
                    "stop_reason": choice["stop_reason"],
                }
    return choices


@settings(max_examples=cases(200))
@given(written(scored=True), written(scored=True), st.randoms(use_true_random=False))
def test_joined_stream_deltas_equal_the_response(
    first_written: Written, second_written: Written, random
):
    request = parse_chat(n=2, logprobs=True, top_logprobs=2, return_token_ids=True, stream=True)
    remaining = [
        list(first_written.parts),
        [replace(choice_part, index=1) for choice_part in second_written.parts],
    ]
    choice_parts = []
    while any(remaining):
        choice_parts.append(random.choice([queue for queue in remaining if queue]).pop(0))
    chunks = parse_chunks(
        stream_data(request, choice_parts, replace(HEAD, prompts=[AnsweredPrompt("x", [1, 2])]))
    )
    merged_choices = merge_chunks(chunks)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [
        [1, 2],
        *[None] * (len(chunks) - 1),
    ]
    choices = response_body(request, first_written.answer, replace(second_written.answer, index=1))[
        "choices"
    ]
    for choice in choices:
        merged = merged_choices[choice["index"]]
        message = choice["message"]
        for call in merged["message"].get("tool_calls", []):
            del call["index"]
        assert merged["message"] == {
            name: value or "" if name in ("content", "reasoning") else value
            for name, value in message.items()
            if name != "reasoning_content"
            and (name != "reasoning" or value or "reasoning" in merged["message"])
        }
        assert (merged["finish_reason"], merged["stop_reason"]) == (
            choice["finish_reason"],
            choice["stop_reason"],
        )
        assert (
            merged["ids"] == choice["token_ids"]
            and merged["scores"] == choice["logprobs"]["content"]
        )


def test_drafted_positions_are_streamed_on_request():
    choice_part = ChoicePart(0, [TextPiece("a")], None, None, [5, 6, 7], drafted=[0, 1])
    for options, drafted in (({}, None), ({"include_drafted": True}, [0, 1])):
        chunks = parse_chunks(
            stream_data(parse_chat(stream=True, stream_options=options), [choice_part])
        )
        assert [chunk["choices"][0].get("drafted") for chunk in chunks] == [None, drafted]


@settings(max_examples=cases(100))
@given(st.lists(written(), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_openai_client_accumulates_the_stream(written_answers: list[Written], random):
    """The client's own accumulator handles choices in any order and any last part."""
    remaining = [
        [replace(choice_part, index=index) for choice_part in written_answer.parts]
        for index, written_answer in enumerate(written_answers)
    ]
    choice_parts = []
    while any(remaining):
        choice_parts.append(
            random.choice([written_answer for written_answer in remaining if written_answer]).pop(0)
        )
    server = Server(stream_data(parse_chat(stream=True, n=len(written_answers)), choice_parts))
    client = openai.OpenAI(api_key="k", base_url="http://127.0.0.1/v1", http_client=server.http)
    snapshot = None
    finished_calls = []
    with client.chat.completions.stream(model="quill", messages=MESSAGES) as stream:
        for event in stream:
            if event.type == "chunk":
                snapshot = event.snapshot
            elif event.type == "tool_calls.function.arguments.done":
                finished_calls.append((event.name, event.arguments))
    assert parse(server.asked).delivery.stream and snapshot is not None
    for choice, written_answer in zip(snapshot.choices, written_answers, strict=True):
        message = choice.message
        expected_choice = written_answer.answer
        assert (message.content or "") == (expected_choice.content or "")
        calls = [
            (call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls or ()
        ]
        assert calls == [(call.id, call.name, call.arguments) for call in expected_choice.calls]
        assert choice.finish_reason == expected_choice.finish_reason
    assert sorted(finished_calls) == sorted(
        (call.name, call.arguments)
        for written_answer in written_answers
        for call in written_answer.answer.calls
    )
    server.data = msgspec.json.encode(
        response_body(
            parse_chat(n=len(written_answers)),
            *(written_answer.answer for written_answer in written_answers),
        )
    )
    choices = client.chat.completions.create(model="quill", messages=MESSAGES).choices
    assert [choice.message.content for choice in choices] == [
        written_answer.answer.content for written_answer in written_answers
    ]
    assert [choice.finish_reason for choice in choices] == [
        written_answer.answer.finish_reason for written_answer in written_answers
    ]


def test_exact_chunks_of_a_short_stream():
    choice_parts = [
        ChoicePart(
            0,
            [ReasoningPiece("Hm"), ReasoningPiece("."), CallStart(0, "c", "f"), Arguments(0, "{")],
        ),
        ChoicePart(0, [], None, None, [5, 6]),  # no text yet
        ChoicePart(0, [Arguments(0, "}"), CallStart(1, "d", "g")], "tool_calls"),
    ]
    deltas = [
        chunk["choices"][0]
        for chunk in parse_chunks(stream_data(parse_chat(stream=True), choice_parts))
    ]
    empty_choice = {"index": 0, "logprobs": None, "finish_reason": None}
    first_call = {
        "index": 0,
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": "{"},
    }
    second_call = {
        "index": 1,
        "id": "d",
        "type": "function",
        "function": {"name": "g", "arguments": ""},
    }
    assert deltas == [
        {**empty_choice, "delta": {"role": "assistant", "content": ""}},
        {
            **empty_choice,
            "delta": {"reasoning": "Hm.", "reasoning_content": "Hm.", "tool_calls": [first_call]},
        },
        {
            **empty_choice,
            "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}, second_call]},
        },
        {**empty_choice, "delta": {}, "finish_reason": "tool_calls", "stop_reason": None},
    ]


def test_stream_usage_options():
    choice_parts = [ChoicePart(0, [TextPiece("a")]), ChoicePart(0, [TextPiece("b")], "stop")]
    chunks_without_usage = parse_chunks(stream_data(parse_chat(stream=True), choice_parts))
    assert not any("usage" in chunk for chunk in chunks_without_usage) and all(
        chunk["choices"] for chunk in chunks_without_usage
    )
    request_fields = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = parse_chunks(stream_data(parse_chat(**request_fields), choice_parts))
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    assert (last["usage"], last["choices"]) == (USAGE_BODY, [])
    request_fields["stream_options"] = {"continuous_usage_stats": True}
    chunks = parse_chunks(stream_data(parse_chat(**request_fields), choice_parts))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2]
    request_fields["stream_options"] = {"continuous_usage_stats": True, "include_usage": True}
    chunks = parse_chunks(stream_data(parse_chat(**request_fields), choice_parts))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 12]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(500, "server_error"), (503, "overloaded_error"), (400, "invalid_request_error")],
)
def test_failed_stream_ends_with_error_chunk(status, kind):
    stream = chat_answer.ChatStream(HEAD, parse_chat(stream=True), None)
    data = (
        stream.begin(Usage(3, 0))
        + stream.part(ChoicePart(0, [TextPiece("a")]))
        + stream.fail(status, "it broke", "queue")
    )
    *_, last = parse_chunks(data)
    assert last == {"error": {"message": "it broke", "type": kind, "param": "queue", "code": None}}
    client = openai.OpenAI(
        api_key="k", base_url="http://127.0.0.1/v1", http_client=Server(data).http
    )
    with pytest.raises(openai.APIError, match="it broke") as caught:
        list(client.chat.completions.create(model="quill", messages=MESSAGES, stream=True))
    assert caught.value.param == "queue"
