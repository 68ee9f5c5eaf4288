"""Forced tool calls over HTTP, in the format that the request's chat template shows."""

import json

import jsonschema
import pytest
from openai import BadRequestError, OpenAI

from quire.serving.http.settings import Formats
from quire.tests.support.talk import bundled_server

CALL_MARKERS = {
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
    "{# %s #}{%% if tools %%}{%% endif %%}{%% for m in messages %%}<user>{{ m.content }}{%% "
    "endfor %%}<assistant>%s"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "to": {"enum": ["Bern", "Genf"]},
        "seats": {"type": "integer", "minimum": 1, "maximum": 40},
    },
    "required": ["to", "seats"],
    "additionalProperties": False,
}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "find_trains", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "parameters": NO_ARGUMENTS}},
]


@pytest.fixture(scope="module")
def client():
    with (
        bundled_server(Formats()) as state,
        OpenAI(base_url=f"{state.url}/v1", api_key="none", max_retries=0) as openai_client,
    ):
        yield openai_client


def check_calls(client, template: str, choice, **fields) -> list[tuple[str, str]]:
    request = {
        "model": "quill",
        "messages": [{"role": "user", "content": "sort 3 1 2"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "max_tokens": 800,
        "temperature": 1,
        "seed": 4,
        "extra_body": {"chat_template": template},
        **fields,
    }
    response = client.chat.completions.create(**request).choices[0]
    assert response.finish_reason == "tool_calls" and not response.message.content
    calls = [(call.function.name, call.function.arguments) for call in response.message.tool_calls]
    streamed: list[tuple[str, str]] = []
    for chunk in client.chat.completions.create(**request, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.id:
                streamed.append((call.function.name, ""))
            streamed[-1] = (streamed[-1][0], streamed[-1][1] + (call.function.arguments or ""))
    assert streamed == calls
    return calls


@pytest.mark.parametrize("name", CALL_MARKERS)
@pytest.mark.slow
def test_forced_calls_follow_the_template_format(client, name):
    template = TEMPLATE % (CALL_MARKERS[name], "")
    named_choice = {"type": "function", "function": {"name": "find_trains"}}
    for choice, fields in (
        (named_choice, {}),
        ("required", {}),
        ("required", {"parallel_tool_calls": False}),
    ):
        calls = check_calls(client, template, choice, **fields)
        assert len(calls) == 1 or choice == "required"
        for call, arguments in calls:
            jsonschema.validate(
                json.loads(arguments), SCHEMA if call == "find_trains" else NO_ARGUMENTS
            )
            assert call == "find_trains" or choice == "required"


def test_reasoning_opened_by_the_prompt_ends_before_a_forced_call(client):
    template = TEMPLATE % ("<tool_call></think>", "<think>")
    request = {
        "model": "quill",
        "messages": [{"role": "user", "content": "sort 3 1 2"}],
        "tools": TOOLS,
        "tool_choice": "required",
        "max_tokens": 60,
        "extra_body": {"chat_template": template},
    }
    choice = client.chat.completions.create(**request).choices[0]
    assert choice.message.reasoning_content and not choice.message.content


UNSUPPORTED_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "string", "pattern": "(?=x)"}}},
}


def complete_with_schema(
    client, schema, choice, strict: bool = False, call_marker: str = "<function=", **fields
):
    function = {"name": "find_trains", "parameters": schema, "strict": strict}
    return client.chat.completions.create(
        model="quill",
        messages=[{"role": "user", "content": "sort 3 1 2"}],
        max_tokens=30,
        tools=[TOOLS[1], {"type": "function", "function": function}],
        tool_choice=choice,
        extra_body={"chat_template": TEMPLATE % (call_marker, ""), **fields},
    ).choices[0]


@pytest.mark.parametrize("call_marker", ["<function=", ""])
def test_unsupported_tool_schema_is_rejected_only_if_strict(client, call_marker):
    """A strict schema is rejected with the request field's name; without `strict` the arguments are
    any object, for `auto` and `required` alike.
    """
    named_choice = {"type": "function", "function": {"name": "find_trains"}}
    for choice in ("required", named_choice, *(["auto"] if call_marker else [])):
        assert complete_with_schema(
            client, UNSUPPORTED_SCHEMA, choice, call_marker=call_marker
        ).message
        if choice != "required":
            with pytest.raises(BadRequestError, match="look-around") as caught:
                complete_with_schema(
                    client, UNSUPPORTED_SCHEMA, choice, True, call_marker
                ) if choice != "auto" else complete_with_strict_tool(client)
            assert caught.value.param in (
                "tools[1].function.parameters",
                "tools[0].function.parameters",
            )


def complete_with_strict_tool(client):
    """A request with one strict tool, whose schema constrains calls under tool_choice `auto`."""
    function = {"name": "find_trains", "parameters": UNSUPPORTED_SCHEMA, "strict": True}
    return client.chat.completions.create(
        model="quill",
        messages=[{"role": "user", "content": "sort 3 1 2"}],
        tools=[{"type": "function", "function": function}],
        extra_body={"chat_template": TEMPLATE % ("<function=", "")},
    )


UNSUPPORTED_PLACE = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
}
INVALID_SCHEMAS: list[tuple[str, dict, str]] = [
    (
        "chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": UNSUPPORTED_PLACE}}},
        "response_format.json_schema.schema",
    ),
    (
        "chat/completions",
        {"response_format": {"type": "json_object", "schema": UNSUPPORTED_PLACE}},
        "response_format.schema",
    ),
    (
        "chat/completions",
        {"response_format": {"type": "json", "value": UNSUPPORTED_PLACE}},
        "response_format.value",
    ),
    (
        "chat/completions",
        {"response_format": {"type": "regex", "value": "("}},
        "response_format.value",
    ),
    (
        "chat/completions",
        {"response_format": {"type": "json_object", "schema": 5}},
        "response_format.schema",
    ),
    ("chat/completions", {"response_format": {"type": "json"}}, "response_format.value"),
    ("chat/completions", {"structured_outputs": {"json": UNSUPPORTED_PLACE}}, "structured_outputs"),
    ("chat/completions", {"guided_json": UNSUPPORTED_PLACE}, "guided_json"),
    ("completions", {"response_format": {"type": "regex", "value": "("}}, "response_format.value"),
    (
        "responses",
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": UNSUPPORTED_PLACE}}},
        "text.format.schema",
    ),
    (
        "responses",
        {
            "tools": [
                {"type": "function", "name": "f", "parameters": UNSUPPORTED_PLACE, "strict": True}
            ],
            "tool_choice": {"type": "function", "name": "f"},
            "chat_template": TEMPLATE % ("", ""),
        },
        "tools[0].parameters",
    ),
    (
        "messages",
        {
            "output_config": {"format": {"type": "json_schema", "schema": UNSUPPORTED_PLACE}},
            "max_tokens": 5,
        },
        "output_config.format.schema",
    ),
]


@pytest.mark.parametrize(("path", "fields", "param"), INVALID_SCHEMAS)
def test_schema_errors_name_the_request_field(client, path, fields, param):
    turn = [{"role": "user", "content": "x"}]
    prompt = {"completions": {"prompt": "x"}, "responses": {"input": "x"}}.get(
        path, {"messages": turn}
    )
    with pytest.raises(BadRequestError) as caught:
        client.post(f"/{path}", body={"model": "quill", **prompt, **fields}, cast_to=object)
    error_text = json.dumps(caught.value.body)
    assert f"{param}: " in error_text or f'"{param}"' in error_text, error_text


def test_response_format_aliases(client):
    """`json_object` with a schema, and the type and value of huggingface_hub."""
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for response_format, expected in (
        ({"type": "json_object", "schema": schema}, {"a": 1}),
        ({"type": "json", "value": schema}, {"a": 1}),
        ({"type": "json", "value": json.dumps(schema)}, {"a": 1}),
        ({"type": "json_schema", "value": {"name": "n", "schema": schema}}, {"a": 1}),
        ({"type": "regex", "value": "[7]{3}"}, 777),
    ):
        completion = client.chat.completions.create(
            model="quill",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=60,
            response_format=response_format,
            extra_body={"seed": 1},
        )
        assert json.loads(completion.choices[0].message.content) == expected
