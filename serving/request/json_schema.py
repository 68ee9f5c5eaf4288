"""JSON schemas as clients send them, rewritten into the keywords that the compiler of llguidance has.

Every value that the result accepts is a value that the schema accepts. It may accept fewer, as the compiler itself does
(which fixes the order of properties): of an array that must contain an item, that item comes first; where one of
several schemas must match, a value tells which one. What can neither be expressed nor narrowed is refused by name.

References are followed here and become references to `$defs`, so that rewriting does not move what they point to.
"""

import math
import re
from collections.abc import Iterable, Mapping
from itertools import combinations, permutations
from typing import Any

from ..api.validation import shown
from .schema_document import (
    CONSTRAINTS,
    KEPT,
    MAX_DEPTH,
    Document,
    Refused,
    Resource,
    Schema,
    checked,
    distinct,
    listed,
    mapping,
    types_of,
)
from .schema_facts import Facts, are_disjoint, facts_of, facts_of_all
from .schema_negation import Negation, all_of, any_of, other_types, types_in

FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())  # others are annotations
MAX_CONTAINS = 64
MAX_PERMUTED, MAX_CHOSEN = 5, 8  # different values of an array, in any order and in the given order


def rewritten(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of the same or fewer values, without references to other places than its `$defs`."""
    return Rewriter(Document(schema)).written()


class Rewriter:
    """Rewrites one document."""

    def __init__(self, document: Document):
        self.document = document
        self.negation = Negation(document, self.positive)
        self.definitions: dict[int, str] = {}  # by the id of a schema
        self.pending: list[tuple[str, Any, Resource]] = []

    def written(self) -> dict[str, Any]:
        home = self.document.resource_of[id(self.document.root)]
        found = self.positive(self.document.root, home)
        if found is False:
            raise Refused("the schema accepts no value; it must accept one")
        found = {} if found is True else dict(found)
        definitions = {}
        while self.pending:
            name, schema, resource = self.pending.pop()
            definitions[name] = self.positive(schema, resource)
        return found | ({"$defs": definitions} if definitions else {})

    def defined(self, reference: Any, resource: Resource, keyword: str) -> Schema:
        node, home = self.document.target(reference, resource, keyword)
        if isinstance(node, bool):
            return node
        if id(node) not in self.definitions:
            self.definitions[id(node)] = f"r{len(self.definitions)}"
            self.pending.append((self.definitions[id(node)], node, home))
        return {"$ref": f"#/$defs/{self.definitions[id(node)]}"}

    def positive(self, schema: Any, resource: Resource) -> Schema:
        """A schema that accepts only what `schema` accepts."""
        if isinstance(schema, bool):
            return schema
        self.document.spend()
        resource = self.document.resource_of.get(id(schema), resource)
        schema = checked(schema)
        if resource.is_legacy and "$ref" in schema:
            return self.defined(schema["$ref"], resource, "$ref")
        schema = self.with_names(schema, resource)
        found: dict[str, Any] = {}
        parts: list[Schema] = []  # that a value must match, too
        for name, value in schema.items():
            if name in ("$ref", "$dynamicRef", "$recursiveRef"):
                parts.append(self.defined(value, resource, name))
            elif name == "type":
                found["type"] = value
            elif name in KEPT or (name == "format" and value in FORMATS):
                found[name] = value
            elif name in ("anyOf", "allOf"):
                parts.append({name: [self.positive(each, resource) for each in value]})
            elif name == "oneOf":
                parts.append(self.one_of(schema, resource))
            elif name == "not":
                parts.append(self.negation.negative(value, resource, 0))
            elif name == "if" and ("then" in schema or "else" in schema):
                parts.append(self.conditional(schema, resource))
            elif name in ("properties", "patternProperties"):
                found[name] = {key: self.positive(each, resource) for key, each in value.items()}
            elif name == "additionalProperties":
                found[name] = self.positive(value, resource)
            elif name in ("dependentRequired", "dependentSchemas", "dependencies"):
                parts += [self.dependency(key, each, resource) for key, each in value.items()]
            elif name == "unevaluatedProperties":
                parts += self.unevaluated_properties(schema, resource)
        self.write_items(schema, found, resource)
        if schema.get("uniqueItems") is True and not is_short(found):
            parts.append(self.different_items(schema, resource))
        bound_properties(found)
        found = {name: value for name, value in found.items() if name not in ("minContains", "maxContains")}
        parts = [part for part in parts if part is not True and part != {}]
        if False in parts:
            return False
        if not parts:
            return found
        if len(parts) == 1 and isinstance(parts[0], Mapping) and not set(parts[0]) & set(found):
            return found | dict(parts[0])
        return {"allOf": [found, *parts]} if found else {"allOf": parts}

    def one_of(self, schema: Mapping[str, Any], resource: Resource) -> Schema:
        """Exactly one of several schemas, as any of schemas of which two cannot match the same value."""
        options = schema["oneOf"]
        facts = [facts_of(self.document, option, resource, 0) for option in options]
        rewritten = [self.positive(option, resource) for option in options]
        overlaps = [
            pair
            for pair in combinations(range(len(options)), 2)
            if not are_disjoint(self.document, *map(facts.__getitem__, pair))
        ]
        if not overlaps:
            return {"anyOf": rewritten}
        if tag := self.tag(schema, facts):
            return {"anyOf": [{"allOf": [option, {"type": "object", "required": [tag]}]} for option in rewritten]}
        excluded: list[list[Schema]] = [[] for _ in options]
        for a, b in overlaps:
            excluded[a].append(self.negation.negative(options[b], resource, 0))
            excluded[b].append(self.negation.negative(options[a], resource, 0))
        alternatives = [
            {"allOf": [option, *others]} if others else option
            for option, others, fact in zip(rewritten, excluded, facts, strict=True)
            if all(fact.types & types_in(each) for each in (option, *others))
        ]
        if not alternatives:
            raise Refused(
                "oneOf of schemas that match the same values is not supported; use anyOf, or a property that differs"
            )
        return {"anyOf": alternatives}

    def tag(self, schema: Mapping[str, Any], facts: list[Facts]) -> str | None:
        """A property of which each object has other values: it tells them apart where it is there."""
        if not all(each.types == {"object"} for each in facts):
            return None
        discriminator = schema.get("discriminator")
        named = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
        common = [key for key in facts[0].properties or () if all(key in (each.properties or ()) for each in facts)]
        for key in sorted(common, key=lambda key: key != named):
            inner = [facts_of_all(self.document, (each.properties or {})[key], 0) for each in facts]
            if all(each.values is not None for each in inner) and all(
                are_disjoint(self.document, a, b) for a, b in combinations(inner, 2)
            ):
                return key
        return None

    def conditional(self, schema: Mapping[str, Any], resource: Resource) -> Schema:
        then, otherwise = schema.get("then", True), schema.get("else", True)
        return any_of(
            all_of(self.positive(schema["if"], resource), self.positive(then, resource)),
            all_of(self.negation.negative(schema["if"], resource, 0), self.positive(otherwise, resource)),
        )

    def dependency(self, key: str, needed: Any, resource: Resource) -> Schema:
        """What an object must have where it has a property."""
        if isinstance(needed, list):
            present: Schema = {"type": "object", "required": [key, *(name for name in needed if name != key)]}
        else:
            present = all_of({"type": "object", "required": [key]}, self.positive(needed, resource))
        absent = {"type": "object", "properties": {key: False}}
        return any_of(other_types("object"), absent, present)

    def with_names(self, schema: Mapping[str, Any], resource: Resource) -> Mapping[str, Any]:
        """A schema whose `propertyNames` are in its properties, as names or as a pattern."""
        if "propertyNames" not in schema:
            return schema
        names, pattern = self.names(schema["propertyNames"], resource, 0)
        found = {name: value for name, value in schema.items() if name != "propertyNames"}
        if names is None and pattern is None:
            return found
        if "unevaluatedProperties" in schema:
            raise Refused("propertyNames beside unevaluatedProperties is not supported; use additionalProperties")
        other = schema.get("additionalProperties", True)
        properties = dict(schema.get("properties", {}))
        allowed = frozenset(names or ())
        for key in properties:
            if not (key in allowed if names is not None else matches(pattern, key)):
                properties[key] = False
        if "patternProperties" in schema and (names or pattern):
            raise Refused("propertyNames beside patternProperties is not supported; leave one of them out")
        if names is not None:
            found.pop("patternProperties", None)
            properties |= {name: other for name in names if name not in properties}
        elif other is not False:
            found["patternProperties"] = {pattern: other}
        return found | {"properties": properties, "additionalProperties": False}

    def names(self, schema: Schema, resource: Resource, depth: int) -> tuple[list[str] | None, str | None]:
        """The texts, or the pattern of them, that a schema of names accepts; neither where it accepts all."""
        if isinstance(schema, bool):
            return (None, None) if schema else ([], None)
        resource = self.document.resource_of.get(id(schema), resource)
        schema = checked(schema)
        if "$ref" in schema and depth < MAX_DEPTH:
            return self.names(*self.document.target(schema["$ref"], resource), depth + 1)
        kinds = types_of(schema)
        if "string" not in kinds or schema.get("minLength", 0) > schema.get("maxLength", math.inf):
            return [], None
        known = {"type", "enum", "const", "pattern", "minLength", "maxLength", "format"}
        if others := sorted(name for name in schema if name in CONSTRAINTS - known):
            raise Refused(f"{others[0]} of propertyNames is not supported; use pattern, enum, minLength or maxLength")
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        sized = None if not low and high is None else f"^(?s:.{{{low},{'' if high is None else high}}})$"
        patterns = [each for each in (schema.get("pattern"), sized) if each is not None]
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            texts = [value for value in values if isinstance(value, str)]
            return [text for text in texts if all(matches(each, text) for each in patterns)], None
        if len(patterns) > 1:
            raise Refused("propertyNames with a pattern and a length is not supported; write the length in the pattern")
        return None, patterns[0] if patterns else None

    def write_items(self, schema: Mapping[str, Any], found: dict[str, Any], resource: Resource) -> None:
        """The items of an array, those that it must contain at its beginning."""
        prefix = list(schema.get("prefixItems", ()))
        rest: Any = schema.get("items", schema.get("unevaluatedItems", True))
        if isinstance(rest, list):
            prefix, rest = rest, schema.get("additionalItems", schema.get("unevaluatedItems", True))
        unevaluated = schema.get("unevaluatedItems", True)
        evaluating = {
            "$ref",
            "$dynamicRef",
            "$recursiveRef",
            "allOf",
            "anyOf",
            "oneOf",
            "if",
            "dependentSchemas",
            "contains",
        }
        if unevaluated is not True and unevaluated != {} and rest is unevaluated and set(schema) & evaluating:
            raise Refused("unevaluatedItems beside other schemas of the array is not supported; use items")
        written = [self.positive(each, resource) for each in prefix]
        other = self.positive(rest, resource)
        if "contains" in schema:
            least, most = schema.get("minContains", 1), schema.get("maxContains")
            if least > MAX_CONTAINS:
                raise Refused(f"minContains is {least}; it must be at most {MAX_CONTAINS}")
            if most is not None and most < least:
                found["minItems"], written, other = 1, [False], False
                found["maxItems"] = 0
            wanted = self.positive(schema["contains"], resource)
            written += [other] * (least - len(written))
            if most is not None:
                unwanted = self.negation.negative(schema["contains"], resource, 0)
                written[least:] = [all_of(each, unwanted) for each in written[least:]]
                other = all_of(other, unwanted)
            written[:least] = [all_of(each, wanted) for each in written[:least]]
            found["minItems"] = max(least, found.get("minItems", 0))
        if written:
            found["prefixItems"] = written
        if other is not True and other != {}:
            found["items"] = other

    def different_items(self, schema: Mapping[str, Any], resource: Resource) -> Schema:
        """Arrays of different values, where there are few values."""
        items = schema.get("items", True)
        facts = (
            facts_of(self.document, items, resource, 0)
            if "prefixItems" not in schema and not isinstance(items, list)
            else None
        )
        if facts is None or facts.values is None or len(facts.values) > MAX_CHOSEN:
            told = f"supported only for items of an enum of at most {MAX_CHOSEN} values, or with maxItems 1"
            raise Refused(f"uniqueItems is {told}; leave it out")
        values = distinct(facts.values)
        low, high = schema.get("minItems", 0), min(schema.get("maxItems", len(values)), len(values))
        choose = permutations if len(values) <= MAX_PERMUTED else combinations
        arrays = [list(chosen) for count in range(low, high + 1) for chosen in choose(values, count)]
        return any_of(other_types("array"), {"enum": arrays} if arrays else False)

    def unevaluated_properties(self, schema: Mapping[str, Any], resource: Resource) -> list[Schema]:
        """Properties that no other part of a schema describes, as additional ones of what describes the others."""
        value = schema["unevaluatedProperties"]
        if value is True or value == {} or "additionalProperties" in schema:
            return []
        names, patterns, is_open = self.evaluated(schema, resource, 0)
        choices = [name for name in ("anyOf", "oneOf", "if", "dependentSchemas", "dependencies") if name in schema]
        if is_open:
            return []
        if choices not in ([], ["anyOf"]):
            raise Refused(f"unevaluatedProperties beside {choices[0]} is not supported; use additionalProperties")
        other = self.positive(value, resource)

        def closed(names: Iterable[str], patterns: Iterable[str]) -> Schema:
            return {
                "properties": dict.fromkeys(names, True),
                **({"patternProperties": dict.fromkeys(patterns, True)} if patterns else {}),
                "additionalProperties": other,
            }

        if not choices:
            return [closed(names, patterns)]
        alternatives = []
        for option in schema["anyOf"]:
            inner_names, inner_patterns, inner_open = self.evaluated(option, resource, 0)
            rewritten = self.positive(option, resource)
            limit = closed([*names, *inner_names], [*patterns, *inner_patterns])
            alternatives.append(rewritten if inner_open else all_of(rewritten, limit))
        return [any_of(*alternatives)]

    def evaluated(self, schema: Any, resource: Resource, depth: int) -> tuple[list[str], list[str], bool]:
        """The names and the patterns of the properties that a schema describes for certain, and whether it does all."""
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return [], [], False
        self.document.spend()
        resource = self.document.resource_of.get(id(schema), resource)
        names = list(mapping(schema, "properties"))
        patterns = list(mapping(schema, "patternProperties"))
        is_open = "additionalProperties" in schema or (depth > 0 and "unevaluatedProperties" in schema)
        inner = [(each, resource) for each in listed(schema, "allOf")]
        inner += [
            self.document.target(schema[name], resource, name)
            for name in ("$ref", "$dynamicRef", "$recursiveRef")
            if name in schema
        ]
        if depth and {"anyOf", "oneOf", "if", "dependentSchemas"} & set(schema):
            raise Refused("unevaluatedProperties of schemas with choices is not supported; use additionalProperties")
        for each, home in inner:
            more_names, more_patterns, more_open = self.evaluated(each, home, depth + 1)
            names, patterns, is_open = names + more_names, patterns + more_patterns, is_open or more_open
        return names, patterns, is_open


def matches(pattern: str | None, text: str) -> bool:
    try:
        return pattern is None or re.search(pattern, text) is not None
    except re.error as error:
        raise Refused(f"pattern is {shown(pattern)}; it must be a regular expression: {error}") from None


def is_short(schema: Mapping[str, Any]) -> bool:
    """Whether an array has no two items, or there is no array."""
    is_limited = schema.get("maxItems", 2) <= 1 or (
        schema.get("items") is False and len(listed(schema, "prefixItems")) < 2
    )
    return is_limited or "array" not in types_of(schema)


def bound_properties(schema: dict[str, Any]) -> None:
    """Express bounds of the number of properties, which the library has for few schemas, by what is required."""
    low, high = schema.get("minProperties", 0), schema.get("maxProperties")
    properties, required = schema.get("properties", {}), list(dict.fromkeys(schema.get("required", ())))
    optional = [key for key, value in properties.items() if key not in required and value is not False]
    missing = max(0, low - len(required))
    if not optional or (not missing and high is None):
        return
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if is_closed and missing <= 1 and (high is None or high - len(required) == 1):
        return
    required += optional[:missing]
    left = optional[missing:]
    if high is not None:
        kept = max(0, high - len(required))
        schema["properties"] = {key: False if key in left[kept:] else value for key, value in properties.items()}
        if left:
            schema["additionalProperties"] = False
            schema.pop("patternProperties", None)
            if len(required) <= high:
                del schema["maxProperties"]
    schema["required"] = required
    if len(required) >= low:
        schema.pop("minProperties", None)
