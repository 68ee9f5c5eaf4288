"""What is certain of the values of a JSON schema, by which schemas are told apart."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .schema_document import (
    MAX_DEPTH,
    TYPES,
    Document,
    Resource,
    Schema,
    checked,
    is_same,
    listed,
    mapping,
    type_of,
    types_of,
)


@dataclass(frozen=True)
class Facts:
    """What is certain of the values of a schema, to tell schemas apart."""

    types: frozenset[str]
    values: tuple[Any, ...] | None = None  # of which a value is one
    required: frozenset[str] = frozenset()
    properties: Mapping[str, tuple[tuple[Schema, Resource], ...]] | None = None
    is_closed: bool = False  # no property but those
    low: float = -math.inf
    high: float = math.inf


def facts_of(document: Document, schema: Any, resource: Resource, depth: int) -> Facts:
    """What is certain of the values that a schema of the document accepts."""
    if schema is False:
        return Facts(frozenset())
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return Facts(frozenset(TYPES))
    document.spend()
    schema = checked(schema)
    resource = document.resource_of.get(id(schema), resource)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    types = frozenset("number" if name == "integer" else name for name in types_of(schema))
    if values is not None:
        types &= frozenset(map(type_of, values))
    own = Facts(
        types,
        None if values is None else tuple(values),
        frozenset(schema.get("required", ())),
        {key: ((each, resource),) for key, each in mapping(schema, "properties").items()},
        schema.get("additionalProperties") is False and not mapping(schema, "patternProperties"),
        schema.get("minimum", -math.inf),
        schema.get("maximum", math.inf),
    )
    parts = [(each, resource) for each in listed(schema, "allOf")]
    if "$ref" in schema:
        parts.append(document.target(schema["$ref"], resource))
        if resource.is_legacy:
            own = Facts(frozenset(TYPES))
    for each, home in parts:
        own = both(own, facts_of(document, each, home, depth + 1))
    choices = [
        facts_of(document, each, resource, depth + 1) for each in listed(schema, "anyOf") or listed(schema, "oneOf")
    ]
    if choices:
        types = own.types & frozenset().union(*(each.types for each in choices))
        some = [each.values for each in choices]
        values = None if None in some else tuple(value for each in some for value in each or ())
        own = both(own, Facts(types, values))
    return own


def facts_of_all(document: Document, schemas: Iterable[tuple[Schema, Resource]], depth: int) -> Facts:
    found = Facts(frozenset(TYPES))
    for schema, resource in schemas:
        found = both(found, facts_of(document, schema, resource, depth))
    return found


def are_disjoint(document: Document, a: Facts, b: Facts, depth: int = 0) -> bool:
    """Whether no value matches both, for certain."""
    common = a.types & b.types
    if not common:
        return True
    if a.values is not None and b.values is not None:
        return not any(is_same(x, y) for x in a.values for y in b.values)
    if common == {"number"}:
        return a.high < b.low or b.high < a.low
    if common != {"object"} or depth > MAX_DEPTH:
        return False
    for one, other in ((a, b), (b, a)):
        for key in one.required:
            mine, others = (one.properties or {}).get(key, ()), (other.properties or {}).get(key)
            if others is None:
                if other.is_closed:
                    return True
            elif are_disjoint(
                document, facts_of_all(document, mine, depth), facts_of_all(document, others, depth), depth + 1
            ):
                return True
    return False


def both(a: Facts, b: Facts) -> Facts:
    """What is certain of the values that two schemas accept."""
    values = a.values if b.values is None else b.values
    if a.values is not None and b.values is not None:
        values = tuple(value for value in a.values if any(is_same(value, other) for other in b.values))
    properties = dict(a.properties or {})
    for key, schemas in (b.properties or {}).items():
        properties[key] = (*properties.get(key, ()), *schemas)
    is_closed = (a.is_closed and not b.properties) or (b.is_closed and not a.properties)
    return Facts(
        a.types & b.types,
        values,
        a.required | b.required,
        properties,
        is_closed,
        max(a.low, b.low),
        min(a.high, b.high),
    )
