"""Calls that are wanted, over HTTP, in the format that the chat template of a request shows."""

import json

import jsonschema
import pytest
from openai import OpenAI
from talk import bundled_server

from quire.serving.http.settings import Formats

SHOWN = {
    "qwen3_coder": "<function=",
    "glm45": "<arg_key>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>",
    "gemma4": "<|tool_call>call:",
    "lfm2": "<|tool_list_start|>",
    "hermes": "<tool_call>",
    "openai": "<|channel|>",
    "mistral": "[TOOL_CALLS]",
    "no format": "",
}
TEMPLATE = (
    "{# %s #}{%% if tools %%}{%% endif %%}{%% for m in messages %%}<user>{{ m.content }}{%% endfor %%}<assistant>%s"
)
SCHEMA = {
    "type": "object",
    "properties": {"to": {"enum": ["Bern", "Genf"]}, "seats": {"type": "integer", "minimum": 1, "maximum": 40}},
    "required": ["to", "seats"],
    "additionalProperties": False,
}
NONE = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "find_trains", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "parameters": NONE}},
]


@pytest.fixture(scope="module")
def client():
    with bundled_server(Formats()) as state, OpenAI(base_url=f"{state.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def called(client, template: str, choice, **more) -> list[tuple[str, str]]:
    asked = {
        "model": "quill",
        "messages": [{"role": "user", "content": "sort 3 1 2"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "max_tokens": 800,
        "temperature": 1,
        "seed": 4,
        "extra_body": {"chat_template": template},
        **more,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls" and not whole.message.content
    found = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    streamed: list[tuple[str, str]] = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.id:
                streamed.append((call.function.name, ""))
            streamed[-1] = (streamed[-1][0], streamed[-1][1] + (call.function.arguments or ""))
    assert streamed == found
    return found


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.slow
def test_wanted_calls_in_the_format_of_the_template(client, name):
    template = TEMPLATE % (SHOWN[name], "")
    named = {"type": "function", "function": {"name": "find_trains"}}
    for choice, more in ((named, {}), ("required", {}), ("required", {"parallel_tool_calls": False})):
        found = called(client, template, choice, **more)
        assert len(found) == 1 or choice == "required"
        for call, arguments in found:
            jsonschema.validate(json.loads(arguments), SCHEMA if call == "find_trains" else NONE)
            assert call == "find_trains" or choice == "required"


def test_a_thought_that_the_prompt_has_opened_ends_before_the_call(client):
    template = TEMPLATE % ("<tool_call></think>", "<think>")
    asked = {
        "model": "quill",
        "messages": [{"role": "user", "content": "sort 3 1 2"}],
        "tools": TOOLS,
        "tool_choice": "required",
        "max_tokens": 60,
        "extra_body": {"chat_template": template},
    }
    found = client.chat.completions.create(**asked).choices[0]
    assert found.message.reasoning_content and not found.message.content


def test_strict_tools_are_taken_whatever_their_schemas_are(client):
    asked = {
        "model": "quill",
        "messages": [{"role": "user", "content": "sort 3 1 2"}],
        "max_tokens": 60,
        "extra_body": {"chat_template": TEMPLATE % ("<function=", "")},
    }
    odd = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string", "pattern": "(?=x)"}}}}
    for schema in (SCHEMA, odd):
        function = {"name": "find_trains", "parameters": schema, "strict": True}
        found = client.chat.completions.create(**asked, tools=[{"type": "function", "function": function}]).choices[0]
        assert found.message.content or found.message.tool_calls
