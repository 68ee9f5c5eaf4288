"""Rewrites JSON schemas of clients into the keywords that the compiler of llguidance supports.

Every value that the result accepts is accepted by the schema. The result may accept fewer values,
as the compiler itself does (it fixes the order of properties): an array that must contain an item
has it first, and where exactly one of several schemas must match, only values that tell which one
are accepted. A schema that can neither be expressed nor narrowed is refused with the name of the
keyword.

References are resolved here and become references to `$defs`, so that moving a schema does not
break them.
"""

import math
import re
from collections.abc import Iterable, Mapping
from itertools import combinations, permutations
from typing import Any

from ..api.validation import shown
from .schema_document import (
    CONSTRAINTS,
    COPIED_KEYWORDS,
    MAX_DEPTH,
    Document,
    Resource,
    Schema,
    UnsupportedSchema,
    distinct,
    list_keyword,
    mapping_keyword,
    schema_types,
    validate_keywords,
)
from .schema_facts import Facts, are_disjoint, derive_facts, derive_joint_facts
from .schema_negation import Negation, all_of, any_of, possible_types, types_except

FORMATS = frozenset(
    "date-time time date duration email hostname ipv4 ipv6 uuid uri".split()
)  # all others are annotations
MAX_CONTAINS = 64
# Distinct array values for which every order is listed; with more, only the given order.
MAX_PERMUTED = 5
MAX_CHOSEN = 8


def rewrite_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of the same or fewer values whose only references point to its `$defs`."""
    return Rewriter(Document(schema)).rewrite()


class Rewriter:
    """Rewrites one document."""

    def __init__(self, document: Document):
        self.document = document
        self.negation = Negation(document, self.positive)
        self.definitions: dict[int, str] = {}  # by id() of the schema
        self.pending: list[tuple[str, Any, Resource]] = []

    def rewrite(self) -> dict[str, Any]:
        home = self.document.resources_by_schema[id(self.document.root)]
        rewritten = self.positive(self.document.root, home)
        if rewritten is False:
            raise UnsupportedSchema("the schema accepts no value; it must accept one")
        rewritten = {} if rewritten is True else dict(rewritten)
        definitions = {}
        while self.pending:
            name, schema, resource = self.pending.pop()
            definitions[name] = self.positive(schema, resource)
        return rewritten | ({"$defs": definitions} if definitions else {})

    def reference_definition(self, reference: Any, resource: Resource, keyword: str) -> Schema:
        node, home = self.document.target(reference, resource, keyword)
        if isinstance(node, bool):
            return node
        if id(node) not in self.definitions:
            self.definitions[id(node)] = f"r{len(self.definitions)}"
            self.pending.append((self.definitions[id(node)], node, home))
        return {"$ref": f"#/$defs/{self.definitions[id(node)]}"}

    def positive(self, schema: Any, resource: Resource) -> Schema:
        """Return a schema that accepts only values which `schema` accepts."""
        if isinstance(schema, bool):
            return schema
        self.document.spend_budget()
        resource = self.document.resources_by_schema.get(id(schema), resource)
        schema = validate_keywords(schema)
        if resource.is_legacy and "$ref" in schema:
            return self.reference_definition(schema["$ref"], resource, "$ref")
        schema = self.apply_property_names(schema, resource)
        rewritten: dict[str, Any] = {}
        conjuncts: list[Schema] = []  # schemas that a value must match too
        for name, value in schema.items():
            if name in ("$ref", "$dynamicRef", "$recursiveRef"):
                conjuncts.append(self.reference_definition(value, resource, name))
            elif name == "type":
                rewritten["type"] = value
            elif name in COPIED_KEYWORDS or (name == "format" and value in FORMATS):
                rewritten[name] = value
            elif name in ("anyOf", "allOf"):
                conjuncts.append(
                    {name: [self.positive(subschema, resource) for subschema in value]}
                )
            elif name == "oneOf":
                conjuncts.append(self.rewrite_one_of(schema, resource))
            elif name == "not":
                conjuncts.append(self.negation.negative(value, resource, 0))
            elif name == "if" and ("then" in schema or "else" in schema):
                conjuncts.append(self.rewrite_conditional(schema, resource))
            elif name in ("properties", "patternProperties"):
                rewritten[name] = {
                    key: self.positive(subschema, resource) for key, subschema in value.items()
                }
            elif name == "additionalProperties":
                rewritten[name] = self.positive(value, resource)
            elif name in ("dependentRequired", "dependentSchemas", "dependencies"):
                conjuncts += [
                    self.rewrite_dependency(key, subschema, resource)
                    for key, subschema in value.items()
                ]
            elif name == "unevaluatedProperties":
                conjuncts += self.close_unevaluated(schema, resource)
        self.write_items(schema, rewritten, resource)
        if schema.get("uniqueItems") is True and not is_short(rewritten):
            conjuncts.append(self.unique_items(schema, resource))
        bound_properties(rewritten)
        rewritten = {
            name: value
            for name, value in rewritten.items()
            if name not in ("minContains", "maxContains")
        }
        conjuncts = [conjunct for conjunct in conjuncts if conjunct is not True and conjunct != {}]
        if False in conjuncts:
            return False
        if not conjuncts:
            return rewritten
        if (
            len(conjuncts) == 1
            and isinstance(conjuncts[0], Mapping)
            and not set(conjuncts[0]) & set(rewritten)
        ):
            return rewritten | dict(conjuncts[0])
        return {"allOf": [rewritten, *conjuncts]} if rewritten else {"allOf": conjuncts}

    def rewrite_one_of(self, schema: Mapping[str, Any], resource: Resource) -> Schema:
        """Rewrite `oneOf` as `anyOf` of schemas of which no two match the same value."""
        options = schema["oneOf"]
        facts = [derive_facts(self.document, option, resource, 0) for option in options]
        rewritten = [self.positive(option, resource) for option in options]
        overlaps = [
            (first, second)
            for first, second in combinations(range(len(options)), 2)
            if not are_disjoint(self.document, facts[first], facts[second])
        ]
        if not overlaps:
            return {"anyOf": rewritten}
        if tag := self.find_tag(schema, facts):
            return {
                "anyOf": [
                    {"allOf": [option, {"type": "object", "required": [tag]}]}
                    for option in rewritten
                ]
            }
        excluded: list[list[Schema]] = [[] for _ in options]
        for a, b in overlaps:
            excluded[a].append(self.negation.negative(options[b], resource, 0))
            excluded[b].append(self.negation.negative(options[a], resource, 0))
        alternatives = [
            {"allOf": [option, *exclusions]} if exclusions else option
            for option, exclusions, fact in zip(rewritten, excluded, facts, strict=True)
            if all(fact.types & possible_types(conjunct) for conjunct in (option, *exclusions))
        ]
        if not alternatives:
            raise UnsupportedSchema(
                "oneOf of schemas that match the same values is not supported; use anyOf, or a "
                "property that differs"
            )
        return {"anyOf": alternatives}

    def find_tag(self, schema: Mapping[str, Any], facts: list[Facts]) -> str | None:
        """Return a property by which any two of the objects are told apart, or None."""
        if not all(fact.types == {"object"} for fact in facts):
            return None
        discriminator = schema.get("discriminator")
        named = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
        common = [
            key
            for key in facts[0].properties or ()
            if all(key in (fact.properties or ()) for fact in facts)
        ]
        for key in sorted(common, key=lambda key: key != named):
            inner = [
                derive_joint_facts(self.document, (fact.properties or {})[key], 0) for fact in facts
            ]
            if all(fact.values is not None for fact in inner) and all(
                are_disjoint(self.document, a, b) for a, b in combinations(inner, 2)
            ):
                return key
        return None

    def rewrite_conditional(self, schema: Mapping[str, Any], resource: Resource) -> Schema:
        then = schema.get("then", True)
        otherwise = schema.get("else", True)
        return any_of(
            all_of(self.positive(schema["if"], resource), self.positive(then, resource)),
            all_of(
                self.negation.negative(schema["if"], resource, 0),
                self.positive(otherwise, resource),
            ),
        )

    def rewrite_dependency(self, key: str, needed: Any, resource: Resource) -> Schema:
        """Rewrite the condition on an object that has the property `key`."""
        if isinstance(needed, list):
            present: Schema = {
                "type": "object",
                "required": [key, *(name for name in needed if name != key)],
            }
        else:
            present = all_of({"type": "object", "required": [key]}, self.positive(needed, resource))
        absent = {"type": "object", "properties": {key: False}}
        return any_of(types_except("object"), absent, present)

    def apply_property_names(
        self, schema: Mapping[str, Any], resource: Resource
    ) -> Mapping[str, Any]:
        """Move `propertyNames` into the properties: as names, or as a pattern."""
        if "propertyNames" not in schema:
            return schema
        names, pattern = self.allowed_names(schema["propertyNames"], resource, 0)
        kept_keywords = {name: value for name, value in schema.items() if name != "propertyNames"}
        if names is None and pattern is None:
            return kept_keywords
        if "unevaluatedProperties" in schema:
            raise UnsupportedSchema(
                "propertyNames beside unevaluatedProperties is not supported; use "
                "additionalProperties"
            )
        other_properties = schema.get("additionalProperties", True)
        properties = dict(schema.get("properties", {}))
        allowed = frozenset(names or ())
        for key in properties:
            if not (key in allowed if names is not None else matches(pattern, key)):
                properties[key] = False
        if "patternProperties" in schema and (names or pattern):
            raise UnsupportedSchema(
                "propertyNames beside patternProperties is not supported; leave one of them out"
            )
        if names is not None:
            kept_keywords.pop("patternProperties", None)
            properties |= {name: other_properties for name in names if name not in properties}
        elif other_properties is not False:
            kept_keywords["patternProperties"] = {pattern: other_properties}
        return kept_keywords | {"properties": properties, "additionalProperties": False}

    def allowed_names(
        self, schema: Schema, resource: Resource, depth: int
    ) -> tuple[list[str] | None, str | None]:
        """Return the names, or the pattern of names, that a schema accepts; (None, None) for
        all.
        """
        if isinstance(schema, bool):
            return (None, None) if schema else ([], None)
        resource = self.document.resources_by_schema.get(id(schema), resource)
        schema = validate_keywords(schema)
        if "$ref" in schema and depth < MAX_DEPTH:
            return self.allowed_names(*self.document.target(schema["$ref"], resource), depth + 1)
        kinds = schema_types(schema)
        if "string" not in kinds or schema.get("minLength", 0) > schema.get("maxLength", math.inf):
            return [], None
        supported = {"type", "enum", "const", "pattern", "minLength", "maxLength", "format"}
        if unsupported := sorted(name for name in schema if name in CONSTRAINTS - supported):
            raise UnsupportedSchema(
                f"{unsupported[0]} of propertyNames is not supported; use pattern, enum, minLength "
                "or maxLength"
            )
        low = schema.get("minLength", 0)
        high = schema.get("maxLength")
        sized = (
            None
            if not low and high is None
            else f"^(?s:.{{{low},{'' if high is None else high}}})$"
        )
        patterns = [regex for regex in (schema.get("pattern"), sized) if regex is not None]
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            texts = [value for value in values if isinstance(value, str)]
            return [text for text in texts if all(matches(regex, text) for regex in patterns)], None
        if len(patterns) > 1:
            raise UnsupportedSchema(
                "propertyNames with a pattern and a length is not supported; write the length in "
                "the pattern"
            )
        return None, patterns[0] if patterns else None

    def write_items(
        self, schema: Mapping[str, Any], rewritten: dict[str, Any], resource: Resource
    ) -> None:
        """Write the array keywords. Items that the array must contain come first."""
        prefix = list(schema.get("prefixItems", ()))
        item_schema: Any = schema.get("items", schema.get("unevaluatedItems", True))
        if isinstance(item_schema, list):
            prefix = item_schema
            item_schema = schema.get("additionalItems", schema.get("unevaluatedItems", True))
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
        if (
            unevaluated is not True
            and unevaluated != {}
            and item_schema is unevaluated
            and set(schema) & evaluating
        ):
            raise UnsupportedSchema(
                "unevaluatedItems beside other schemas of the array is not supported; use items"
            )
        prefix_items = [self.positive(prefix_schema, resource) for prefix_schema in prefix]
        other_items = self.positive(item_schema, resource)
        if "contains" in schema:
            min_count = schema.get("minContains", 1)
            max_count = schema.get("maxContains")
            if min_count > MAX_CONTAINS:
                raise UnsupportedSchema(
                    f"minContains is {min_count}; it must be at most {MAX_CONTAINS}"
                )
            if max_count is not None and max_count < min_count:
                rewritten["minItems"] = 1
                prefix_items = [False]
                other_items = False
                rewritten["maxItems"] = 0
            contained = self.positive(schema["contains"], resource)
            prefix_items += [other_items] * (min_count - len(prefix_items))
            if max_count is not None:
                not_contained = self.negation.negative(schema["contains"], resource, 0)
                prefix_items[min_count:] = [
                    all_of(item, not_contained) for item in prefix_items[min_count:]
                ]
                other_items = all_of(other_items, not_contained)
            prefix_items[:min_count] = [
                all_of(item, contained) for item in prefix_items[:min_count]
            ]
            rewritten["minItems"] = max(min_count, rewritten.get("minItems", 0))
        if prefix_items:
            rewritten["prefixItems"] = prefix_items
        if other_items is not True and other_items != {}:
            rewritten["items"] = other_items

    def unique_items(self, schema: Mapping[str, Any], resource: Resource) -> Schema:
        """Enumerate the arrays of unique items, if there are few possible items."""
        items = schema.get("items", True)
        facts = (
            derive_facts(self.document, items, resource, 0)
            if "prefixItems" not in schema and not isinstance(items, list)
            else None
        )
        if facts is None or facts.values is None or len(facts.values) > MAX_CHOSEN:
            limitation = (
                f"supported only for items of an enum of at most {MAX_CHOSEN} values, or with "
                "maxItems 1"
            )
            raise UnsupportedSchema(f"uniqueItems is {limitation}; leave it out")
        values = distinct(facts.values)
        low = schema.get("minItems", 0)
        high = min(schema.get("maxItems", len(values)), len(values))
        choose = permutations if len(values) <= MAX_PERMUTED else combinations
        arrays = [
            list(chosen) for count in range(low, high + 1) for chosen in choose(values, count)
        ]
        return any_of(types_except("array"), {"enum": arrays} if arrays else False)

    def close_unevaluated(self, schema: Mapping[str, Any], resource: Resource) -> list[Schema]:
        """Rewrite `unevaluatedProperties` as `additionalProperties` beside the evaluated ones."""
        value = schema["unevaluatedProperties"]
        if value is True or value == {} or "additionalProperties" in schema:
            return []
        names, patterns, is_open = self.evaluated_properties(schema, resource, 0)
        choices = [
            name
            for name in ("anyOf", "oneOf", "if", "dependentSchemas", "dependencies")
            if name in schema
        ]
        if is_open:
            return []
        if choices not in ([], ["anyOf"]):
            raise UnsupportedSchema(
                f"unevaluatedProperties beside {choices[0]} is not supported; use "
                "additionalProperties"
            )
        rewritten_value = self.positive(value, resource)

        def closed(names: Iterable[str], patterns: Iterable[str]) -> Schema:
            return {
                "properties": dict.fromkeys(names, True),
                **({"patternProperties": dict.fromkeys(patterns, True)} if patterns else {}),
                "additionalProperties": rewritten_value,
            }

        if not choices:
            return [closed(names, patterns)]
        alternatives = []
        for option in schema["anyOf"]:
            inner_names, inner_patterns, inner_open = self.evaluated_properties(option, resource, 0)
            rewritten = self.positive(option, resource)
            limit = closed([*names, *inner_names], [*patterns, *inner_patterns])
            alternatives.append(rewritten if inner_open else all_of(rewritten, limit))
        return [any_of(*alternatives)]

    def evaluated_properties(
        self, schema: Any, resource: Resource, depth: int
    ) -> tuple[list[str], list[str], bool]:
        """Return the names and patterns of evaluated properties, and whether all are evaluated."""
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return [], [], False
        self.document.spend_budget()
        resource = self.document.resources_by_schema.get(id(schema), resource)
        names = list(mapping_keyword(schema, "properties"))
        patterns = list(mapping_keyword(schema, "patternProperties"))
        is_open = "additionalProperties" in schema or (
            depth > 0 and "unevaluatedProperties" in schema
        )
        inner = [(subschema, resource) for subschema in list_keyword(schema, "allOf")]
        inner += [
            self.document.target(schema[name], resource, name)
            for name in ("$ref", "$dynamicRef", "$recursiveRef")
            if name in schema
        ]
        if depth and {"anyOf", "oneOf", "if", "dependentSchemas"} & set(schema):
            raise UnsupportedSchema(
                "unevaluatedProperties of schemas with choices is not supported; use "
                "additionalProperties"
            )
        for subschema, home in inner:
            more_names, more_patterns, more_open = self.evaluated_properties(
                subschema, home, depth + 1
            )
            names = names + more_names
            patterns = patterns + more_patterns
            is_open = is_open or more_open
        return names, patterns, is_open


def matches(pattern: str | None, text: str) -> bool:
    try:
        return pattern is None or re.search(pattern, text) is not None
    except re.error as error:
        raise UnsupportedSchema(
            f"pattern is {shown(pattern)}; it must be a regular expression: {error}"
        ) from None


def is_short(schema: Mapping[str, Any]) -> bool:
    """Return whether the schema accepts no array of two or more items."""
    is_limited = schema.get("maxItems", 2) <= 1 or (
        schema.get("items") is False and len(list_keyword(schema, "prefixItems")) < 2
    )
    return is_limited or "array" not in schema_types(schema)


def bound_properties(schema: dict[str, Any]) -> None:
    """Express bounds of the number of properties through `required`.

    The compiler supports `minProperties` and `maxProperties` for few schemas only.
    """
    low = schema.get("minProperties", 0)
    high = schema.get("maxProperties")
    properties = schema.get("properties", {})
    required = list(dict.fromkeys(schema.get("required", ())))
    optional = [
        key for key, value in properties.items() if key not in required and value is not False
    ]
    missing = max(0, low - len(required))
    if not optional or (not missing and high is None):
        return
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if is_closed and missing <= 1 and (high is None or high - len(required) == 1):
        return
    required += optional[:missing]
    optional_left = optional[missing:]
    if high is not None:
        num_kept = max(0, high - len(required))
        schema["properties"] = {
            key: False if key in optional_left[num_kept:] else value
            for key, value in properties.items()
        }
        if optional_left:
            schema["additionalProperties"] = False
            schema.pop("patternProperties", None)
            if len(required) <= high:
                del schema["maxProperties"]
    schema["required"] = required
    if len(required) >= low:
        schema.pop("minProperties", None)
