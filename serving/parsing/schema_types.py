"""The types of values that a JSON schema accepts, and conversion of a text to one of them."""

import ast
import json
from collections.abc import Callable, Mapping
from typing import Any

NAMES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
ALL = frozenset({*NAMES.values(), "null"})
PYTHON = {"true": "true", "false": "false", "none": "null", "null": "null"}
MAX_REFERENCES = 32  # of a chain
MAX_POINTER = 512  # characters of a reference
MAX_DEPTH = 32  # nested `anyOf`, `oneOf` and `allOf`
ANYTHING: Mapping[str, Any] = {}
MAX_LITERAL = 10_000  # of Python literals


def declared_properties(schema: Any) -> Mapping[str, Any]:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def resolve(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference within `root` points to, or `schema` if it is no
    reference.

    None if the reference points to nothing, to another document or to itself.
    """
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        schema = _resolve_pointer(schema["$ref"], root)
    return None


def _resolve_pointer(reference: str, root: Mapping[str, Any]) -> Any:
    if len(reference) > MAX_POINTER or not (reference == "#" or reference.startswith("#/")):
        return None
    value: Any = root
    for step in reference.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value.get(key)
        elif (
            isinstance(value, list)
            and key.isascii()
            and key.isdigit()
            and int(key[:9]) < len(value)
        ):
            value = value[int(key[:9])]
        else:
            return None
    return value


def branches(
    schema: Any,
    root: Mapping[str, Any],
    check: Callable[[Mapping[str, Any]], None] = lambda schema: None,
) -> list[Mapping[str, Any]]:
    """Return the alternatives of a schema: a value must match at least one of them.

    Each schema of the document is visited once, so alternatives that refer to themselves or to each
    other take no more steps than the document has schemas. An alternative that is not an object
    accepts any value: `{}`.

    Args:
        check: Called with each schema that is a reference or has alternatives.
    """
    alternatives: list[Mapping[str, Any]] = []
    visited: set[int] = set()
    pending = [schema]
    while pending:
        candidate = pending.pop()
        alternative = resolve(candidate, root)
        if alternative is not candidate:
            check(candidate)
        if not isinstance(alternative, Mapping):
            alternatives.append(ANYTHING)
        elif id(alternative) not in visited:
            visited.add(id(alternative))
            if nested := _alternatives(alternative):
                check(alternative)
                pending += reversed(nested)
            else:
                alternatives.append(alternative)
    return alternatives


def _alternatives(schema: Mapping[str, Any]) -> list[Any]:
    return [option for name in ("anyOf", "oneOf") for option in _as_list(schema.get(name))]


def value_types(
    schema: Any,
    root: Mapping[str, Any],
    types_by_id: dict[int, frozenset[str] | None] | None = None,
) -> frozenset[str]:
    """Return the JSON types that a value may have; all of them if the schema does not say.

    Args:
        types_by_id: Cache of the types of the document's schemas by id(), extended here.
    """
    return _value_types(schema, root, {} if types_by_id is None else types_by_id, 0) or ALL


def _value_types(
    schema: Any, root: Mapping[str, Any], types_by_id: dict[int, frozenset[str] | None], depth: int
) -> frozenset[str] | None:
    """Like `value_types`; None for a schema that is being visited, so recursion adds nothing."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return ALL
    key = id(schema)
    if key not in types_by_id:
        types_by_id[key] = None
        subschemas = _alternatives(schema)
        combined = frozenset.union if subschemas else frozenset.intersection
        types = None if subschemas else _declared_types(schema)
        if types is None:
            subschemas = subschemas or _as_list(schema.get("allOf"))
            inner = [
                subtypes
                for subschema in subschemas
                if (subtypes := _value_types(subschema, root, types_by_id, depth + 1)) is not None
            ]
            types = combined(*inner) if inner else ALL
        types_by_id[key] = types or ALL
    return types_by_id[key]


def _declared_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the types that a schema itself declares, or None if only subschemas do."""
    declared = schema.get("type")
    if declared is not None:
        names = {
            name
            for name in (declared if isinstance(declared, list) else [declared])
            if isinstance(name, str)
        } & ALL
        return frozenset(names | {"integer"} if "number" in names else names) or ALL
    if values := [schema["const"]] if "const" in schema else _as_list(schema.get("enum")):
        return frozenset(json_type(value) for value in values)
    if not _as_list(schema.get("allOf")):
        return (
            frozenset({"object"})
            if "properties" in schema
            else frozenset({"array"})
            if "items" in schema
            else ALL
        )
    return None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def json_type(value: Any) -> str:
    return next((name for kind, name in NAMES.items() if isinstance(value, kind)), "null")


def is_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Return whether every value is a text, because the schema accepts only texts or all types."""
    return value_types(schema, root) in (frozenset({"string"}), ALL)


def as_json(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """Convert a text to JSON of a type that the schema accepts, otherwise to a JSON string."""
    types = value_types(schema, root)
    stripped = text.strip()
    values = [value for branch in branches(schema, root) for value in _as_list(branch.get("enum"))]
    if types == {"string"} or ("string" in types and text in values):
        return json.dumps(text, ensure_ascii=False)
    for written in (stripped, PYTHON.get(stripped.lower(), "")):
        kind = _json_text_type(written)
        if kind in types and kind != "string":
            return written
        if kind == "number" and "integer" in types and float(written).is_integer():
            return written
    if "string" not in types and stripped[:1] in ("{", "[", "(") and len(stripped) < MAX_LITERAL:
        try:  # written as a Python literal
            value = ast.literal_eval(stripped)
            converted = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            pass
        else:
            if _json_text_type(converted) in types:
                return converted
    return json.dumps(text, ensure_ascii=False)


def _json_text_type(text: str) -> str | None:
    try:
        return json_type(
            json.loads(text, parse_constant=_refuse, parse_int=_Integer, parse_float=float)
        )
    except (ValueError, RecursionError):
        return None


def _refuse(text: str) -> None:
    raise ValueError(text)


class _Integer(int):
    """An integer of any number of digits, of which only the type is used."""

    def __new__(cls, text: str):
        return super().__new__(cls, 0)
