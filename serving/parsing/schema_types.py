"""What kinds of values a JSON schema takes, and a text as a value of one of them."""

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
ALL = frozenset({*NAMES.values(), "null"})
PYTHON = {"true": "true", "false": "false", "none": "null", "null": "null"}
MAX_DEPTH = 32  # of references and of alternatives
MAX_LITERAL = 10_000  # characters that are read as Python


def properties_of(schema: Any) -> Mapping[str, Any]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a reference within `root` means; the schema itself where there is none."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        place: Any = root
        for step in schema["$ref"].removeprefix("#").split("/")[1:]:
            place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
        schema = place
    return None


def branches(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The schemas that a value may keep to one of."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        yield {}
        return
    several = [each for name in ("anyOf", "oneOf") for each in _listed(schema.get(name))]
    if not several:
        yield schema
    for each in several:
        yield from branches(each, root, depth + 1)


def kinds(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a value may have; all of them where the schema does not say."""
    return frozenset().union(*(_kinds_of(branch, root) for branch in branches(schema, root)))


def _kinds_of(schema: Mapping[str, Any], root: Mapping[str, Any]) -> frozenset[str]:
    given = schema.get("type")
    if given is not None:
        found = {each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)} & ALL
        return frozenset(found | {"integer"} if "number" in found else found) or ALL
    values = [schema["const"]] if "const" in schema else _listed(schema.get("enum"))
    if values:
        return frozenset(kind_of(value) for value in values)
    if parts := _listed(schema.get("allOf")):
        return frozenset.intersection(*(kinds(part, root) for part in parts)) or ALL
    return frozenset({"object"}) if "properties" in schema else frozenset({"array"}) if "items" in schema else ALL


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def kind_of(value: Any) -> str:
    return next((name for each, name in NAMES.items() if isinstance(value, each)), "null")


def is_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether a value is a text whatever it looks like: the schema has nothing else, or says nothing."""
    return kinds(schema, root) in (frozenset({"string"}), ALL)


def as_json(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """A text as JSON of a type that the schema has; as a text where it is none."""
    wanted = kinds(schema, root)
    bare = text.strip()
    values = [value for branch in branches(schema, root) for value in _listed(branch.get("enum"))]
    if wanted == {"string"} or ("string" in wanted and text in values):
        return json.dumps(text, ensure_ascii=False)
    for written in (bare, PYTHON.get(bare.lower(), "")):
        kind = _kind_of_json(written)
        if kind in wanted and kind != "string":
            return written
        if kind == "number" and "integer" in wanted and float(written).is_integer():
            return written
    if "string" not in wanted and bare[:1] in ("{", "[", "(") and len(bare) < MAX_LITERAL:
        try:  # as Python writes it
            value = ast.literal_eval(bare)
            found = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            pass
        else:
            if _kind_of_json(found) in wanted:
                return found
    return json.dumps(text, ensure_ascii=False)


def _kind_of_json(text: str) -> str | None:
    try:
        return kind_of(json.loads(text, parse_constant=_refuse, parse_int=_Integer, parse_float=float))
    except (ValueError, RecursionError):
        return None


def _refuse(text: str) -> None:
    raise ValueError(text)


class _Integer(int):
    """Any length of digits: only the kind is asked."""

    def __new__(cls, text: str):
        return super().__new__(cls, 0)
