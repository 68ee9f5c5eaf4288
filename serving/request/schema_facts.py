"""Facts that hold for all values of a JSON schema, by which schemas are shown to be disjoint."""

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
    is_same,
    json_type,
    list_keyword,
    mapping_keyword,
    schema_types,
    validate_keywords,
)


@dataclass(frozen=True)
class Facts:
    """Facts that hold for every value that a schema accepts."""

    types: frozenset[str]
    values: tuple[Any, ...] | None = None  # the only possible values
    required: frozenset[str] = frozenset()
    properties: Mapping[str, tuple[tuple[Schema, Resource], ...]] | None = None
    is_closed: bool = False  # there are no other properties
    low: float = -math.inf
    high: float = math.inf


def derive_facts(document: Document, schema: Any, resource: Resource, depth: int) -> Facts:
    """Derive facts about a schema of the document."""
    if schema is False:
        return Facts(frozenset())
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return Facts(frozenset(TYPES))
    document.spend_budget()
    schema = validate_keywords(schema)
    resource = document.resources_by_schema.get(id(schema), resource)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    types = frozenset("number" if name == "integer" else name for name in schema_types(schema))
    if values is not None:
        types &= frozenset(map(json_type, values))
    facts = Facts(
        types,
        None if values is None else tuple(values),
        frozenset(schema.get("required", ())),
        {
            key: ((subschema, resource),)
            for key, subschema in mapping_keyword(schema, "properties").items()
        },
        schema.get("additionalProperties") is False
        and not mapping_keyword(schema, "patternProperties"),
        schema.get("minimum", -math.inf),
        schema.get("maximum", math.inf),
    )
    conjuncts = [(subschema, resource) for subschema in list_keyword(schema, "allOf")]
    if "$ref" in schema:
        conjuncts.append(document.target(schema["$ref"], resource))
        if resource.is_legacy:
            facts = Facts(frozenset(TYPES))
    for subschema, home in conjuncts:
        facts = intersect_facts(facts, derive_facts(document, subschema, home, depth + 1))
    choices = [
        derive_facts(document, subschema, resource, depth + 1)
        for subschema in list_keyword(schema, "anyOf") or list_keyword(schema, "oneOf")
    ]
    if choices:
        types = facts.types & frozenset().union(*(choice.types for choice in choices))
        values_by_choice = [choice.values for choice in choices]
        has_open_choice = None in values_by_choice
        values = (
            None
            if has_open_choice
            else tuple(value for choice_values in values_by_choice for value in choice_values or ())
        )
        facts = intersect_facts(facts, Facts(types, values))
    return facts


def derive_joint_facts(
    document: Document, schemas: Iterable[tuple[Schema, Resource]], depth: int
) -> Facts:
    facts = Facts(frozenset(TYPES))
    for schema, resource in schemas:
        facts = intersect_facts(facts, derive_facts(document, schema, resource, depth))
    return facts


def are_disjoint(document: Document, a: Facts, b: Facts, depth: int = 0) -> bool:
    """Return whether certainly no value matches both."""
    common = a.types & b.types
    if not common:
        return True
    if a.values is not None and b.values is not None:
        return not any(is_same(x, y) for x in a.values for y in b.values)
    if common == {"number"}:
        return a.high < b.low or b.high < a.low
    if common != {"object"} or depth > MAX_DEPTH:
        return False
    for subject, opponent in ((a, b), (b, a)):
        for key in subject.required:
            subject_schemas = (subject.properties or {}).get(key, ())
            opponent_schemas = (opponent.properties or {}).get(key)
            if opponent_schemas is None:
                if opponent.is_closed:
                    return True
            elif are_disjoint(
                document,
                derive_joint_facts(document, subject_schemas, depth),
                derive_joint_facts(document, opponent_schemas, depth),
                depth + 1,
            ):
                return True
    return False


def intersect_facts(a: Facts, b: Facts) -> Facts:
    """Combine the facts of two schemas that a value must both match."""
    values = a.values if b.values is None else b.values
    if a.values is not None and b.values is not None:
        values = tuple(
            value for value in a.values if any(is_same(value, b_value) for b_value in b.values)
        )
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
