"""What kinds of values a JSON schema takes, and a text as a value of one of them."""

import ast
import json
from collections.abc import Callable, Mapping
from typing import Any

NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
ALL = frozenset({*NAMES.values(), "null"})
PYTHON = {"true": "true", "false": "false", "none": "null", "null": "null"}
MAX_REFERENCES = 32  # one pointing to the next
MAX_POINTER = 512  # characters of a reference
MAX_DEPTH = 32  # of `anyOf`, `oneOf` and `allOf` within each other
ANYTHING: Mapping[str, Any] = {}
MAX_LITERAL = 10_000  # characters that are read as Python


def properties_of(schema: Any) -> Mapping[str, Any]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a reference within `root` points to; `schema` itself if it is not a reference.

    None for a reference that points to nothing, to another document or to itself.
    """
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        schema = _pointed_at(schema["$ref"], root)
    return None


def _pointed_at(reference: str, root: Mapping[str, Any]) -> Any:
    if len(reference) > MAX_POINTER or not (reference == "#" or reference.startswith("#/")):
        return None
    value: Any = root
    for step in reference.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list) and key.isascii() and key.isdigit() and int(key[:9]) < len(value):
            value = value[int(key[:9])]
        else:
            return None
    return value


def branches(
    schema: Any, root: Mapping[str, Any], check: Callable[[Mapping[str, Any]], None] = lambda schema: None
) -> list[Mapping[str, Any]]:
    """The alternatives of a schema: a value must match at least one of them.

    Each schema of the document is visited once, so that alternatives which refer to themselves or to each other take no
    more steps than the document has schemas. An alternative that is no schema object accepts any value: `{}`.
    `check` is called with each schema that is a reference or has alternatives.
    """
    found: list[Mapping[str, Any]] = []
    visited: set[int] = set()
    pending = [schema]
    while pending:
        given = pending.pop()
        alternative = resolved(given, root)
        if alternative is not given:
            check(given)
        if not isinstance(alternative, Mapping):
            found.append(ANYTHING)
        elif id(alternative) not in visited:
            visited.add(id(alternative))
            if inner := _alternatives(alternative):
                check(alternative)
                pending += reversed(inner)
            else:
                found.append(alternative)
    return found


def _alternatives(schema: Mapping[str, Any]) -> list[Any]:
    return [each for name in ("anyOf", "oneOf") for each in _listed(schema.get(name))]


def kinds(
    schema: Any, root: Mapping[str, Any], known: dict[int, frozenset[str] | None] | None = None
) -> frozenset[str]:
    """The JSON types that a value may have; all of them where the schema does not say.

    `known` has the types of schemas of this document by their ids; those that are visited are added.
    """
    return _kinds(schema, root, {} if known is None else known, 0) or ALL


def _kinds(
    schema: Any, root: Mapping[str, Any], known: dict[int, frozenset[str] | None], depth: int
) -> frozenset[str] | None:
    """`kinds`; None for a schema that is being visited, which adds nothing where it refers back to itself."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return ALL
    key = id(schema)
    if key not in known:
        known[key] = None
        parts = _alternatives(schema)
        combined = frozenset.union if parts else frozenset.intersection
        found = None if parts else _kinds_named(schema)
        if found is None:
            parts = parts or _listed(schema.get("allOf"))
            inner = [each for part in parts if (each := _kinds(part, root, known, depth + 1)) is not None]
            found = combined(*inner) if inner else ALL
        known[key] = found or ALL
    return known[key]


def _kinds_named(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """The types that a schema names itself."""
    given = schema.get("type")
    if given is not None:
        found = {each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)} & ALL
        return frozenset(found | {"integer"} if "number" in found else found) or ALL
    if values := [schema["const"]] if "const" in schema else _listed(schema.get("enum")):
        return frozenset(kind_of(value) for value in values)
    if not _listed(schema.get("allOf")):
        return frozenset({"object"}) if "properties" in schema else frozenset({"array"}) if "items" in schema else ALL
    return None


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
