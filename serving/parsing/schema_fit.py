"""A bounded check whether a value fits a JSON schema, to tell calls from other JSON."""

import json
from collections.abc import Mapping
from typing import Any

from .schema_types import MAX_DEPTH, json_type, resolve

MAX_STEPS = 10_000  # visited pairs of a value and a schema; a value that needs more does not fit
NUMBERS = ("integer", "number")
BOUNDS = {  # keyword -> types that it bounds, and the check
    "minimum": (NUMBERS, lambda value, bound: value >= bound),
    "maximum": (NUMBERS, lambda value, bound: value <= bound),
    "exclusiveMinimum": (NUMBERS, lambda value, bound: value > bound),
    "exclusiveMaximum": (NUMBERS, lambda value, bound: value < bound),
    "minLength": (("string",), lambda value, bound: len(value) >= bound),
    "maxLength": (("string",), lambda value, bound: len(value) <= bound),
    "minItems": (("array",), lambda value, bound: len(value) >= bound),
    "maxItems": (("array",), lambda value, bound: len(value) <= bound),
}


def fits(value: Any, schema: Any) -> bool:
    """Return whether a JSON value fits a schema. Unsupported keywords such as `pattern` are
    ignored.
    """
    return _Check(schema).fits(value, schema, 0)


class _Check:
    def __init__(self, root: Any):
        self.root = root
        self.remaining_steps = MAX_STEPS

    def fits(self, value: Any, schema: Any, depth: int) -> bool:
        self.remaining_steps -= 1
        if self.remaining_steps < 0 or depth > MAX_DEPTH:
            return False
        if not isinstance(schema, Mapping):
            return schema is not False
        if isinstance(schema.get("$ref"), str) and isinstance(self.root, Mapping):
            referenced = resolve({"$ref": schema["$ref"]}, self.root)
            if isinstance(referenced, Mapping | bool) and not self.fits(
                value, referenced, depth + 1
            ):
                return False
        return (
            is_of_type(value, schema.get("type"))
            and ("const" not in schema or is_same(value, schema["const"]))
            and (
                "enum" not in schema
                or any(is_same(value, candidate) for candidate in as_list(schema["enum"]))
            )
            and is_in_bounds(value, schema)
            and all(
                self.fits(value, candidate, depth + 1) for candidate in as_list(schema.get("allOf"))
            )
            and all(
                any(self.fits(value, candidate, depth + 1) for candidate in as_list(schema[name]))
                for name in ("anyOf", "oneOf")
                if as_list(schema.get(name))
            )
            and (not isinstance(value, dict) or self.has_members(value, schema, depth))
            and (
                not isinstance(value, list)
                or all(
                    self.fits(candidate, schema.get("items", True), depth + 1)
                    for candidate in value
                )
            )
        )

    def has_members(self, value: dict[str, Any], schema: Mapping[str, Any], depth: int) -> bool:
        """Return whether all required members are present and all members fit."""
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        other_schema = (
            True if "patternProperties" in schema else schema.get("additionalProperties", True)
        )
        return all(name in value for name in as_list(schema.get("required"))) and all(
            self.fits(member, properties.get(name, other_schema), depth + 1)
            for name, member in value.items()
        )


def is_of_type(value: Any, types: Any) -> bool:
    names = [types] if isinstance(types, str) else as_list(types)
    kinds = {json_type(value)}
    if "integer" in kinds or (isinstance(value, float) and value.is_integer()):
        kinds |= {"integer", "number"}
    return not names or not kinds.isdisjoint(name for name in names if isinstance(name, str))


def is_in_bounds(value: Any, schema: Mapping[str, Any]) -> bool:
    kind = json_type(value)
    return all(
        is_within(value, schema[name])
        for name, (types, is_within) in BOUNDS.items()
        if kind in types and json_type(schema.get(name)) in NUMBERS
    )


def is_same(value: Any, expected: Any) -> bool:
    """Return whether two JSON values are equal; 1 and true are not."""
    return json.dumps(value, sort_keys=True) == json.dumps(expected, sort_keys=True)


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
