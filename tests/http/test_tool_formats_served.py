"""Calls that are wanted, over HTTP, in the format that the chat template of a request shows."""

import json

import jsonschema
import pytest
from openai import BadRequestError, OpenAI

from quire.serving.http.settings import Formats
from quire.tests.support.talk import bundled_server

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
NONE = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "find_trains", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "parameters": NONE}},
]


@pytest.fixture(scope="module")
def client():
    with (
        bundled_server(Formats()) as state,
        OpenAI(base_url=f"{state.url}/v1", api_key="none", max_retries=0) as made,
    ):
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
    for choice, more in (
        (named, {}),
        ("required", {}),
        ("required", {"parallel_tool_calls": False}),
    ):
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


ODD = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "string", "pattern": "(?=x)"}}},
}


def asked_with(client, schema, choice, strict: bool = False, shown: str = "<function=", **more):
    function = {"name": "find_trains", "parameters": schema, "strict": strict}
    return client.chat.completions.create(
        model="quill",
        messages=[{"role": "user", "content": "sort 3 1 2"}],
        max_tokens=30,
        tools=[TOOLS[1], {"type": "function", "function": function}],
        tool_choice=choice,
        extra_body={"chat_template": TEMPLATE % (shown, ""), **more},
    ).choices[0]


@pytest.mark.parametrize("shown", ["<function=", ""])
def test_a_schema_that_cannot_be_kept_is_treated_alike_by_auto_and_required(client, shown):
    """A strict one is refused by its name in the request; without `strict` the arguments are any
    object.
    """
    named = {"type": "function", "function": {"name": "find_trains"}}
    for choice in ("required", named, *(["auto"] if shown else [])):
        assert asked_with(client, ODD, choice, shown=shown).message
        if choice != "required":
            with pytest.raises(BadRequestError, match="look-around") as caught:
                asked_with(client, ODD, choice, True, shown) if choice != "auto" else strict_alone(
                    client
                )
            assert caught.value.param in (
                "tools[1].function.parameters",
                "tools[0].function.parameters",
            )


def strict_alone(client):
    """A call of one strict tool, which `auto` holds to its schema."""
    function = {"name": "find_trains", "parameters": ODD, "strict": True}
    return client.chat.completions.create(
        model="quill",
        messages=[{"role": "user", "content": "sort 3 1 2"}],
        tools=[{"type": "function", "function": function}],
        extra_body={"chat_template": TEMPLATE % ("<function=", "")},
    )


PLACE = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
}
WRONG: list[tuple[str, dict, str]] = [
    (
        "chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": PLACE}}},
        "response_format.json_schema.schema",
    ),
    (
        "chat/completions",
        {"response_format": {"type": "json_object", "schema": PLACE}},
        "response_format.schema",
    ),
    (
        "chat/completions",
        {"response_format": {"type": "json", "value": PLACE}},
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
    ("chat/completions", {"structured_outputs": {"json": PLACE}}, "structured_outputs"),
    ("chat/completions", {"guided_json": PLACE}, "guided_json"),
    ("completions", {"response_format": {"type": "regex", "value": "("}}, "response_format.value"),
    (
        "responses",
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": PLACE}}},
        "text.format.schema",
    ),
    (
        "responses",
        {
            "tools": [{"type": "function", "name": "f", "parameters": PLACE, "strict": True}],
            "tool_choice": {"type": "function", "name": "f"},
            "chat_template": TEMPLATE % ("", ""),
        },
        "tools[0].parameters",
    ),
    (
        "messages",
        {"output_config": {"format": {"type": "json_schema", "schema": PLACE}}, "max_tokens": 5},
        "output_config.format.schema",
    ),
]


@pytest.mark.parametrize(("path", "fields", "param"), WRONG)
def test_errors_name_the_field_that_was_sent(client, path, fields, param):
    turn = [{"role": "user", "content": "x"}]
    prompt = {"completions": {"prompt": "x"}, "responses": {"input": "x"}}.get(
        path, {"messages": turn}
    )
    with pytest.raises(BadRequestError) as caught:
        client.post(f"/{path}", body={"model": "quill", **prompt, **fields}, cast_to=object)
    told = json.dumps(caught.value.body)
    assert f"{param}: " in told or f'"{param}"' in told, told


def test_other_spellings_of_a_form(client):
    """`json_object` with a schema, and huggingface_hub's type and value."""
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for form, right in (
        ({"type": "json_object", "schema": schema}, {"a": 1}),
        ({"type": "json", "value": schema}, {"a": 1}),
        ({"type": "json", "value": json.dumps(schema)}, {"a": 1}),
        ({"type": "json_schema", "value": {"name": "n", "schema": schema}}, {"a": 1}),
        ({"type": "regex", "value": "[7]{3}"}, 777),
    ):
        found = client.chat.completions.create(
            model="quill",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=60,
            response_format=form,
            extra_body={"seed": 1},
        )
        assert json.loads(found.choices[0].message.content) == right
