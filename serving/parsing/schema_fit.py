"""Whether a value fits a JSON schema, in bounded time: enough to tell a call's arguments from other JSON."""

import json
from collections.abc import Mapping
from typing import Any

from .schema_types import MAX_DEPTH, kind_of, resolved

MAX_STEPS = 10_000  # pairs of a value and a schema that are looked at; a value that needs more fits nothing
NUMBERS = ("integer", "number")
BOUNDS = {  # keyword -> the kinds that it bounds, and whether a value keeps to it
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
    """Whether a JSON value fits a schema; keywords that are not known here, as `pattern`, ask for nothing."""
    return _Check(schema).fits(value, schema, 0)


class _Check:
    def __init__(self, root: Any):
        self.root = root
        self.steps_left = MAX_STEPS

    def fits(self, value: Any, schema: Any, depth: int) -> bool:
        self.steps_left -= 1
        if self.steps_left < 0 or depth > MAX_DEPTH:
            return False
        if not isinstance(schema, Mapping):
            return schema is not False
        if isinstance(schema.get("$ref"), str) and isinstance(self.root, Mapping):
            meant = resolved({"$ref": schema["$ref"]}, self.root)
            if isinstance(meant, Mapping | bool) and not self.fits(value, meant, depth + 1):
                return False
        return (
            is_of_type(value, schema.get("type"))
            and ("const" not in schema or is_same(value, schema["const"]))
            and ("enum" not in schema or any(is_same(value, each) for each in listed(schema["enum"])))
            and is_in_bounds(value, schema)
            and all(self.fits(value, each, depth + 1) for each in listed(schema.get("allOf")))
            and all(
                any(self.fits(value, each, depth + 1) for each in listed(schema[name]))
                for name in ("anyOf", "oneOf")
                if listed(schema.get(name))
            )
            and (not isinstance(value, dict) or self.has_members(value, schema, depth))
            and (
                not isinstance(value, list)
                or all(self.fits(each, schema.get("items", True), depth + 1) for each in value)
            )
        )

    def has_members(self, value: dict[str, Any], schema: Mapping[str, Any], depth: int) -> bool:
        """Whether the members that must be there are, and all of them fit."""
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        return all(name in value for name in listed(schema.get("required"))) and all(
            self.fits(each, properties.get(name, others), depth + 1) for name, each in value.items()
        )


def is_of_type(value: Any, types: Any) -> bool:
    names = [types] if isinstance(types, str) else listed(types)
    kinds = {kind_of(value)}
    if "integer" in kinds or (isinstance(value, float) and value.is_integer()):
        kinds |= {"integer", "number"}
    return not names or not kinds.isdisjoint(name for name in names if isinstance(name, str))


def is_in_bounds(value: Any, schema: Mapping[str, Any]) -> bool:
    kind = kind_of(value)
    return all(
        holds(value, schema[name])
        for name, (kinds, holds) in BOUNDS.items()
        if kind in kinds and kind_of(schema.get(name)) in NUMBERS
    )


def is_same(value: Any, other: Any) -> bool:
    """Whether two JSON values are equal, where 1 is not true."""
    return json.dumps(value, sort_keys=True) == json.dumps(other, sort_keys=True)


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
