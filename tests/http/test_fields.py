"""Fields that the completion endpoints of OpenAI's protocol have in common."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.serving.api.errors import RequestError
from quire.serving.api.params import RequestOptions, SamplingParams
from quire.serving.protocol import chat as chats
from quire.serving.protocol import completion as completions
from quire.serving.protocol.answers.answer import Delivery
from quire.serving.protocol.fields import ABSENT, LABELS, sampling_fields
from quire.tests.support.answers import replace_random_value
from quire.tests.support.cases import cases

SAMPLING_VALUES: dict[str, Any] = {  # a JSON value for each sampling field
    "n": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": -1,
    "repetition_penalty": 1.1,
    "temperature": 0,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "seed": 7,
    "stop": ["a", "b"],
    "stop_token_ids": [3],
    "ignore_eos": True,
    "max_tokens": 9,
    "min_tokens": 2,
    "prompt_logprobs": 1,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "logit_bias": {"5": -1.5},
    "allowed_token_ids": [1, 2],
    "bad_words": ["x"],
    "structured_outputs": {"regex": "a+"},
    "logprob_token_ids": [3, 5],
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
MODULES = [chats, completions]
BASE = {chats: {"messages": [{"role": "user", "content": "Hi"}]}, completions: {"prompt": "Once"}}


def parse_chat(**fields):
    return chats.parse(BASE[chats] | fields)


def parse_completion(**fields):
    return completions.parse(BASE[completions] | fields)


def rejection_message(parse, **fields) -> str:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


both_endpoints = pytest.mark.parametrize("parse", [parse_chat, parse_completion])
both_modules = pytest.mark.parametrize(
    ("parse", "module"), [(parse_chat, chats), (parse_completion, completions)]
)


@both_endpoints
def test_every_sampling_field_is_applied(parse):
    assert set(SAMPLING_VALUES) == set(sampling_fields("chat"))
    # `logprob_token_ids` needs `logprobs`
    logprobs_field = {"logprobs": True if parse is parse_chat else 0}
    expected = SamplingParams(**SAMPLING_VALUES, logprobs=0)
    assert parse(**SAMPLING_VALUES, **logprobs_field).params == expected
    for name, value in SAMPLING_VALUES.items():
        assert getattr(parse(**logprobs_field, **{name: value}).params, name) == getattr(
            expected, name
        )
    assert rejection_message(parse, logprob_token_ids=[5]).startswith(
        "logprob_token_ids: needs logprobs"
    )
    assert parse(logprob_token_ids=[]).params.logprob_token_ids == ()


def neutral_fields(module: Any) -> dict[str, Any]:
    return getattr(module, "NEUTRAL", {})


@both_modules
def test_null_fields_equal_absent_fields(parse, module):
    assert (
        parse(**dict.fromkeys({*module.FIELDS, *neutral_fields(module)} - set(BASE[module])))
        == parse()
    )


@both_endpoints
def test_metadata_fields_have_no_effect(parse):
    assert parse(**{name: {"any": ["thing"]} for name in LABELS}) == parse()


@both_modules
def test_unimplemented_fields_are_rejected_by_name(parse, module):
    for name, neutral_value in neutral_fields(module).items():
        assert parse(**{name: neutral_value}) == parse()
        assert rejection_message(parse, **{name: "x"}).startswith(f"{name}: {ABSENT}; got 'x'")
    assert (
        rejection_message(parse, temprature=1)
        == "temprature: unknown field; did you mean 'temperature'?"
    )
    assert (
        rejection_message(parse, n_predict=1) == "n_predict: unknown field; here it is 'max_tokens'"
    )
    assert rejection_message(parse, grammar="x").startswith(
        "grammar: unknown field; use structured_outputs or response_format"
    )
    for name in ("guided_tree", "prompt_embeds", "image"):
        assert rejection_message(parse, **{name: {}}).startswith(f"{name}: unknown field")


@both_endpoints
@pytest.mark.parametrize(
    ("old", "form"),
    [
        ({"guided_json": {"type": "object"}}, {"json": {"type": "object"}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": "start: /a/"}, {"grammar": "start: /a/"}),
        ({"guided_json": "{}", "guided_whitespace_pattern": " ?"}, {"json": "{}", "whitespace_pattern": " ?"}),
        ({"guided_json_object": True}, {"json_object": True}),
        ({"guided_regex": "a+", "structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"guided_regex": None, "guided_decoding_backend": "guidance"}, None),
    ],
)  # fmt: skip
def test_guided_fields_are_aliases_of_structured_outputs(parse, old, form):
    assert (
        parse(**{"guided_decoding_backend": "auto"} | old).params
        == parse(structured_outputs=form).params
    )


@both_endpoints
def test_contradicting_guided_fields_are_rejected(parse):
    message = (
        "guided_regex: is the old name of structured_outputs.regex, and they differ; leave it out"
    )
    assert rejection_message(parse, guided_regex="a", structured_outputs={"regex": "b"}) == message
    assert "must have exactly one of" in rejection_message(
        parse, guided_regex="a", guided_choice=["a"]
    )
    assert rejection_message(parse, guided_regex="a", structured_outputs=5).startswith(
        "structured_outputs: must be an object"
    )
    assert "and structured_outputs say the same" in rejection_message(
        parse, guided_regex="a", response_format={"type": "json_object"}
    )


@both_endpoints
def test_invalid_values_are_rejected_by_name(parse):
    assert rejection_message(parse, temperature=-1).startswith("temperature: ")
    assert rejection_message(parse, stop=["a", ""]).startswith("stop[1]: ")
    assert rejection_message(parse, logit_bias={"x": 1}).startswith("logit_bias: ")
    assert rejection_message(parse, model=5) == "model: must be a string, got 5"
    for body in (None, [], "x", 5):
        with pytest.raises(RequestError, match="body: must be a JSON object"):
            (chats if parse is parse_chat else completions).parse(body)


@both_endpoints
def test_delivery_options(parse):
    assert (
        parse().delivery
        == parse(stream=False, stream_options=None, return_token_ids=False).delivery
        == Delivery()
    )
    assert (
        parse(stream=True).delivery
        == parse(stream=True, stream_options={}).delivery
        == Delivery(stream=True)
    )
    names = {"include_usage": "include_usage", "continuous_usage_stats": "continuous_usage"}
    for name, field in (names | {"include_drafted": "include_drafted"}).items():
        options = {name: True, "include_obfuscation": False}
        assert parse(stream=True, stream_options=options).delivery == Delivery(
            stream=True, **{field: True}
        )
    assert parse(return_token_ids=True).delivery == Delivery(return_token_ids=True)
    assert parse(request_id="a-B_1.:").delivery == Delivery(request_id="a-B_1.:")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stream": 0}, "stream: must be true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options: needs stream to be true"),
        ({"stream": True, "stream_options": [1]}, "stream_options: must be a JSON object"),
        (
            {"stream": True, "stream_options": {"include_usge": True}},
            "stream_options.include_usge: unknown field; did",
        ),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage: must be true or",
        ),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation: is",
        ),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs: cannot be streamed"),
        ({"return_token_ids": "yes"}, "return_token_ids: must be true or false"),
        ({"request_id": ""}, "request_id: must be 1 to 128 letters"),
        ({"request_id": "a b"}, "request_id: must be"),
        ({"request_id": "é"}, "request_id: must be"),
        ({"request_id": 5}, "request_id: must be"),
        ({"request_id": "x" * 129}, "request_id: must be"),
        ({"priority": 1001}, "priority: must be an integer from -1000 to 1000"),
        ({"priority": 0.5}, "priority: must be"),
        ({"cache_salt": ""}, "cache_salt: must be a string that is not empty"),
        ({"timeout": 0}, "timeout: must be"),
        ({"timeout": float("nan")}, "timeout: must be"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens: must be 1 or more, or -1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens: must be"),
        ({"truncation_side": "right"}, "truncation_side: needs truncate_prompt_tokens"),
        (
            {"truncation_side": "end", "truncate_prompt_tokens": 5},
            "truncation_side: must be left or right, got 'end'",
        ),
    ],
)
@both_endpoints
def test_invalid_delivery_and_request_options_are_rejected(parse, fields, message):
    assert rejection_message(parse, **fields).startswith(message)


@both_endpoints
def test_terms_and_truncation(parse):
    assert parse().request_options == RequestOptions()
    request = parse(priority=-3, cache_salt="mine", timeout=1.5, truncate_prompt_tokens=7)
    assert request.request_options == RequestOptions(priority=-3, cache_salt="mine", timeout=1.5)
    assert request.truncate_prompt_tokens == 7
    assert parse(truncate_prompt_tokens=-1).truncate_prompt_tokens == -1
    assert parse().truncate_prompt_tokens is None
    for side in ("left", "right"):
        assert parse(truncate_prompt_tokens=7, truncation_side=side).truncation_side == side
    assert request.truncation_side == "left"


@both_endpoints
def test_response_format(parse):
    def structured_outputs_for(**fields):
        return parse(**fields).params.structured_outputs

    assert (
        structured_outputs_for() is None
        and structured_outputs_for(response_format={"type": "text"}) is None
    )
    assert structured_outputs_for(response_format={"type": "json_object"}) == {"json_object": True}
    tag = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
    structured_outputs = structured_outputs_for(response_format={"type": "structural_tag", **tag})
    assert (
        structured_outputs
        == SamplingParams(structured_outputs={"structural_tag": tag}).structured_outputs
    )
    json_schema = {"name": "place", "description": "Where?", "schema": SCHEMA, "strict": True}
    structured_outputs = structured_outputs_for(
        response_format={"type": "json_schema", "json_schema": json_schema}
    )
    assert json.loads(structured_outputs["json"]) == SCHEMA
    assert structured_outputs_for(structured_outputs={"choice": ["a", "b"]}) == {
        "choice": ("a", "b")
    }
    text = {"type": "text"}
    assert structured_outputs_for(response_format=text, structured_outputs={"regex": "a"}) == {
        "regex": "a"
    }


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("json_object", "response_format: must be a JSON object, got 'json_object'"),
        (
            {},
            (
                "response_format.type: must be one of text, json_object, json_schema, json, regex, "
                "structural_tag, got"
            ),
        ),
        ({"type": "grammar"}, "response_format.type: must be one of text"),
        ({"type": "text", "schema": {}}, "response_format.schema: unknown field"),
        ({"type": "json_object", "schemas": {}}, "response_format.schemas: unknown field"),
        ({"type": "json", "schema": {}}, "response_format.schema: unknown field"),
        ({"type": "regex"}, "response_format.value: is missing"),
        ({"type": "json_schema"}, "response_format.json_schema: must be a JSON object, got None"),
        (
            {"type": "json_schema", "json_schema": {"name": "x"}},
            "response_format.json_schema.schema: must be a JSON",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {}, "sceme": 1}},
            "response_format.json_schema.sceme: unkn",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": "{"}},
            "response_format.json_schema.schema: must be a JSON",
        ),
    ],
)
@both_endpoints
def test_invalid_response_formats_are_rejected(parse, form, message):
    assert rejection_message(parse, response_format=form).startswith(message)


@both_endpoints
def test_response_format_excludes_structured_outputs(parse):
    for response_format in (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"schema": {}}},
    ):
        message = rejection_message(
            parse, response_format=response_format, structured_outputs={"regex": "a"}
        )
        assert message.startswith("response_format: and structured_outputs say the same")


@settings(max_examples=cases(400))
@given(st.data())
def test_mutated_bodies_raise_only_request_errors(data):
    """One value of a valid body is replaced by arbitrary data."""
    function = {"name": "f", "description": "d", "parameters": SCHEMA}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat_fields = {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": "b", "name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm."},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "chat_template_kwargs": {"x": 1},
        "logprobs": True,
        "top_logprobs": 2,
    }
    module = data.draw(st.sampled_from(MODULES))
    endpoint_fields = (
        chat_fields
        if module is chats
        else {"prompt": ["a", [1, 2]], "logprobs": 2, "echo": True, "best_of": 4}
    )
    response_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    values = {
        name: value
        for name, value in SAMPLING_VALUES.items()
        if name not in ("structured_outputs", "prompt_logprobs")
    }
    body = json.loads(
        json.dumps(
            values
            | endpoint_fields
            | {"response_format": response_format, "stream": False, "timeout": 3}
        )
    )
    module.parse(body)
    replace_random_value(data, body)
    try:
        module.parse(body)
    except RequestError as error:
        assert "\n" not in error.message
