"""Unmarked tool calls at the start of an answer, as Qwen2.5-Coder writes them, and JSON that is not
a call.
"""

import json
from functools import partial
from random import Random
from typing import Any

import jsonschema
import pytest

from quire.serving import parsing
from quire.serving.parsing.schema_fit import MAX_STEPS, fits
from quire.tests.support.cases import cases
from quire.tests.support.recorded_calls import read

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["c", "f"]},
    },
    "required": ["city"],
}
TOOLS = {
    "weather": WEATHER,
    "any": {},
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
MAKE_PARSER = partial(parsing.make_parser, "hermes", None, TOOLS)
CITY = '{"city": "Zürich"}'
OBJECT = '{"name": "weather", "arguments": ' + CITY + "}"
INDENTED = '{\n  "name": "weather",\n  "arguments": {\n    "city": "Bern",\n    "days": 2\n  }\n}'
BERN = '{\n    "city": "Bern",\n    "days": 2\n  }'
ANSWERS_WITH_CALLS: dict[str, tuple[str, list[tuple[str, str]]]] = {  # answer: (content, calls)
    OBJECT: ("", [("weather", CITY)]),
    f"\n{OBJECT}  \n": ("", [("weather", CITY)]),
    f"```json\n{INDENTED}\n```": ("", [("weather", BERN)]),
    f"```\n{OBJECT}\n```\n": ("", [("weather", CITY)]),
    f"```json\n{INDENTED}": (
        "",
        [("weather", BERN)],
    ),  # the model ended its answer without the closing fence
    f"```json\n{OBJECT}\n{INDENTED}\n```": ("", [("weather", CITY), ("weather", BERN)]),
    f"```json\n{OBJECT}\n```\n\n```json\n{INDENTED}\n```": (
        "",
        [("weather", CITY), ("weather", BERN)],
    ),
    f'{OBJECT}\n{{"name": "now", "arguments": {{}}}}': ("", [("weather", CITY), ("now", "{}")]),
    f"{OBJECT}{OBJECT}": ("", [("weather", CITY)] * 2),
    '{"type": "function", "id": "x", "parameters": {"city": ""}, "name": "weather"}': (
        "",
        [("weather", '{"city": ""}')],
    ),
    f"{OBJECT}\n\nThis is the weather.": ("\n\nThis is the weather.", [("weather", CITY)]),
    f"```json\n{OBJECT}\n``` I look.": (" I look.", [("weather", CITY)]),
    f"{OBJECT}\n<tool_call>{OBJECT}</tool_call>": ("", [("weather", CITY)] * 2),
    f'{OBJECT}\n{{"answer": 1}}': ('\n{"answer": 1}', [("weather", CITY)]),
}
ANSWERS_WITHOUT_CALLS = [
    '{"name": "Bob", "age": 3}',
    '{"answer": 42}',
    '```json\n{"name": "Bob", "arguments": {"city": "Bern"}}\n```',
    "```json\n[1, 2]\n```",
    f"```json\n[{OBJECT}]\n```",
    f"```python\n{OBJECT}\n```",
    f"```json\n{OBJECT}\n// a call\n```",
    f"Here it is:\n{OBJECT}",
    f"Sure:\n\n```json\n{INDENTED}\n```",
    f"{OBJECT} is what I would write.",
    '{"name": "weather"}',
    '{"name": "weather", "arguments": {}}',
    '{"name": "weather", "arguments": {"city": 3}}',
    '{"name": "any", "arguments": [1]}',
    '{"name": "weather", "arguments": {"city": "Bern", "days": "2"}}',
    '{"name": "weather", "arguments": {"city": "Bern", "unit": "k"}}',
    '{"name": "weather", "arguments": {"city": "Bern", "days": NaN}}',
    '{"name": "weather", "arguments": [{"city": "Bern"}]}',
    '{"name": "weather", "arguments": {"city": "Bern"}, "description": "sunny"}',
    '{"name": "weather", "name": "weather", "arguments": {"city": "Bern"}}',
    '{"name": "now", "arguments": {"zone": "UTC"}}',
    '{"name": "weather", "arguments": {"city": "Bern"',
    "{",
    "```",
    "``",
    "`x`",
    "{}",
    "```json",
    "```json\n",
    "```json\n```",
    '{"name": "weather", }',
    ("{ }"),
    "\n ",
]


@pytest.mark.parametrize("answer", ANSWERS_WITH_CALLS)
def test_unmarked_calls_do_not_depend_on_slicing(answer):
    content, calls = ANSWERS_WITH_CALLS[answer]
    for slices in [
        (answer,),
        tuple(answer),
        *((answer[:at], answer[at:]) for at in range(len(answer))),
    ]:
        assert read(MAKE_PARSER, *slices) == (content, "", calls)


@pytest.mark.parametrize("answer", ANSWERS_WITHOUT_CALLS)
def test_answers_without_calls_stay_unchanged(answer):
    for slices in [
        (answer,),
        tuple(answer),
        *((answer[:at], answer[at:]) for at in range(len(answer))),
    ]:
        assert read(MAKE_PARSER, *slices) == (answer, "", [])


def test_truncated_unmarked_call_is_content():
    answer = f"```json\n{INDENTED}\n```"
    for at in range(len(answer) - 4):
        assert read(MAKE_PARSER, answer[:at]) == (answer[:at], "", [])


@pytest.mark.parametrize(
    "head", ['{"a', '{"name": "B', "```p", "[", '{"name": "weather", "x', "```json\n["]
)
def test_text_is_streamed_once_it_cannot_be_a_call(head):
    """At the latest with the character after a string that no call has there."""
    parser = MAKE_PARSER()
    pieces = [piece for char in head + '":' for piece in parser.push(char)]
    assert "".join(piece.text for piece in pieces) == head + '":'  # type: ignore[union-attr]


def test_unmarked_calls_need_tools_and_a_supporting_parser():
    for make in (
        partial(parsing.make_parser, "hermes", None, {}),
        partial(parsing.make_parser, "qwen3_xml", None, TOOLS),
    ):
        assert read(make, OBJECT) == (OBJECT, "", [])
    is_json = partial(parsing.make_parser, "hermes", None, TOOLS, is_json=True)
    assert read(is_json, OBJECT) == (OBJECT, "", [])
    assert read(is_json, f"<tool_call>{OBJECT}</tool_call>") == ("", "", [("weather", CITY)])
    with_reasoning = partial(parsing.make_parser, "hermes", "qwen3", TOOLS)
    assert read(with_reasoning, f"<think>Hm.</think>\n\n{OBJECT}") == (
        "",
        "Hm.",
        [("weather", CITY)],
    )


FRAGMENTS = [
    "{",
    "}",
    '"',
    ":",
    ",",
    "```",
    "`",
    "json",
    "\n",
    " ",
    '"name"',
    '"weather"',
    '"now"',
    '"arguments"',
    "[",
    "]",
    '{"name": "weather", "arguments": ',
    CITY,
    "{}",
    OBJECT,
    "<tool_call>",
    "</tool_call>",
    "x",
    '"type": "function"',
]


@pytest.mark.random
def test_arbitrary_fragments_do_not_depend_on_slicing():
    """Without calls, the text is unchanged."""
    rng = Random(5)
    num_with_calls = 0
    for _ in range(cases(1500)):
        slices = [rng.choice(FRAGMENTS) for _ in range(rng.randrange(1, 10))]
        slices = [
            *rng.choice(
                [
                    [],
                    [OBJECT],
                    ["```json\n", OBJECT, "\n```"],
                    ['{"name": "weather", "arguments": ', CITY],
                ]
            ),
            *slices,
        ]
        text = "".join(slices)
        expected = read(MAKE_PARSER, text)
        assert read(MAKE_PARSER, *text) == read(MAKE_PARSER, *slices) == expected
        at = rng.randrange(len(text) + 1)
        assert read(MAKE_PARSER, text[:at], text[at:]) == expected
        assert expected[0] == text or expected[2]
        num_with_calls += bool(expected[2])
    assert num_with_calls > 20


def random_schema(rng: Random, depth: int = 0) -> dict[str, Any] | bool:
    kind = rng.choice(
        [
            "string",
            "integer",
            "number",
            "boolean",
            "null",
            "object",
            "array",
            "any",
            "enum",
            "anyOf",
            "ref",
        ]
    )
    if depth > 2 and kind in ("object", "array", "anyOf"):
        kind = "integer"
    if kind == "object":
        names = rng.sample("abc", rng.randint(0, 3))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth + 1) for name in names},
            "required": rng.sample("abc", rng.randint(0, 2)),
            **rng.choice(
                [{}, {"additionalProperties": False}, {"additionalProperties": {"type": "string"}}]
            ),
        }
    if kind == "array":
        return {
            "type": "array",
            "items": random_schema(rng, depth + 1),
            "minItems": rng.randint(0, 1),
            "maxItems": 2,
        }
    if kind == "anyOf":
        return {rng.choice(["anyOf", "allOf"]): [random_schema(rng, depth + 1) for _ in range(2)]}
    bounds: dict[str, dict[str, Any]] = {
        "string": {"minLength": 1, "maxLength": 3},
        "integer": {"minimum": 0, "exclusiveMaximum": 3},
        "number": {"exclusiveMinimum": 0, "maximum": 2.5},
    }
    special = {
        "any": rng.choice([True, {}]),
        "enum": {"enum": [1, True, "a", None, [1]]},
        "ref": {"$ref": "#/$defs/x"},
    }
    if kind in special:
        return special[kind]
    types = rng.choice([kind, [kind, "null"]])
    return {"type": types} | (bounds.get(kind, {}) if rng.random() < 0.5 else {})


def random_value(rng: Random, depth: int = 0) -> Any:
    kinds = rng.randrange(8 if depth < 3 else 6)
    if kinds == 6:
        return [random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    if kinds == 7:
        return {
            name: random_value(rng, depth + 1) for name in rng.sample("abcd", rng.randint(0, 3))
        }
    return [
        rng.randint(-1, 4),
        rng.choice([0.5, 2.0, 3.5]),
        rng.choice(["", "a", "abcd"]),
        True,
        False,
        None,
    ][kinds]


@pytest.mark.random
def test_schema_fit_agrees_with_jsonschema():
    rng = Random(1)
    num_fitting = 0
    for _ in range(cases(3000)):
        schema = random_schema(rng)
        if isinstance(schema, dict):
            schema["$defs"] = {"x": {"type": ["string", "object"]}}
        value = random_value(rng)
        if isinstance(schema, dict) and "ref" in json.dumps(schema) and "$ref" not in schema:
            schema = {"allOf": [schema], "$defs": schema["$defs"]}
        expected = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert fits(value, schema) == expected, (value, schema)
        num_fitting += expected
    assert num_fitting > 40


def test_recursive_schema_fit_takes_bounded_steps():
    """A value that needs too many steps does not count as a call."""
    self_reference = {"anyOf": [{"$ref": "#"}, {"$ref": "#"}], "type": "object"}
    assert not fits({"a": 1}, self_reference)
    assert MAX_STEPS <= 10_000
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False}
    assert fits({"child": {"child": {}}}, tree) and not fits({"child": {"other": {}}}, tree)
