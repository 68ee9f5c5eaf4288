"""What OpenAI's two older endpoints have in common: which fields there are, and what the common
ones say.
"""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.serving.api.errors import RequestError
from quire.serving.api.params import SamplingParams, Terms
from quire.serving.protocol import chat as chats
from quire.serving.protocol import completion as completions
from quire.serving.protocol.answers.answer import Delivery
from quire.serving.protocol.fields import ABSENT, LABELS, sampling_fields
from quire.tests.support.answers import replace_random_value
from quire.tests.support.cases import cases

VALUES: dict[str, Any] = {  # a value for each sampling field, as JSON has it
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


def chat(**fields):
    return chats.parse(BASE[chats] | fields)


def completion(**fields):
    return completions.parse(BASE[completions] | fields)


def refused(parse, **fields) -> str:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


both = pytest.mark.parametrize("parse", [chat, completion])
modules = pytest.mark.parametrize(("parse", "module"), [(chat, chats), (completion, completions)])


@both
def test_every_sampling_field_is_applied(parse):
    assert set(VALUES) == set(sampling_fields("chat"))
    # without it there is no place for `logprob_token_ids`
    told = {"logprobs": True if parse is chat else 0}
    expected = SamplingParams(**VALUES, logprobs=0)
    assert parse(**VALUES, **told).params == expected
    for name, value in VALUES.items():
        assert getattr(parse(**told, **{name: value}).params, name) == getattr(expected, name)
    assert refused(parse, logprob_token_ids=[5]).startswith("logprob_token_ids: needs logprobs")
    assert parse(logprob_token_ids=[]).params.logprob_token_ids == ()


def neutral(module: Any) -> dict[str, Any]:
    return getattr(module, "NEUTRAL", {})


@modules
def test_null_is_as_if_not_given(parse, module):
    assert parse(**dict.fromkeys({*module.FIELDS, *neutral(module)} - set(BASE[module]))) == parse()


@both
def test_labels_have_no_effect(parse):
    assert parse(**{name: {"any": ["thing"]} for name in LABELS}) == parse()


@modules
def test_what_is_not_implemented_is_refused_by_name(parse, module):
    for name, nothing in neutral(module).items():
        assert parse(**{name: nothing}) == parse()
        assert refused(parse, **{name: "x"}).startswith(f"{name}: {ABSENT}; got 'x'")
    assert refused(parse, temprature=1) == "temprature: unknown field; did you mean 'temperature'?"
    assert refused(parse, n_predict=1) == "n_predict: unknown field; here it is 'max_tokens'"
    assert refused(parse, grammar="x").startswith(
        "grammar: unknown field; a request brings it: structured_outputs"
    )
    for name in ("guided_tree", "prompt_embeds", "image"):
        assert refused(parse, **{name: {}}).startswith(f"{name}: unknown field")


@both
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
def test_the_old_names_of_forms(parse, old, form):
    assert (
        parse(**{"guided_decoding_backend": "auto"} | old).params
        == parse(structured_outputs=form).params
    )


@both
def test_old_names_of_forms_that_contradict(parse):
    why = "guided_regex: is the old name of structured_outputs.regex, and they differ; leave it out"
    assert refused(parse, guided_regex="a", structured_outputs={"regex": "b"}) == why
    assert "must have exactly one of" in refused(parse, guided_regex="a", guided_choice=["a"])
    assert refused(parse, guided_regex="a", structured_outputs=5).startswith(
        "structured_outputs: must be an object"
    )
    assert "and structured_outputs say the same" in refused(
        parse, guided_regex="a", response_format={"type": "json_object"}
    )


@both
def test_wrong_values_are_refused_by_name(parse):
    assert refused(parse, temperature=-1).startswith("temperature: ")
    assert refused(parse, stop=["a", ""]).startswith("stop[1]: ")
    assert refused(parse, logit_bias={"x": 1}).startswith("logit_bias: ")
    assert refused(parse, model=5) == "model: must be a string, got 5"
    for body in (None, [], "x", 5):
        with pytest.raises(RequestError, match="body: must be a JSON object"):
            (chats if parse is chat else completions).parse(body)


@both
def test_how_an_answer_is_sent(parse):
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
@both
def test_wrong_delivery_and_terms(parse, fields, message):
    assert refused(parse, **fields).startswith(message)


@both
def test_terms_and_truncation(parse):
    assert parse().terms == Terms()
    given = parse(priority=-3, cache_salt="mine", timeout=1.5, truncate_prompt_tokens=7)
    assert given.terms == Terms(priority=-3, cache_salt="mine", timeout=1.5)
    assert given.truncate_prompt_tokens == 7
    assert parse(truncate_prompt_tokens=-1).truncate_prompt_tokens == -1
    assert parse().truncate_prompt_tokens is None
    for side in ("left", "right"):
        assert parse(truncate_prompt_tokens=7, truncation_side=side).truncation_side == side
    assert given.truncation_side == "left"


@both
def test_response_format(parse):
    def structure(**fields):
        return parse(**fields).params.structured_outputs

    assert structure() is None and structure(response_format={"type": "text"}) is None
    assert structure(response_format={"type": "json_object"}) == {"json_object": True}
    tag = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
    found = structure(response_format={"type": "structural_tag", **tag})
    assert found == SamplingParams(structured_outputs={"structural_tag": tag}).structured_outputs
    named = {"name": "place", "description": "Where?", "schema": SCHEMA, "strict": True}
    found = structure(response_format={"type": "json_schema", "json_schema": named})
    assert json.loads(found["json"]) == SCHEMA
    assert structure(structured_outputs={"choice": ["a", "b"]}) == {"choice": ("a", "b")}
    text = {"type": "text"}
    assert structure(response_format=text, structured_outputs={"regex": "a"}) == {"regex": "a"}


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
@both
def test_wrong_response_formats(parse, form, message):
    assert refused(parse, response_format=form).startswith(message)


@both
def test_a_form_is_asked_for_once(parse):
    for form in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}}):
        told = refused(parse, response_format=form, structured_outputs={"regex": "a"})
        assert told.startswith("response_format: and structured_outputs say the same")


@settings(max_examples=cases(400))
@given(st.data())
def test_no_body_raises_anything_else(data):
    """One place of a good body replaced by anything."""
    function = {"name": "f", "description": "d", "parameters": SCHEMA}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chatty = {
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
    own = (
        chatty
        if module is chats
        else {"prompt": ["a", [1, 2]], "logprobs": 2, "echo": True, "best_of": 4}
    )
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    values = {
        name: value
        for name, value in VALUES.items()
        if name not in ("structured_outputs", "prompt_logprobs")
    }
    body = json.loads(
        json.dumps(values | own | {"response_format": form, "stream": False, "timeout": 3})
    )
    module.parse(body)
    replace_random_value(data, body)
    try:
        module.parse(body)
    except RequestError as error:
        assert "\n" not in error.message
