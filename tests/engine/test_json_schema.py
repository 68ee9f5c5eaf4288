"""Rewritten JSON schemas: what they accept, the schema of the client accepts, in the eyes of
another library.
"""

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
    """A schema of every keyword that is rewritten, over few names and values, so that they meet."""

    def inner() -> Any:
        return random_schema(rng, depth - 1, definitions)

    def named(count: int) -> dict[str, Any]:
        return {name: inner() for name in rng.sample(NAMES, rng.randint(1, count))}

    leaves = [
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
        return rng.choice(leaves)()
    kinds = [
        lambda: {"anyOf": [inner() for _ in range(rng.randint(1, 3))]},
        lambda: {"oneOf": [inner() for _ in range(rng.randint(1, 3))]},
        lambda: {"allOf": [inner() for _ in range(2)]},
        lambda: {"not": inner()},
        lambda: {"if": inner(), "then": inner(), "else": inner()},
        lambda: {
            "type": "object",
            "properties": named(3),
            "required": rng.sample(NAMES, rng.randint(0, 2)),
        },
        lambda: {"type": "object", "properties": named(3), "additionalProperties": inner()},
        lambda: {"type": "object", "propertyNames": inner(), "additionalProperties": inner()},
        lambda: {
            "type": "object",
            "properties": named(2),
            "propertyNames": {"enum": rng.sample(NAMES, 2)},
        },
        lambda: {"type": "object", "properties": named(3), "minProperties": rng.randint(0, 3)},
        lambda: {"type": "object", "properties": named(3), "maxProperties": rng.randint(0, 2)},
        lambda: {"type": "object", "dependentRequired": {rng.choice(NAMES): rng.sample(NAMES, 2)}},
        lambda: {"type": "object", "dependentSchemas": named(2), "properties": named(2)},
        lambda: {
            "type": "object",
            "allOf": [{"properties": named(2)}],
            "unevaluatedProperties": inner(),
        },
        lambda: {
            "properties": named(1),
            "anyOf": [{"properties": named(2)}, {"required": ["a"]}],
            "unevaluatedProperties": False,
        },  # fmt: skip
        lambda: {"type": "array", "items": inner(), "minItems": rng.randint(0, 2), "maxItems": 2.0},
        lambda: {"type": "array", "prefixItems": [inner(), inner()], "items": inner()},
        lambda: {
            "type": "array",
            "contains": inner(),
            "items": inner(),
            "maxContains": rng.randint(1, 2),
        },
        lambda: {"type": "array", "contains": inner(), "minContains": rng.randint(0, 2)},
        lambda: {"type": "array", "items": {"enum": rng.sample(SCALARS, 3)}, "uniqueItems": True},
        lambda: {"type": "array", "prefixItems": [inner()], "unevaluatedItems": inner()},
        lambda: {"$ref": "#/$defs/" + rng.choice(definitions)},
        *leaves[:3],
    ]
    return rng.choice(kinds)()


def document(rng: random.Random) -> dict[str, Any]:
    schema = random_schema(rng, rng.randint(1, 2))
    schema = schema if isinstance(schema, dict) else {}
    return schema | {"$defs": {"x": random_schema(rng, 1, "y"), "y": random_schema(rng, 0)}}


def random_value(rng: random.Random, depth: int) -> Any:
    kind = rng.random()
    if depth == 0 or kind < 0.3:
        return rng.choice(SCALARS)
    if kind < 0.7:
        return {
            name: random_value(rng, depth - 1)
            for name in rng.sample([*NAMES, "d"], rng.randint(0, 3))
        }
    return [random_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]


@pytest.mark.random
def test_a_rewritten_schema_accepts_no_more_than_the_schema():
    rng = random.Random(0)
    accepted = 0
    refused = 0
    count = cases(300, 100)
    for _ in range(count):
        schema = document(rng)
        try:
            found = rewrite_schema(schema)
        except UnsupportedSchema:
            refused += 1
            continue
        before, after = (jsonschema.Draft202012Validator(each) for each in (schema, found))
        for _ in range(12):
            value = random_value(rng, 2)
            if after.is_valid(value):
                assert before.is_valid(value), (schema, found, value)
                accepted += 1
    assert accepted > count and refused < count // 10


def answer(rng: np.random.Generator, matcher: llguidance.LLMatcher) -> bytes | None:
    """A random text of a grammar, byte by byte, which ends soon; None if it does not."""
    text = b""
    liked = np.zeros(256, np.float64) + 1e-6
    liked[[*b'{}[]":,abctruefalsn0123. ']] = 1
    liked[[*b'"}]']] = 3
    for _ in range(200):
        if matcher.is_accepting() and rng.random() < 0.3:
            return text
        allowed = np.frombuffer(matcher.compute_logit_bias(), np.uint8)[:256] != 0
        if not allowed.any():
            return text if matcher.is_accepting() else None
        weights = liked * allowed
        byte = int(rng.choice(256, p=weights / weights.sum()))
        assert matcher.consume_token(byte)
        text += bytes([byte])
    return None


def compiled(schema: dict[str, Any]) -> llguidance.LLMatcher:
    body = json.dumps(build_body({"json": json.dumps(schema)}))
    return llguidance.LLMatcher(
        TOKENIZER, complete_grammar(body, ""), log_level=0, limits=limits(1)
    )


@pytest.mark.random
def test_random_answers_are_valid():
    """What the grammar of a schema lets through, jsonschema finds valid."""
    rng = random.Random(1)
    numbers = np.random.default_rng(1)
    ended = 0
    compiles = 0
    count = cases(60, 30)
    for _ in range(count):
        schema = document(rng)
        try:
            matcher = compiled(schema)
        except RequestError:
            continue
        if matcher.is_error():
            continue
        compiles += 1
        for _ in range(3):
            text = answer(numbers, matcher.deep_copy())
            # The library lets an additional property through twice.
            if text is not None and not has_doubles(json.loads(text, object_pairs_hook=Pairs)):
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
                ended += 1
    assert compiles > count // 2 and ended > count // 2


class Pairs(list):
    """The members of an object."""


def has_doubles(value: Any) -> bool:
    """Whether an object has a name twice."""
    if isinstance(value, Pairs):
        return len({name for name, _ in value}) < len(value) or any(
            has_doubles(each) for _, each in value
        )
    return isinstance(value, list) and any(map(has_doubles, value))


def accepts(schema: dict[str, Any], value: Any) -> bool:
    matcher = compiled(schema)
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
KEPT: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
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


@pytest.mark.parametrize("name", KEPT)
def test_keywords_are_kept(name):
    schema, right, wrong = KEPT[name]
    assert [value for value in right if not accepts(schema, value)] == []
    assert [value for value in wrong if accepts(schema, value)] == []
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    assert name == "a pointer from the document" or all(
        validator.is_valid(value) for value in right
    )


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems is supported only for"),
        ({"oneOf": [{"type": "string", "pattern": x} for x in "ab"]}, "oneOf of schemas that match"),
        ({"oneOf": [{"$ref": f"#/$defs/{x}"} for x in "ab"],
          "$defs": {x: {"type": "string", "pattern": x} for x in "ab"}}, ("oneOf of schemas that " "match")),
        ({"$ref": "#/nowhere"}, "$ref '#/nowhere' points to nothing in the schema"),
        ({"$ref": "http://127.0.0.1/x"}, "nothing is fetched"),
        ({"propertyNames": {"multipleOf": 3, "type": "string"}}, "multipleOf of propertyNames is not supported"),
        ({"minLength": "3"}, "minLength is '3'; it must be a whole number, 0 or more"),
        ({"type": "text"}, ("type is 'text'; it must be null, boolean, number, string, array, object or " "integer")),
        ({"anyOf": []}, "anyOf is []; it must be a list of at least one"),
        ({"properties": 5}, "properties is 5; it must be a JSON object"),
        ({"items": 5}, "a schema is 5; it must be a JSON object"),
        ({"not": {}}, "the schema accepts no value"),
    ],
)  # fmt: skip
def test_what_is_not_kept_is_refused_by_name(schema, says):
    with pytest.raises(RequestError) as caught:
        compiled(schema)
    assert says in str(caught.value)


def test_schemas_in_grammars_of_the_server_are_rewritten():
    """Formats that are annotations, in the arguments of a call in a model's own format; texts of
    the format stay.
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
    for name, right, wrong in (
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
        written = parsing.call_grammar(name, None, {"f": tool}, {}, "one", None)
        body = json.dumps(build_body({"grammar": written}, True))
        matcher = llguidance.LLMatcher(TOKENIZER, complete_grammar(body, ""), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        copy = matcher.deep_copy()
        assert copy.consume_tokens(list(right.encode())) and copy.is_accepting()
        changed = right.replace(wrong[:-1] + "1", wrong)
        assert changed != right and not matcher.deep_copy().consume_tokens(list(changed.encode()))


JUNK = [
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


def test_keywords_of_a_wrong_kind_are_refused_and_nothing_else_happens():
    keywords = sorted(
        schema_document.CONSTRAINTS
        | {"$id", "$anchor", "$schema", "$defs", "format", "then", "discriminator"}
    )
    for keyword in keywords:
        for junk in JUNK:
            for around in (
                {},
                {"type": "object"},
                {"not": {keyword: junk}},
                {"oneOf": [{keyword: junk}, {}], "if": {}},
            ):
                try:
                    json.dumps(rewrite_schema({keyword: junk, **around}))
                except UnsupportedSchema as error:
                    assert "\n" not in str(error) and len(str(error)) < 300


def test_the_pattern_of_other_texts():
    long = "a" * 90
    pattern = pattern_excluding(["", "no", "not", "not", long, "é🙂"])
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
        long,
        long + "a",
        "é",
        "é🙂",
        "é🙂é",
    ]
    other = ["n", "nota", "x", "\n", "aa", "a" * 31, "é", "é🙂é"]
    assert [text for text in texts if re.search(pattern, text)] == other
    assert [
        text for text in texts if accepts({"type": "string", "pattern": pattern}, text)
    ] == other


def test_a_schema_that_refers_to_itself_is_rewritten_in_bounded_steps(monkeypatch):
    monkeypatch.setattr(schema_document, "MAX_SCHEMAS", 2000)
    doubled = {
        f"a{i}": {"not": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2}} for i in range(60)
    } | {"a60": {}}
    for schema in (
        {"$ref": "#"},
        {"not": {"$ref": "#"}},
        {"oneOf": [{"$ref": "#"}] * 3},
        {"allOf": [{"$ref": "#"}] * 20},
        {"anyOf": [{"not": {"$ref": "#"}}] * 9},
        {"propertyNames": {"$ref": "#"}},
        {"$ref": "#/$defs/a0", "$defs": doubled},
        {"allOf": [{"$ref": "#"}] * 9, "unevaluatedProperties": False},
        {"oneOf": [{"properties": {"a": {"$ref": "#"}}, "required": ["a"]}] * 4},
    ):
        try:
            assert len(json.dumps(rewrite_schema(schema))) < 1 << 22
        except UnsupportedSchema:
            continue
