"""OpenAI's chat completions: bodies to requests, answers to bodies and events, as OpenAI's own
client reads them.
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
from quire.serving.parsing.pieces import Arguments, CallStart, Said, Thought
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

ASK = [{"role": "user", "content": "Hi"}]
HEAD = ResponseHead("chatcmpl-1", "quill", 1700000000, "quire-0")
USAGE = Usage(30, 12, 16, 5)
USED = {
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
OURS = {
    "drafted",
    "stop_reason",
    "reasoning",
    "reasoning_content",
    "token_ids",
    "prompt_token_ids",
    "prompt_logprobs",
}


def chat(**fields) -> ChatRequest:
    return parse({"messages": ASK, **fields})


def refused(**fields) -> str:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_plain_request():
    expected = ChatRequest(
        ASK, SamplingParams(max_tokens=None), None, {"add_generation_prompt": True}
    )
    assert chat() == expected
    assert chat(model="m") == replace(expected, model="m")


def test_every_field_of_the_client_is_known():
    assert set(get_type_hints(CompletionCreateParamsStreaming)) <= {*FIELDS, *NEUTRAL, *REFUSED}
    for name, why in REFUSED.items():
        assert refused(**{name: {}}) == f"{name}: {why}"


def test_length_of_an_answer():
    assert chat(max_completion_tokens=5).params.max_tokens == 5
    assert chat(max_tokens=6).params.max_tokens == 6
    assert refused(max_tokens=5, max_completion_tokens=5).startswith("max_tokens: is the old name")
    assert refused(max_completion_tokens=0).startswith("max_completion_tokens: ")


def test_logprobs():
    assert chat(logprobs=False).params.logprobs is None
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).params.logprobs == 20
    assert chat(logprobs=True, top_logprobs=-1).params.logprobs == -1
    assert refused(logprobs=True, top_logprobs=-2).startswith(
        "top_logprobs: must be an integer of -1 or more"
    )
    assert refused(top_logprobs=2).startswith("top_logprobs: needs logprobs")
    assert refused(logprobs=3).startswith("logprobs: must be true or false")


def test_mistrals_name_of_the_seed():
    assert (
        chat(random_seed=5).params == chat(seed=5).params
        and "seed" in chat(random_seed=5).explicit_params
    )
    assert (
        refused(random_seed=5, seed=5)
        == "random_seed: is Mistral's name of seed; leave one of them out"
    )
    assert refused(random_seed="x").startswith("random_seed: must be an integer")


def test_messages():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    given = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": []},
        {"role": "assistant", "content": None, "refusal": "No."},
        {
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "Never."}],
            "reasoning": "Hm.",
        },
        {"role": "assistant", "content": "So.", "reasoning_content": "Hm?", "parsed": {"a": 1}},
    ]
    assert chat(messages=given).messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo", "name": "Ann"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": "Never.", "reasoning_content": "Hm."},
        {"role": "assistant", "content": "So.", "reasoning_content": "Hm?"},
    ]


def test_calls_and_their_results():
    """Arguments are objects for chat templates, whatever they came as."""
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
    given = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": sun, "name": "look_up"},
    ]
    assert chat(messages=given).messages[1:] == [
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


def calling(**function) -> list[Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}", **function}}
    return [{"role": "assistant", "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages: must be a list of 1 to 4096 messages, got None"),
        ([], "messages: must be a list"),
        ("Hi", "messages: must be a list"),
        (ASK * 4097, "messages: must be a list of 1 to 4096 messages, got 4097 of them"),
        ([5], "messages[0]: must be an object"),
        (
            [*ASK, {"content": "x"}],
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
        (calling(name=5), "messages[0].tool_calls[0].function.name: must be a string"),
        (
            calling(arguments="{"),
            "messages[0].tool_calls[0].function.arguments: must be a JSON object, as text",
        ),
        (
            calling(arguments="[1]"),
            "messages[0].tool_calls[0].function.arguments: must be a JSON object",
        ),
        (
            calling(arguments="[" * 100_000),
            "messages[0].tool_calls[0].function.arguments: must be a JSON object",
        ),
    ],
)
def test_wrong_messages(messages, message):
    assert refused(messages=messages).startswith(message)


def test_fields_of_messages_that_other_servers_know_are_ignored_and_named():
    parts = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]
    told = [
        {"role": "user", "content": parts, "tool_calls": [1], "tool_call_id": "a", "audio": None},
        *calling(parsed=1),
        {"role": "assistant", "content": "y", "annotations": [{}], "a\r\nb": 1, "x" * 65: 1},
    ]
    found = chat(messages=told)
    assert found.ignored == (
        "messages[].?",
        "messages[].annotations",
        "messages[].content[].cache_control",
        "messages[].tool_call_id",
        "messages[].tool_calls",
        "messages[].tool_calls[].function.parsed",
    )
    assert found.messages[0] == {"role": "user", "content": "x"}
    assert found.messages[2] == {"role": "assistant", "content": "y"}
    assert chat(messages=ASK).ignored == ()


def test_tools():
    assert chat(tools=[TOOL]).tools == [TOOL]
    bare = {"type": "function", "function": {"name": "now", "strict": True, "parameters": None}}
    expected = {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
    }
    assert chat(tools=[bare]).tools == [expected]
    assert chat(tools=[]) == chat()
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
        assert refused(tools=value).startswith(message)
    large = {**FUNCTION, "parameters": {"enum": ["x" * 70_000]}}
    assert refused(tools=[{"type": "function", "function": large}]).startswith(
        "tools[0].function.parameters: must be"
    )


def test_tool_choice():
    named = {"type": "function", "function": {"name": "look_up"}}
    for value, expected in (
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        (named, "function:look_up"),
    ):
        assert chat(tools=[TOOL], tool_choice=value).tool_choice == expected
    assert chat(tool_choice="none").tool_choice == "none"
    assert not chat(tools=[TOOL], parallel_tool_calls=False).parallel_tool_calls
    for value, message in (
        ("any", "tool_choice: must be auto, none, required or"),
        ({"type": "function"}, "tool_choice.function: must be a JSON object"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools: must be a JSON object"),
        (
            {"type": "function", "function": {"name": "x"}},
            "tool_choice.function.name: must be the name of one of",
        ),
    ):
        assert refused(tools=[TOOL], tool_choice=value).startswith(message)
    assert refused(tool_choice="required") == "tool_choice: is 'required' and tools are missing"


def test_allowed_tools():
    """Only these are told to the model; the names are those of tools, in either spelling."""
    now = {"type": "function", "function": {"name": "now"}}
    chosen = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [now]}}
    found = chat(tools=[TOOL, now, CUSTOM], tool_choice=chosen)
    assert [tool["function"]["name"] for tool in found.tools] == [
        "now"
    ] and found.tool_choice == "required"
    chosen["allowed_tools"] |= {
        "mode": "auto",
        "tools": [{"type": "custom", "custom": {"name": "sums"}}],
    }
    assert [
        tool["function"]["name"] for tool in chat(tools=[TOOL, CUSTOM], tool_choice=chosen).tools
    ] == ["sums"]
    for wrong, message in (
        (
            {"mode": "any", "tools": [now]},
            "tool_choice.allowed_tools.mode: must be auto or required, got 'any'",
        ),
        (
            {"mode": "auto", "tools": []},
            "tool_choice.allowed_tools.tools: must be a list of 1 to 128",
        ),
        (
            {"mode": "auto", "tools": [now]},
            "tool_choice.allowed_tools.tools[0].function.name: must be the name",
        ),
    ):
        assert refused(
            tools=[TOOL], tool_choice={"type": "allowed_tools", "allowed_tools": wrong}
        ).startswith(message)


def test_custom_tools():
    """They are told as functions with one text, and their grammars are kept beside."""
    found = chat(tools=[TOOL, CUSTOM, {"type": "custom", "custom": {"name": "free"}}])
    assert found.custom == {"sums": {"regex": "[0-9]+"}, "free": None}
    told = found.tools[1]["function"]
    assert told["parameters"]["required"] == ["input"] and "[0-9]+" in str(told["parameters"])
    named = {"type": "custom", "custom": {"name": "sums"}}
    assert chat(tools=[CUSTOM], tool_choice=named).tool_choice == "function:sums"
    call = {"id": "a", "type": "custom", "custom": {"name": "sums", "input": "12"}}
    (message,) = chat(messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    assert message["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "sums", "arguments": {"input": "12"}}}
    ]
    for form, message in (
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
        assert refused(
            tools=[{"type": "custom", "custom": {"name": "x", "format": form}}]
        ).startswith(message)


def test_the_old_names_of_tools():
    found = chat(functions=[FUNCTION], function_call={"name": "look_up"})
    assert found.old_calls and found.tools == [TOOL] and found.tool_choice == "function:look_up"
    assert (
        not found.parallel_tool_calls
        and chat(functions=[FUNCTION], function_call="none").tool_choice == "none"
    )
    given = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "look_up", "arguments": '{"city": "Rome"}'},
        },
        {"role": "function", "name": "look_up", "content": "sun"},
    ]
    called, result = chat(messages=given).messages[1:]
    assert called["tool_calls"][0]["function"] == {"name": "look_up", "arguments": {"city": "Rome"}}
    assert result == {
        "role": "tool",
        "name": "look_up",
        "content": "sun",
        "tool_call_id": called["tool_calls"][0]["id"],
    }
    assert refused(functions=[FUNCTION], tools=[TOOL]).startswith(
        "tools: and functions are its new and its old name"
    )
    assert refused(functions=[FUNCTION], tool_choice="auto").startswith(
        "tool_choice: and functions"
    )
    assert refused(functions=[FUNCTION], function_call="any").startswith(
        "function_call: must be auto, none or"
    )
    assert refused(functions=[FUNCTION], function_call={"name": "x"}).startswith(
        "function_call.name: must be the name"
    )
    body = chat_answer.response(
        HEAD,
        found,
        None,
        [FinishedChoice(0, None, "tool_calls", calls=[ToolCall("a", "look_up", "{}")])],
        USAGE,
    )
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
    assert choice["message"]["function_call"] == {"name": "look_up", "arguments": "{}"}


def test_a_form_of_the_text_says_nothing_of_a_call():
    form = {"response_format": {"type": "json_object"}, "tools": [TOOL]}
    assert chat(**form).params.structured_outputs == {"json_object": True}
    for choice in ("required", {"type": "function", "function": {"name": "look_up"}}):
        assert chat(**form, tool_choice=choice).params.structured_outputs is None
        assert refused(response_format={"type": "x"}, tools=[TOOL], tool_choice=choice).startswith(
            "response_format.type"
        )
        asked = chat(structured_outputs={"regex": "a"}, tools=[TOOL], tool_choice=choice)
        # of the whole answer; prompting.py refuses it
        assert asked.params.structured_outputs == {"regex": "a"}


def test_template_options():
    given = {"chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": False}
    assert chat(**given).template_options == {
        "enable_thinking": False,
        "add_generation_prompt": False,
    }
    assert chat(reasoning_effort="low", chat_template="{{ x }}").template_options == {
        "add_generation_prompt": True, "chat_template": "{{ x }}", "reasoning_effort": "low",
    }  # fmt: skip
    goes_on = {"add_generation_prompt": False, "continue_final_message": True}
    assert chat(continue_final_message=True).template_options == goes_on
    assert (
        chat(continue_final_message=True, add_generation_prompt=False).template_options == goes_on
    )
    for name in (
        "messages",
        "tools",
        "self",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
    ):
        assert refused(chat_template_kwargs={name: 1}).startswith(f"chat_template_kwargs.{name}: ")
    assert refused(chat_template_kwargs=[1]).startswith(
        "chat_template_kwargs: must be a JSON object"
    )
    assert refused(add_generation_prompt=1).startswith("add_generation_prompt: ")
    assert refused(continue_final_message=True, add_generation_prompt=True).startswith(
        "continue_final_message: needs"
    )
    assert (
        refused(chat_template="x" * 65_537)
        == "chat_template: must hold at most 65536 characters, got 65537"
    )
    assert refused(reasoning_effort=3).startswith("reasoning_effort: must be a string")


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
    request: ChatRequest, *answers: FinishedChoice, head: ResponseHead = HEAD, usage: Usage = USAGE
) -> dict[str, Any]:
    body = chat_answer.response(head, request, None, answers, usage)
    assert json.loads(json.dumps(body, allow_nan=False)) == body
    check(ChatCompletion, body)
    return body


def check(kind: Any, body: dict[str, Any]) -> None:
    """The client's own type takes it, but for ends that OpenAI has not."""
    body = json.loads(json.dumps(body))
    for choice in body["choices"]:
        choice["finish_reason"] = {"timeout": "length", "abort": "length"}.get(
            *[choice["finish_reason"]] * 2
        )
    assert unknown_client_fields(kind, body) <= OURS


def test_an_answer_in_full():
    request = chat(n=2, logprobs=True, top_logprobs=2)
    body = respond(request, answer(), answer(1, finish_reason="stop", stop_reason="END"))
    assert {
        name: body[name]
        for name in ("id", "object", "created", "model", "system_fingerprint", "usage")
    } == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "quill",
        "system_fingerprint": "quire-0",
        "usage": USED,
    }
    first, second = body["choices"]
    assert first["message"] == {"role": "assistant", "content": "Hi you\ufffd", "reasoning": None}
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
    assert body["prompt_logprobs"] is body["prompt_token_ids"] is first["token_ids"] is None
    named = respond(chat(logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True), answer())[
        "choices"
    ][0]["logprobs"]
    assert [entry["token"] for entry in named["content"]] == [
        "token_id:1",
        "token_id:9",
        "token_id:5",
    ]
    assert named["content"][0]["top_logprobs"][1]["token"].startswith("token_id:")
    assert named["content"][0]["bytes"] == [72, 105]


def test_logprobs_that_were_not_asked_for():
    assert respond(chat(), answer(logprobs=None))["choices"][0]["logprobs"] is None
    only = respond(chat(logprobs=True), answer())
    assert [token["top_logprobs"] for token in only["choices"][0]["logprobs"]["content"]] == [
        [],
        [],
        [],
    ]


def test_tokens_without_a_tokenizer():
    bare = FinishedChoice(0, "", "stop", token_ids=[7], logprobs=[{7: Logprob(-0.5, 1)}])
    (entry,) = respond(chat(logprobs=True, top_logprobs=1), bare)["choices"][0]["logprobs"][
        "content"
    ]
    assert (entry["token"], entry["bytes"]) == ("token_id:7", None)


def test_calls_thoughts_and_numbers_of_tokens():
    calls = [ToolCall("a", "look_up", '{"city": "Rome"}'), ToolCall("b", "now", "{}")]
    whole = FinishedChoice(0, None, "tool_calls", "Hm.", calls, token_ids=[4, 5])
    head = replace(HEAD, prompts=[AnsweredPrompt("x", [1, 2], [None, {2: Logprob(-1.0, 3, "as")}])])
    request = chat(tools=[TOOL], return_token_ids=True, prompt_logprobs=0)
    body = respond(request, whole, head=head, usage=Usage(2, 2))
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
    assert "completion_tokens_details" not in body["usage"]  # nothing was thought


def test_thoughts_that_are_not_to_be_seen():
    """They are left out, also of a stream, and still counted."""
    request = chat(include_reasoning=False)
    usage = Usage(2, 5, 0, 3)
    body = respond(request, FinishedChoice(0, "So.", "stop", "Hm."), usage=usage)
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "So.",
        "reasoning": None,
    }
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    parts = [
        ChoicePart(0, [Thought("Hm")]),
        ChoicePart(0, [Thought("."), Said("So")]),
        ChoicePart(0, [Said(".")], "stop"),
    ]
    deltas = [
        chunk["choices"][0]["delta"]
        for chunk in chunks_of(streamed(request, parts))
        if chunk["choices"]
    ]
    assert [delta.get("content") for delta in deltas] == ["", "So", "."]
    assert not any("reasoning" in name for delta in deltas for name in delta)


def test_echo_says_again_what_the_answer_goes_on_from():
    messages = [*ASK, {"role": "assistant", "content": "Hi "}]
    request = chat(messages=messages, continue_final_message=True, echo=True, n=2)
    assert (
        respond(request, FinishedChoice(0, "you", "stop"))["choices"][0]["message"]["content"]
        == "Hi you"
    )
    assert (
        respond(chat(echo=True), FinishedChoice(0, "you", "stop"))["choices"][0]["message"][
            "content"
        ]
        == "you"
    )
    chunks = chunks_of(
        streamed(
            request,
            [
                ChoicePart(0, [Said("y")]),
                ChoicePart(1, [Said("y")]),
                ChoicePart(0, [Said("ou")], "stop"),
            ],
        )
    )
    texts = [(c["choices"][0]["index"], c["choices"][0]["delta"].get("content")) for c in chunks]
    assert texts == [(0, "Hi "), (1, "Hi "), (0, "y"), (1, "y"), (0, "ou")]


def streamed(
    request: ChatRequest, parts: list[ChoicePart], head: ResponseHead = HEAD, ends: bool = True
) -> bytes:
    stream = chat_answer.ChatStream(head, request, None)
    data = stream.begin(Usage(30, 0, 16))
    for number, part in enumerate(parts, 1):
        stream.set_usage(Usage(30, number, 16))
        data += stream.part(part)
    return data + stream.end(USAGE) if ends else data


def chunks_of(data: bytes) -> list[dict[str, Any]]:
    """The chunks of a stream that ends as it must."""
    assert data.endswith(DONE)
    found = []
    for block in data.removesuffix(DONE).decode().split("\n\n")[:-1]:
        assert block.startswith("data: ") and "\n" not in block
        found.append(json.loads(block.removeprefix("data: ")))
        if "error" not in found[-1]:
            check(ChatCompletionChunk, found[-1])
    return found


def test_the_end_token_comes_with_the_end_and_not_with_text():
    """Some clients make their text of the log-probabilities beside it, and would show `<|end|>`."""
    logprobs = [{4: Logprob(-0.1, 1, "Hi")}, {2: Logprob(-0.2, 1, "<|end|>")}]
    part = ChoicePart(0, [Said("Hi")], "stop", None, [4, 2], logprobs)
    request = chat(logprobs=True, return_token_ids=True, stream=True)
    chunks = [
        chunk["choices"][0] for chunk in chunks_of(streamed(request, [part])) if chunk["choices"]
    ]
    said = [
        (
            one["delta"].get("content"),
            [each["token"] for each in one["logprobs"]["content"]],
            one["token_ids"],
        )
        for one in chunks[1:]
    ]
    assert said == [("Hi", ["Hi"], [4]), ("", ["<|end|>"], [2])]
    assert [one["finish_reason"] for one in chunks] == [None, None, "stop"]
    # by a text: the token is of it
    stopped = replace(part, stop_reason="Hi", token_ids=[4], logprobs=logprobs[:1])
    assert (
        len([chunk for chunk in chunks_of(streamed(request, [stopped])) if chunk["choices"]]) == 2
    )


def put_together(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """By choice: what its chunks come to, as the body of an answer has it."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for one in chunk["choices"]:
            first = one["index"] not in choices
            made = choices.setdefault(
                one["index"], {"message": {"role": None, "content": ""}, "ids": [], "scores": []}
            )
            message = made["message"]
            delta = one["delta"]
            assert ("role" in delta) == first and "finish_reason" not in made
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
            made["ids"] += one.get("token_ids", [])
            made["scores"] += (one["logprobs"] or {"content": []})["content"]
            if one["finish_reason"] is not None:
                made |= {"finish_reason": one["finish_reason"], "stop_reason": one["stop_reason"]}
    return choices


@settings(max_examples=cases(200))
@given(written(scored=True), written(scored=True), st.randoms(use_true_random=False))
def test_the_deltas_of_a_stream_joined_are_the_whole_answer(one: Written, other: Written, random):
    request = chat(n=2, logprobs=True, top_logprobs=2, return_token_ids=True, stream=True)
    lines = [list(one.parts), [replace(part, index=1) for part in other.parts]]
    parts = []
    while any(lines):
        parts.append(random.choice([line for line in lines if line]).pop(0))
    chunks = chunks_of(
        streamed(request, parts, replace(HEAD, prompts=[AnsweredPrompt("x", [1, 2])]))
    )
    found = put_together(chunks)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [
        [1, 2],
        *[None] * (len(chunks) - 1),
    ]
    whole = respond(request, one.answer, replace(other.answer, index=1))["choices"]
    for choice in whole:
        made = found[choice["index"]]
        message = choice["message"]
        for call in made["message"].get("tool_calls", []):
            del call["index"]
        assert made["message"] == {
            name: value or "" if name in ("content", "reasoning") else value
            for name, value in message.items()
            if name != "reasoning_content"
            and (name != "reasoning" or value or "reasoning" in made["message"])
        }
        assert (made["finish_reason"], made["stop_reason"]) == (
            choice["finish_reason"],
            choice["stop_reason"],
        )
        assert (
            made["ids"] == choice["token_ids"] and made["scores"] == choice["logprobs"]["content"]
        )


def test_drafted_tokens_are_told_to_those_who_ask():
    part = ChoicePart(0, [Said("a")], None, None, [5, 6, 7], drafted=[0, 1])
    for options, told in (({}, None), ({"include_drafted": True}, [0, 1])):
        chunks = chunks_of(streamed(chat(stream=True, stream_options=options), [part]))
        assert [one["choices"][0].get("drafted") for one in chunks] == [None, told]


@settings(max_examples=cases(100))
@given(st.lists(written(), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_the_client_puts_a_stream_together(lines: list[Written], random):
    """With the client's own accumulator, whichever choice comes first and whatever the last part
    brings.
    """
    left = [[replace(part, index=index) for part in line.parts] for index, line in enumerate(lines)]
    parts = []
    while any(left):
        parts.append(random.choice([line for line in left if line]).pop(0))
    server = Server(streamed(chat(stream=True, n=len(lines)), parts))
    client = openai.OpenAI(api_key="k", base_url="http://127.0.0.1/v1", http_client=server.http)
    snapshot = None
    done = []
    with client.chat.completions.stream(model="quill", messages=ASK) as stream:
        for event in stream:
            if event.type == "chunk":
                snapshot = event.snapshot
            elif event.type == "tool_calls.function.arguments.done":
                done.append((event.name, event.arguments))
    assert parse(server.asked).delivery.stream and snapshot is not None
    for choice, line in zip(snapshot.choices, lines, strict=True):
        message = choice.message
        answer = line.answer
        assert (message.content or "") == (answer.content or "")
        calls = [
            (call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls or ()
        ]
        assert calls == [(call.id, call.name, call.arguments) for call in answer.calls]
        assert choice.finish_reason == answer.finish_reason
    assert sorted(done) == sorted(
        (call.name, call.arguments) for line in lines for call in line.answer.calls
    )
    server.data = msgspec.json.encode(respond(chat(n=len(lines)), *(line.answer for line in lines)))
    read = client.chat.completions.create(model="quill", messages=ASK).choices
    assert [one.message.content for one in read] == [line.answer.content for line in lines]
    assert [one.finish_reason for one in read] == [line.answer.finish_reason for line in lines]


def test_the_chunks_of_a_short_answer_in_full():
    parts = [
        ChoicePart(0, [Thought("Hm"), Thought("."), CallStart(0, "c", "f"), Arguments(0, "{")]),
        ChoicePart(0, [], None, None, [5, 6]),  # nothing to show yet
        ChoicePart(0, [Arguments(0, "}"), CallStart(1, "d", "g")], "tool_calls"),
    ]
    deltas = [chunk["choices"][0] for chunk in chunks_of(streamed(chat(stream=True), parts))]
    nothing = {"index": 0, "logprobs": None, "finish_reason": None}
    first = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}
    second = {"index": 1, "id": "d", "type": "function", "function": {"name": "g", "arguments": ""}}
    assert deltas == [
        {**nothing, "delta": {"role": "assistant", "content": ""}},
        {
            **nothing,
            "delta": {"reasoning": "Hm.", "reasoning_content": "Hm.", "tool_calls": [first]},
        },
        {
            **nothing,
            "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}, second]},
        },
        {**nothing, "delta": {}, "finish_reason": "tool_calls", "stop_reason": None},
    ]


def test_usage_in_a_stream():
    parts = [ChoicePart(0, [Said("a")]), ChoicePart(0, [Said("b")], "stop")]
    plain = chunks_of(streamed(chat(stream=True), parts))
    assert not any("usage" in chunk for chunk in plain) and all(chunk["choices"] for chunk in plain)
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = chunks_of(streamed(chat(**asked), parts))
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    assert (last["usage"], last["choices"]) == (USED, [])
    asked["stream_options"] = {"continuous_usage_stats": True}
    chunks = chunks_of(streamed(chat(**asked), parts))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2]
    asked["stream_options"] = {"continuous_usage_stats": True, "include_usage": True}
    chunks = chunks_of(streamed(chat(**asked), parts))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 12]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(500, "server_error"), (503, "overloaded_error"), (400, "invalid_request_error")],
)
def test_a_stream_that_fails_says_so_and_ends(status, kind):
    stream = chat_answer.ChatStream(HEAD, chat(stream=True), None)
    data = (
        stream.begin(Usage(3, 0))
        + stream.part(ChoicePart(0, [Said("a")]))
        + stream.fail(status, "it broke", "queue")
    )
    *_, last = chunks_of(data)
    assert last == {"error": {"message": "it broke", "type": kind, "param": "queue", "code": None}}
    client = openai.OpenAI(
        api_key="k", base_url="http://127.0.0.1/v1", http_client=Server(data).http
    )
    with pytest.raises(openai.APIError, match="it broke") as caught:
        list(client.chat.completions.create(model="quill", messages=ASK, stream=True))
    assert caught.value.param == "queue"
