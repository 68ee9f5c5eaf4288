"""Random JSON schemas, a validator for them, and hostile schemas, regexes and grammars."""

import json
import re
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

WORDS = st.text('abcdeé "\\/{}[]:,日', min_size=0, max_size=6)
NAMES = st.text("abcxyz_ é", min_size=1, max_size=6)
SCALARS = st.none() | st.booleans() | st.integers(-1000, 1000) | WORDS


@st.composite
def integers(draw) -> dict[str, Any]:
    low = draw(st.integers(-50, 50))
    bounds = {"minimum": low, "maximum": low + draw(st.integers(2, 40))}
    return {"type": "integer", **draw(st.sampled_from([bounds, {"multipleOf": 3, **bounds}]))}


@st.composite
def strings(draw) -> dict[str, Any]:
    min_length = draw(st.integers(0, 3))
    length_limits = {"minLength": min_length, "maxLength": min_length + draw(st.integers(0, 6))}
    return {
        "type": "string",
        **draw(
            st.sampled_from([length_limits, {"pattern": "^[a-c]{1,4}-\\d{2}$"}, {"format": "date"}])
        ),
    }


@st.composite
def objects(draw, inner) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, inner, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


@st.composite
def arrays(draw, inner) -> dict[str, Any]:
    min_items = draw(st.integers(0, 2))
    return {
        "type": "array",
        "items": draw(inner),
        "minItems": min_items,
        "maxItems": min_items + draw(st.integers(0, 2)),
    }


LEAVES = (
    integers()
    | strings()
    | st.sampled_from(
        [{"type": "boolean"}, {"type": "null"}, {"type": "number", "minimum": 0, "maximum": 1}]
    )
    | st.builds(lambda values: {"enum": values}, st.lists(SCALARS, min_size=1, max_size=4))
    | st.builds(lambda value: {"const": value}, SCALARS)
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        objects(inner)
        | arrays(inner)
        | st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
    ),
    max_leaves=6,
)
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def json_equal(a: Any, b: Any) -> bool:
    """Compare as JSON values: true is not 1."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def has_type(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (kind == "number" or value == int(value))
    return isinstance(value, TYPES[kind])


def valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value matches one of SCHEMAS."""
    for keyword, constraint in schema.items():
        is_valid = True
        if keyword == "type":
            is_valid = has_type(value, constraint)
        elif keyword == "enum":
            is_valid = any(json_equal(value, option) for option in constraint)
        elif keyword == "const":
            is_valid = json_equal(value, constraint)
        elif keyword == "anyOf":
            is_valid = any(valid(value, option) for option in constraint)
        elif keyword in ("minimum", "maximum"):
            is_valid = value >= constraint if keyword == "minimum" else value <= constraint
        elif keyword == "multipleOf":
            is_valid = value % constraint == 0
        elif keyword in ("minLength", "minItems"):
            is_valid = len(value) >= constraint
        elif keyword in ("maxLength", "maxItems"):
            is_valid = len(value) <= constraint
        elif keyword == "pattern":
            is_valid = re.search(constraint, value) is not None
        elif keyword == "format":
            is_valid = re.fullmatch(r"\d{4}-\d\d-\d\d", value) is not None
        elif keyword == "items":
            is_valid = all(valid(option, constraint) for option in value)
        elif keyword == "properties":
            is_valid = all(
                valid(value[name], property_schema)
                for name, property_schema in constraint.items()
                if name in value
            )
        elif keyword == "required":
            is_valid = all(name in value for name in constraint)
        else:
            assert keyword == "additionalProperties" and constraint is False
            is_valid = set(value) <= set(schema["properties"])
        if not is_valid:
            return False
    return True


def nested(depth: int, leaf: str = "{}", keyword: str = "items") -> str:
    return f'{{"{keyword}":' * depth + leaf + "}" * depth


def hostile() -> Iterator[dict[str, Any]]:
    """Some two hundred: too deep, too large, infinitely recursive or invalid."""
    names = [f"v{i}" for i in range(3000)]
    for size in (10, 100, 1000, 10_000):
        for keyword in ("items", "not", "additionalProperties", "anyOf", "x"):
            yield {"json": nested(min(size, 60_000 // (len(keyword) + 6)), "{}", keyword)}
        yield {"json": json.dumps({"enum": names[: size // 3 + 1]})}
        yield {"json": json.dumps({"type": "object", "required": names[: size // 5 + 1]})}
        yield {
            "json": json.dumps(
                {"anyOf": [{"pattern": f"^{name}.*y$"} for name in names[: size // 5 + 1]]}
            )
        }
        yield {
            "json": json.dumps(
                {"properties": {name: {"type": "integer"} for name in names[: size // 6 + 1]}}
            )
        }
        yield {"regex": "(" * size + "a" + ")" * size if size < 8000 else "(" * 16_000}
        yield {"regex": f"(a|b)*a(a|b){{{size}}}"}
        yield {"regex": f"(.*a.{{{size}}}){{10}}"}
        yield {"regex": f"((a{{1,{size}}}){{1,{size}}}){{1,{size}}}"}
        yield {"regex": f"(\\w|\\p{{L}}){{1,{size}}}\\p{{Lu}}{{{size}}}"}
        yield {"grammar": "start: " + "(" * min(size, 8000) + '"a"' + ")" * min(size, 8000)}
        yield {"grammar": "start: " + "[" * min(size, 8000) + '"a"' + "]" * min(size, 8000)}
        yield {"grammar": "start: %json " + nested(min(size, 1500))}
        yield {"grammar": f'start: a{{1,{size}}}\na: b{{{size}}}\nb: c{{{size}}}\nc: "x"'}
        yield {
            "grammar": "start: a0\n"
            + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(min(size, 900)))
        }
        yield {"grammar": "root ::= " + "(" * min(size, 8000) + '"a"' + ")" * min(size, 8000)}
        yield {
            "grammar": f'root ::= (((("a"{{{size % 2001}}}){{2000}}){{2000}}) | {"b " * (size // 2)}) root?\nb ::= "b"?'
        }
        yield {
            "grammar": "root ::= a0 root?\n"
            + "\n".join(f"a{i} ::= a{i + 1}* a{i + 1}" for i in range(size // 20))
        }
        yield {
            "grammar": "start: A\nA: "
            + " & ".join(f"/(a|b)*a(a|b){{{size + i}}}/" for i in range(5))
        }
    for number in (10**9, 2**31, 2**63, 10**30, -1, 0.5):
        for keyword in (
            "minItems",
            "maxItems",
            "minLength",
            "maxLength",
            "minProperties",
            "maxProperties",
        ):
            kind = "array" if "Items" in keyword else "string" if "Length" in keyword else "object"
            yield {"json": {"type": kind, keyword: number}}
        yield {"json": {"type": "integer", "multipleOf": number}}
        yield {"json": {"type": "number", "minimum": number, "maximum": -number}}
    for number in (99_991, 1_000_003, 123_456_789, 1e-10, 1.234567e-7, 0):
        yield {"json": {"type": "integer", "multipleOf": number}}
        yield {
            "json": {"type": "number", "multipleOf": number, "minimum": -1e308, "maximum": 1e308}
        }
    yield {"json": {"allOf": [{"multipleOf": prime} for prime in (9973, 9967, 9949, 9941)]}}
    yield {
        "json": {
            "allOf": [
                {"anyOf": [{"properties": {f"{i} {j}": {"const": j}}} for j in range(5)]}
                for i in range(10)
            ]
        }
    }
    for target in (
        "#",
        "#/$defs/a",
        "#/nothing",
        "http://127.0.0.1:9/x",
        "file:///etc/passwd",
        "//",
        "",
        "\x00",
    ):
        yield {
            "json": {
                "$ref": target,
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            }
        }
        yield {"json": {"type": "object", "properties": {"a": {"$ref": target}}, "required": ["a"]}}
    for keyword in (
        "type",
        "properties",
        "items",
        "required",
        "enum",
        "pattern",
        "anyOf",
        "$ref",
        "$defs",
        "format",
    ):
        for invalid_value in (5, "x", [], {"a": 1}, [[[]]]):
            yield {"json": {keyword: invalid_value}}
    for text in (
        "",
        " ",
        "{",
        "[]",
        "5",
        "null",
        "NaN",
        '{"a":NaN}',
        '{"minItems":1e999}',
        "{" * 5000,
        '{"a":"\\ud800"}',
    ):
        yield {"json": text}
    for text in (
        "",
        "(",
        "[",
        "*",
        "a{2,1}",
        "(?<=a)b",
        "\\",
        "(?P<",
        "\\p{Nope}",
        "a" * 20_000,
        "\x00",
        "(?i)" * 4000,
    ):
        yield {"regex": text}
    for text in (
        "",
        "x",
        "start",
        "start:",
        "start: x",
        "start: start",
        "start: @x",
        'start: "a',
        "\x00",
        "start: A\nA: A",
    ):
        yield {"grammar": text}
    yield {"grammar": 'start: a\na: a a a | a a | "x" | "y" | '}
    yield {"grammar": "{" * 16_000}
    yield {"choice": []}
    yield {"choice": ["x" * 2000]}
    yield {"choice": ["x"] * 2000}
    yield {"choice": ["\ud800"]}
    yield {"json_object": True, "whitespace_pattern": "(a|b)*a(a|b){1000}("}
