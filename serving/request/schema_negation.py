"""Negation of JSON schemas, as far as the keywords of llguidance can express it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .schema_document import (
    MAX_DEPTH,
    TYPES,
    Document,
    Resource,
    Schema,
    distinct,
    json_type,
    list_keyword,
    mapping_keyword,
    schema_types,
    validate_keywords,
)

MAX_SPELLED = 32  # leading characters of an excluded text; llguidance nests at most 250 groups
OPPOSITES = (  # (keyword, keyword of its negation, type, offset of the bound)
    ("minLength", "maxLength", "string", -1),
    ("maxLength", "minLength", "string", 1),
    ("minItems", "maxItems", "array", -1),
    ("maxItems", "minItems", "array", 1),
    ("minProperties", "maxProperties", "object", -1),
    ("maxProperties", "minProperties", "object", 1),
    ("minimum", "exclusiveMaximum", "number", 0),
    ("maximum", "exclusiveMinimum", "number", 0),
    ("exclusiveMinimum", "maximum", "number", 0),
    ("exclusiveMaximum", "minimum", "number", 0),
)


class Negation:
    """Writes schemas that accept only values which the schemas of a document reject."""

    def __init__(self, document: Document, positive: Callable[[Any, Resource], Schema]):
        """
        Args:
            positive: Rewrites a schema of the document into one that accepts no more values.
        """
        self.document = document
        self.positive = positive

    def negative(self, schema: Any, resource: Resource, depth: int) -> Schema:
        """Return a schema that accepts only values which `schema` rejects.

        It is the union of the negations of all keywords; a keyword whose negation cannot be
        expressed adds nothing to it.
        """
        if isinstance(schema, bool):
            return not schema
        if depth > MAX_DEPTH:
            return False
        self.document.spend_budget()
        schema = validate_keywords(schema)
        resource = self.document.resources_by_schema.get(id(schema), resource)

        def inner(value: Any) -> Schema:
            return self.negative(value, resource, depth + 1)

        broken: list[Schema] = []
        if "$ref" in schema:
            node, home = self.document.target(schema["$ref"], resource)
            broken.append(self.negative(node, home, depth + 1))
            if resource.is_legacy:
                return broken[0]
        types = schema_types(schema)
        if "type" in schema:
            other_kinds = [
                name
                for name in TYPES
                if name not in types and not (name == "number" and "integer" in types)
            ]
            broken.append({"type": other_kinds} if other_kinds else False)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            broken.append(exclude_values(values))
        for name, opposite, kind, step in OPPOSITES:
            if isinstance(schema.get(name), int | float) and not isinstance(schema[name], bool):
                limit = schema[name] + step
                broken.append(
                    {"type": kind, opposite: limit} if limit >= 0 or kind == "number" else False
                )
        for key in schema.get("required", ()):
            broken.append({"type": "object", "properties": {key: False}})
        for key, subschema in mapping_keyword(schema, "properties").items():
            if (negated := inner(subschema)) is not False:
                broken.append({"type": "object", "required": [key], "properties": {key: negated}})
        if (
            isinstance(schema.get("items"), Mapping | bool)
            and (negated := inner(schema["items"])) is not False
        ):
            prefix_length = len(list_keyword(schema, "prefixItems"))
            broken.append(
                {
                    "type": "array",
                    "minItems": prefix_length + 1,
                    "prefixItems": [True] * prefix_length + [negated],
                }
            )
        if "contains" in schema and schema.get("minContains", 1) == 1:
            broken.append(all_of({"type": "array"}, {"items": inner(schema["contains"])}))
        if "anyOf" in schema:
            broken.append(all_of(*map(inner, schema["anyOf"])))
        broken += map(inner, schema.get("allOf", ()))
        if "not" in schema:
            broken.append(self.positive(schema["not"], resource))
        if "if" in schema and ("then" in schema or "else" in schema):
            broken.append(
                all_of(self.positive(schema["if"], resource), inner(schema.get("then", True)))
            )
            broken.append(all_of(inner(schema["if"]), inner(schema.get("else", True))))
        return any_of(*broken)


def types_except(name: str) -> Schema:
    return {"type": [type_name for type_name in TYPES if type_name != name]}


def possible_types(schema: Schema) -> frozenset[str]:
    """Return the types that values of a rewritten schema may have; references are not followed."""
    if isinstance(schema, bool):
        return frozenset(TYPES) if schema else frozenset()
    types = frozenset("number" if name == "integer" else name for name in schema_types(schema))
    if "anyOf" in schema:
        types &= frozenset().union(*map(possible_types, schema["anyOf"]))
    for conjunct in schema.get("allOf", ()):
        types &= possible_types(conjunct)
    return types


def any_of(*schemas: Schema) -> Schema:
    alternatives = [schema for schema in schemas if schema is not False]
    if True in [schema for schema in alternatives if isinstance(schema, bool)]:
        return True
    return (
        False
        if not alternatives
        else alternatives[0]
        if len(alternatives) == 1
        else {"anyOf": alternatives}
    )


def all_of(*schemas: Schema) -> Schema:
    conjuncts = [schema for schema in schemas if schema is not True and schema != {}]
    if any(schema is False for schema in conjuncts):
        return False
    return True if not conjuncts else conjuncts[0] if len(conjuncts) == 1 else {"allOf": conjuncts}


def exclude_values(values: Iterable[Any]) -> Schema:
    """Return a schema that rejects `values`.

    If one of the values is an array, it rejects all arrays; objects likewise.
    """
    values = distinct(values)
    present = {json_type(value) for value in values}
    alternatives: list[Schema] = []
    absent = [name for name in TYPES if name not in present]
    if absent:
        alternatives.append({"type": absent})
    if "boolean" in present:
        alternatives += [
            {"const": value}
            for value in (True, False)
            if not any(value is excluded for excluded in values)
        ]
    if "string" in present:
        alternatives.append(
            {
                "type": "string",
                "pattern": pattern_excluding([value for value in values if isinstance(value, str)]),
            }
        )
    if "number" in present:
        numbers = sorted(value for value in values if json_type(value) == "number")
        alternatives.append({"type": "number", "exclusiveMaximum": numbers[0]})
        alternatives += [
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
            for low, high in zip(numbers, numbers[1:], strict=False)
        ]
        alternatives.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    return any_of(*alternatives)


def pattern_excluding(texts: Iterable[str]) -> str:
    """Return a pattern that matches all texts except `texts`, without a look-ahead.

    It also rejects every text that starts with the first MAX_SPELLED characters of a longer one.
    """
    trie: dict[str, Any] = {}  # "" marks the end of a text, None a long text that is cut here
    for text in texts:
        node = trie
        for character in text[: MAX_SPELLED - 1]:
            node = node.setdefault(character, {})
        if len(text) < MAX_SPELLED:
            node[""] = {}
        else:
            node[text[MAX_SPELLED - 1]] = None

    def remainder(node: dict[str, Any]) -> str:
        """Return the pattern of what may follow the prefix that a node of the trie stands for."""
        escaped = {letter: f"\\U{ord(letter):08X}" for letter in node if letter}
        alternatives = [f"[^{''.join(escaped.values())}](?s:.*)" if escaped else "(?s:.+)"]
        alternatives += [
            f"{code}{remainder(node[letter])}"
            for letter, code in escaped.items()
            if node[letter] is not None
        ]
        return f"(?:{'|'.join(alternatives)}){'' if '' in node else '?'}"

    return f"^{remainder(trie)}$"
