"""Rewritten JSON schemas accept only values that are valid for the original, as jsonschema says."""

import json
import random
import re
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest

from quire.serving import parsing
from quire.serving.api.errors import RequestError
from quire.serving.request import schema_document
from quire.serving.request.grammar import limits
from quire.serving.request.grammar_body import build_body
from quire.serving.request.grammar_text import complete_grammar
from quire.serving.request.json_schema import rewrite_schema
from quire.serving.request.schema_document import UnsupportedSchema
from quire.serving.request.schema_negation import pattern_excluding
from quire.tests.support.cases import cases

TOKENIZER = llguidance.LLTokenizer("byte")
NAMES = ["a", "b", "c"]
SCALARS = [None, True, False, 0, 1, 2, 3, -1, 1.5, "", "a", "ab", "abc", "b"]


def random_schema(rng: random.Random, depth: int, definitions: str = "xy") -> Any:
    """Returns a random schema of the rewritten keywords, with few names and values."""

    def random_child() -> Any:
        return random_schema(rng, depth - 1, definitions)

    def random_properties(count: int) -> dict[str, Any]:
        return {name: random_child() for name in rng.sample(NAMES, rng.randint(1, count))}

    simple_options = [
        lambda: {
            "type": rng.choice(
                ["string", "integer", "number", "boolean", "null", "object", "array"]
            )
        },
        lambda: {"type": rng.sample(["string", "integer", "null", "object", "array"], 2)},
        lambda: {"enum": rng.sample(SCALARS, rng.randint(1, 4))},
        lambda: {"const": rng.choice(SCALARS)},
        lambda: {"minLength": rng.randint(0, 3), "maxLength": rng.randint(1, 4)},
        lambda: {"minimum": rng.randint(-2, 2)},
        lambda: {"exclusiveMaximum": rng.randint(-1, 3)},
        lambda: {"type": "string", "pattern": rng.choice(["^a", "b$", "^[ab]*$"])},
        lambda: {"required": rng.sample(NAMES, rng.randint(1, 2))},
        lambda: rng.choice([True, {}, {"type": "string", "format": "no-such-format"}]),
    ]
    if depth == 0:
        return rng.choice(simple_options)()
    options = [
        lambda: {"anyOf": [random_child() for _ in range(rng.randint(1, 3))]},
        lambda: {"oneOf": [random_child() for _ in range(rng.randint(1, 3))]},
        lambda: {"allOf": [random_child() for _ in range(2)]},
        lambda: {"not": random_child()},
        lambda: {"if": random_child(), "then": random_child(), "else": random_child()},
        lambda: {
            "type": "object",
            "properties": random_properties(3),
            "required": rng.sample(NAMES, rng.randint(0, 2)),
        },
        lambda: {
            "type": "object",
            "properties": random_properties(3),
            "additionalProperties": random_child(),
        },
        lambda: {
            "type": "object",
            "propertyNames": random_child(),
            "additionalProperties": random_child(),
        },
        lambda: {
            "type": "object",
            "properties": random_properties(2),
            "propertyNames": {"enum": rng.sample(NAMES, 2)},
        },
        lambda: {
            "type": "object",
            "properties": random_properties(3),
            "minProperties": rng.randint(0, 3),
        },
        lambda: {
            "type": "object",
            "properties": random_properties(3),
            "maxProperties": rng.randint(0, 2),
        },
        lambda: {"type": "object", "dependentRequired": {rng.choice(NAMES): rng.sample(NAMES, 2)}},
        lambda: {
            "type": "object",
            "dependentSchemas": random_properties(2),
            "properties": random_properties(2),
        },
        lambda: {
            "type": "object",
            "allOf": [{"properties": random_properties(2)}],
            "unevaluatedProperties": random_child(),
        },
        lambda: {
            "properties": random_properties(1),
            "anyOf": [{"properties": random_properties(2)}, {"required": ["a"]}],
            "unevaluatedProperties": False,
        },  # fmt: skip
        lambda: {
            "type": "array",
            "items": random_child(),
            "minItems": rng.randint(0, 2),
            "maxItems": 2.0,
        },
        lambda: {
            "type": "array",
            "prefixItems": [random_child(), random_child()],
            "items": random_child(),
        },
        lambda: {
            "type": "array",
            "contains": random_child(),
            "items": random_child(),
            "maxContains": rng.randint(1, 2),
        },
        lambda: {"type": "array", "contains": random_child(), "minContains": rng.randint(0, 2)},
        lambda: {"type": "array", "items": {"enum": rng.sample(SCALARS, 3)}, "uniqueItems": True},
        lambda: {
            "type": "array",
            "prefixItems": [random_child()],
            "unevaluatedItems": random_child(),
        },
        lambda: {"$ref": "#/$defs/" + rng.choice(definitions)},
        *simple_options[:3],
    ]
    return rng.choice(options)()


def random_document(rng: random.Random) -> dict[str, Any]:
    schema = random_schema(rng, rng.randint(1, 2))
    schema = schema if isinstance(schema, dict) else {}
    return schema | {"$defs": {"x": random_schema(rng, 1, "y"), "y": random_schema(rng, 0)}}


def random_value(rng: random.Random, depth: int) -> Any:
    choice = rng.random()
    if depth == 0 or choice < 0.3:
        return rng.choice(SCALARS)
    if choice < 0.7:
        return {
            name: random_value(rng, depth - 1)
            for name in rng.sample([*NAMES, "d"], rng.randint(0, 3))
        }
    return [random_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]


@pytest.mark.random
def test_rewritten_schema_accepts_no_more_than_the_original():
    rng = random.Random(0)
    num_accepted = 0
    num_refused = 0
    count = cases(300, 100)
    for _ in range(count):
        schema = random_document(rng)
        try:
            rewritten = rewrite_schema(schema)
        except UnsupportedSchema:
            num_refused += 1
            continue
        original_validator, rewritten_validator = (
            jsonschema.Draft202012Validator(any_schema) for any_schema in (schema, rewritten)
        )
        for _ in range(12):
            value = random_value(rng, 2)
            if rewritten_validator.is_valid(value):
                assert original_validator.is_valid(value), (schema, rewritten, value)
                num_accepted += 1
    assert num_accepted > count and num_refused < count // 10


def random_answer(rng: np.random.Generator, matcher: llguidance.LLMatcher) -> bytes | None:
    """Returns a random text of the grammar, or None if it is not complete in 200 bytes."""
    text = b""
    preferences = np.zeros(256, np.float64) + 1e-6
    preferences[[*b'{}[]":,abctruefalsn0123. ']] = 1
    preferences[[*b'"}]']] = 3
    for _ in range(200):
        if matcher.is_accepting() and rng.random() < 0.3:
            return text
        allowed = np.frombuffer(matcher.compute_logit_bias(), np.uint8)[:256] != 0
        if not allowed.any():
            return text if matcher.is_accepting() else None
        weights = preferences * allowed
        byte = int(rng.choice(256, p=weights / weights.sum()))
        assert matcher.consume_token(byte)
        text += bytes([byte])
    return None


def compile_schema(schema: dict[str, Any]) -> llguidance.LLMatcher:
    body = json.dumps(build_body({"json": json.dumps(schema)}))
    return llguidance.LLMatcher(
        TOKENIZER, complete_grammar(body, ""), log_level=0, limits=limits(1)
    )


@pytest.mark.random
def test_random_grammar_outputs_validate_against_the_schema():
    """jsonschema validates random texts that the grammar of a schema accepts."""
    rng = random.Random(1)
    numpy_rng = np.random.default_rng(1)
    num_valid = 0
    num_compiled = 0
    count = cases(60, 30)
    for _ in range(count):
        schema = random_document(rng)
        try:
            matcher = compile_schema(schema)
        except RequestError:
            continue
        if matcher.is_error():
            continue
        num_compiled += 1
        for _ in range(3):
            text = random_answer(numpy_rng, matcher.deep_copy())
            # llguidance accepts an additional property twice
            if text is not None and not has_duplicate_names(
                json.loads(text, object_pairs_hook=Members)
            ):
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
                num_valid += 1
    assert num_compiled > count // 2 and num_valid > count // 2


class Members(list):
    """The (name, value) pairs of a JSON object."""


def has_duplicate_names(value: Any) -> bool:
    """Returns whether any object has a name twice."""
    if isinstance(value, Members):
        return len({name for name, _ in value}) < len(value) or any(
            has_duplicate_names(member) for _, member in value
        )
    return isinstance(value, list) and any(map(has_duplicate_names, value))


def accepts(schema: dict[str, Any], value: Any) -> bool:
    matcher = compile_schema(schema)
    assert not matcher.is_error(), matcher.get_error()
    return (
        matcher.consume_tokens(list(json.dumps(value, ensure_ascii=False).encode()))
        and matcher.is_accepting()
    )


CAT = {
    "type": "object",
    "properties": {"kind": {"const": "cat", "default": "cat"}, "lives": {"type": "integer"}},
}
DOG = {
    "type": "object",
    "properties": {"kind": {"const": "dog", "default": "dog"}, "age": {"type": "integer"}},
}
PETS = {"$defs": {"Cat": CAT, "Dog": DOG}}
CHOICE = {
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    "discriminator": {"propertyName": "kind"},
}
SUPPORTED_SCHEMAS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "unknown formats": ({"type": "string", "format": "password"}, ["x", ""], [1]),
    "byte": ({"type": "string", "format": "byte", "maxLength": 3}, ["x"], ["abcd"]),
    "known format": ({"type": "string", "format": "ipv4"}, ["1.2.3.4"], ["x"]),
    "uniqueItems false": (
        {"type": "array", "items": {"const": 1}, "uniqueItems": False},
        [[1, 1]],
        [[2]],
    ),
    "uniqueItems": (
        {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True},
        [[], ["a", "b"], ["b", "a"], [1, "a", "b"]],
        [["a", "a"], ["c"]],
    ),
    "propertyNames": (
        {
            "type": "object",
            "propertyNames": {"pattern": "^[a-z]+$"},
            "additionalProperties": {"const": 1},
        },
        [{}, {"ab": 1}],
        [{"A": 1}, {"ab": 2}],
    ),
    "names of an enum": (
        {"type": "object", "propertyNames": {"enum": ["b", "a"]}},
        [{"b": 1}, {"b": 1, "a": []}],
        [{"c": 1}],
    ),
    "a default tag": (
        CHOICE | PETS,
        [{"kind": "cat", "lives": 9}, {"kind": "dog"}],
        [{"lives": 9}, {"kind": "cow"}, {}],
    ),
    "exactly one": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    "not an enum": (
        {"type": "string", "not": {"enum": ["", "no", "never"]}},
        ["n", "nov", "yes"],
        ["", "no", "never"],
    ),
    "not a type": ({"not": {"type": ["object", "array"]}}, [1, "x", None], [[], {}]),
    "if": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"const": 2}},
            "if": {"required": ["a"]},
            "then": {"required": ["b"]},
        },
        [{}, {"a": 1, "b": 2}, {"b": 2}],
        [{"a": 1}],
    ),
    "dependentRequired": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"b": ["a"]}},
        [{}, {"a": 1}, {"a": 1, "b": 1}],
        [{"b": 1}],
    ),
    "contains": (
        {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}},
        [[5], [6, 1]],
        [[], [1]],
    ),
    "unevaluatedProperties": (
        {
            "allOf": [{"$ref": "#/$defs/x"}],
            "properties": {"b": {}},
            "unevaluatedProperties": False,
            "$defs": {"x": {"type": "object", "properties": {"a": {}}}},
        },
        [{}, {"b": 1}],
        [{"c": 1}],
    ),
    "whole floats": ({"type": "array", "maxItems": 1.0, "items": {}}, [[1]], [[1, 1]]),
    "maxProperties": (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
        [{"a": 1, "b": 1}],
        [{}, {"a": 1}],
    ),
    "an older draft": (
        {
            "$schema": "http:" + "//json-schema.org/draft-07/schema#",
            "items": [{"const": 1}],
            "additionalItems": False,
            "type": "array",
        },
        [[1], []],
        [[2], [1, 1]],
    ),
    "anchors": ({"$ref": "#here", "$defs": {"a": {"$anchor": "here", "const": 1}}}, [1], [2]),
    "a pointer into a rewritten part": (
        {
            "properties": {
                "a": {"oneOf": [{"const": 1}, {"const": 2}]},
                "b": {"$ref": "#/properties/a/oneOf/1"},
            },
            "type": "object",
        },
        [{"a": 1, "b": 2}],
        [{"a": 1, "b": 1}],
    ),
    "a pointer from the document": (
        {
            "$id": "urn:a",
            "properties": {"x": {"$id": "urn:b", "$ref": "#/$defs/one"}},
            "type": "object",
            "$defs": {"one": {"const": 1}},
        },
        [{"x": 1}],
        [{"x": 2}],
    ),
    "a property named id": (
        {
            "type": "object",
            "properties": {"id": {"const": "a"}, "x": {"$ref": "#/properties/id"}},
            "id": "schemata/x",
        },
        [{"id": "a", "x": "a"}],
        [{"x": 1}],
    ),
    "recursion": (
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
        [{}, {"next": {"next": {}}}],
        [{"x": 1}],
    ),
}


@pytest.mark.parametrize("name", SUPPORTED_SCHEMAS)
def test_supported_keywords_accept_and_refuse_values(name):
    schema, valid_values, invalid_values = SUPPORTED_SCHEMAS[name]
    assert [value for value in valid_values if not accepts(schema, value)] == []
    assert [value for value in invalid_values if accepts(schema, value)] == []
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    assert name == "a pointer from the document" or all(
        validator.is_valid(value) for value in valid_values
    )


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
            "uniqueItems is supported only for",
        ),
        (
            {"oneOf": [{"type": "string", "pattern": x} for x in "ab"]},
            "oneOf of schemas that match",
        ),
        (
            {
                "oneOf": [{"$ref": f"#/$defs/{x}"} for x in "ab"],
                "$defs": {x: {"type": "string", "pattern": x} for x in "ab"},
            },
            "oneOf of schemas that match",
        ),
        ({"$ref": "#/nowhere"}, "$ref '#/nowhere' points to nothing in the schema"),
        ({"$ref": "http://127.0.0.1/x"}, "nothing is fetched"),
        (
            {"propertyNames": {"multipleOf": 3, "type": "string"}},
            "multipleOf of propertyNames is not supported",
        ),
        ({"minLength": "3"}, "minLength is '3'; it must be a whole number, 0 or more"),
        (
            {"type": "text"},
            "type is 'text'; it must be null, boolean, number, string, array, object or integer",
        ),
        ({"anyOf": []}, "anyOf is []; it must be a list of at least one"),
        ({"properties": 5}, "properties is 5; it must be a JSON object"),
        ({"items": 5}, "a schema is 5; it must be a JSON object"),
        ({"not": {}}, "the schema accepts no value"),
    ],
)
def test_unsupported_keywords_are_refused_by_name(schema, message):
    with pytest.raises(RequestError) as error_info:
        compile_schema(schema)
    assert message in str(error_info.value)


def test_tool_call_grammars_rewrite_their_schemas():
    """Schemas of arguments are rewritten in the grammar of a model's own tool-call format, and the
    format's literal texts stay.
    """
    tool = {
        "type": "object",
        "properties": {
            "a: %json {": {"type": "string", "format": "password"},
            "n": {"type": "integer", "not": {"const": 0}},
        },
        "required": ["n"],
        "additionalProperties": False,
    }
    for name, valid_text, invalid_part in (
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>', '"n": 0'),
        (
            "qwen3_coder",
            (
                "<tool_call>\n<function=f>\n<parameter=a: %json "
                "{>\nx\n</parameter>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"
            ),
            "=n>\n0",
        ),
    ):
        tool["properties"]["a: %json {"].pop("format" if name == "qwen3_coder" else "", None)
        grammar = parsing.call_grammar(name, None, {"f": tool}, {}, "one", None)
        body = json.dumps(build_body({"grammar": grammar}, True))
        matcher = llguidance.LLMatcher(TOKENIZER, complete_grammar(body, ""), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        matcher_copy = matcher.deep_copy()
        assert (
            matcher_copy.consume_tokens(list(valid_text.encode())) and matcher_copy.is_accepting()
        )
        invalid_text = valid_text.replace(invalid_part[:-1] + "1", invalid_part)
        assert invalid_text != valid_text and not matcher.deep_copy().consume_tokens(
            list(invalid_text.encode())
        )


INVALID_VALUES = [
    None,
    True,
    5,
    -1,
    1.5,
    1e300,
    "",
    "x",
    "#",
    "http://[",
    [],
    [5],
    [[]],
    [None],
    {},
    {"a": 5},
    {"a": [[]]},
    {"a": {}},
]


def test_keywords_with_invalid_values_raise_only_unsupported_schema():
    keywords = sorted(
        schema_document.CONSTRAINTS
        | {"$id", "$anchor", "$schema", "$defs", "format", "then", "discriminator"}
    )
    for keyword in keywords:
        for value in INVALID_VALUES:
            for other_keywords in (
                {},
                {"type": "object"},
                {"not": {keyword: value}},
                {"oneOf": [{keyword: value}, {}], "if": {}},
            ):
                try:
                    json.dumps(rewrite_schema({keyword: value, **other_keywords}))
                except UnsupportedSchema as error:
                    assert "\n" not in str(error) and len(str(error)) < 300


def test_pattern_excluding_matches_all_other_texts():
    long_text = "a" * 90
    pattern = pattern_excluding(["", "no", "not", "not", long_text, "é🙂"])
    texts = [
        "",
        "n",
        "no",
        "not",
        "nota",
        "x",
        "\n",
        "aa",
        "a" * 31,
        "a" * 32,
        long_text,
        long_text + "a",
        "é",
        "é🙂",
        "é🙂é",
    ]
    expected = ["n", "nota", "x", "\n", "aa", "a" * 31, "é", "é🙂é"]
    assert [text for text in texts if re.search(pattern, text)] == expected
    assert [
        text for text in texts if accepts({"type": "string", "pattern": pattern}, text)
    ] == expected


def test_recursive_schema_is_rewritten_in_bounded_steps(monkeypatch):
    monkeypatch.setattr(schema_document, "MAX_SCHEMAS", 2000)
    doubling_definitions = {
        f"a{i}": {"not": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2}} for i in range(60)
    } | {"a60": {}}
    for schema in (
        {"$ref": "#"},
        {"not": {"$ref": "#"}},
        {"oneOf": [{"$ref": "#"}] * 3},
        {"allOf": [{"$ref": "#"}] * 20},
        {"anyOf": [{"not": {"$ref": "#"}}] * 9},
        {"propertyNames": {"$ref": "#"}},
        {"$ref": "#/$defs/a0", "$defs": doubling_definitions},
        {"allOf": [{"$ref": "#"}] * 9, "unevaluatedProperties": False},
        {"oneOf": [{"properties": {"a": {"$ref": "#"}}, "required": ["a"]}] * 4},
    ):
        try:
            assert len(json.dumps(rewrite_schema(schema))) < 1 << 22
        except UnsupportedSchema:
            continue
