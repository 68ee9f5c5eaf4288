"""JSON schemas as clients send them, rewritten into the keywords that the compiler of llguidance has.

Every value that the result accepts is a value that the schema accepts. It may accept fewer, as the compiler itself does
(which fixes the order of properties): of an array that must contain an item, that item comes first; where one of
several schemas must match, a value tells which one. What can neither be expressed nor narrowed is refused by name.

References are followed here and become references to `$defs`, so that rewriting does not move what they point to.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from ..api.validation import shown

Schema = Mapping[str, Any] | bool

TYPES = ("null", "boolean", "number", "string", "array", "object")
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())  # others are annotations
SINGLE = frozenset("not if then else contains propertyNames items additionalItems additionalProperties".split())
SINGLE |= {"unevaluatedItems", "unevaluatedProperties", "contentSchema"}
SEVERAL = frozenset({"anyOf", "allOf", "oneOf", "prefixItems", "items"})
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
COUNTS |= {"minContains", "maxContains"}
NUMBERS = frozenset({"minimum", "maximum", "multipleOf"})
BEFORE_2019 = re.compile(r"json-schema\.org/draft-0[4-7]\b")  # drafts in which `$ref` replaces what stands beside it
MAX_SCHEMAS = 20_000  # that are visited
MAX_DEPTH = 24  # of references that are followed to compare or to negate schemas
MAX_CONTAINS = 64
MAX_SPELLED = 32  # characters of a text that must not come; the library nests 250 groups
MAX_PERMUTED, MAX_CHOSEN = 5, 8  # different values of an array, in any order and in the given order


class Refused(ValueError):
    """A schema cannot be kept; the message names the keyword."""


@dataclass(frozen=True, eq=False)
class Resource:
    """A schema with an identifier of its own, within which references without one are resolved."""

    uri: str
    root: Schema
    is_legacy: bool  # of a draft before 2019-09
    anchors: dict[str, Any]


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


def rewritten(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of the same or fewer values, without references to other places than its `$defs`."""
    return Rewriter(schema).document()


class Rewriter:
    """Rewrites one document."""

    def __init__(self, schema: Mapping[str, Any]):
        self.budget = MAX_SCHEMAS
        self.root = schema
        self.resources: dict[str, Resource] = {}
        self.resource_of: dict[int, Resource] = {}  # by the id of a schema
        self.index(schema)
        self.definitions: dict[int, str] = {}  # by the id of a schema
        self.pending: list[tuple[str, Any, Resource]] = []

    def document(self) -> dict[str, Any]:
        home = self.resource_of[id(self.root)]
        found = self.positive(self.root, home)
        if found is False:
            raise Refused("the schema accepts no value; it must accept one")
        found = {} if found is True else dict(found)
        written = {}
        while self.pending:
            name, schema, resource = self.pending.pop()
            written[name] = self.positive(schema, resource)
        return found | ({"$defs": written} if written else {})

    # Identifiers and references

    def index(self, schema: Any) -> None:
        """Find the resources of the document and their anchors."""
        pending: list[tuple[Any, Resource | None]] = [(schema, None)]
        while pending:
            node, resource = pending.pop()
            if not isinstance(node, Mapping):
                continue
            self.spend()
            draft = node.get("$schema")
            is_legacy = (
                bool(BEFORE_2019.search(draft))
                if isinstance(draft, str)
                else resource is not None and resource.is_legacy
            )
            given = node.get("$id", node.get("id") if is_legacy else None)
            if "$ref" in node and is_legacy:
                given = None
            if resource is None or (isinstance(given, str) and not given.startswith("#")):
                base = resource.uri if resource else ""
                uri = joined(base, given)[0] if isinstance(given, str) else base
                resource = Resource(uri, node, is_legacy, {})
                self.resources.setdefault(resource.uri, resource)
            for name in ("$anchor", "$dynamicAnchor"):
                if isinstance(node.get(name), str):
                    resource.anchors.setdefault(node[name], node)
            if isinstance(given, str) and given.startswith("#"):
                resource.anchors.setdefault(given[1:], node)
            self.resource_of[id(node)] = resource
            pending += [(each, resource) for each in subschemas(node)]

    def spend(self) -> None:
        self.budget -= 1
        if self.budget < 0:
            raise Refused(f"the schema has more than {MAX_SCHEMAS} parts; it must be simpler")

    def target(self, reference: Any, resource: Resource, keyword: str = "$ref") -> tuple[Any, Resource]:
        """The schema that a reference points to."""
        if not isinstance(reference, str):
            raise Refused(f"{keyword} is {shown(reference)}; it must be a text")
        if keyword != "$ref" and len(self.resources) > 1:
            raise Refused(f"{keyword} in a schema of several resources is not supported; use $ref")
        is_inside = reference.startswith("#")
        address, fragment = ("", reference[1:]) if is_inside else joined(resource.uri, reference)
        home = resource if is_inside else self.resources.get(address)
        node = home and pointed_at(home, unquote(fragment))
        if node is None and is_inside:  # as many documents of embedded schemas mean it
            home = self.resource_of[id(self.root)]
            node = pointed_at(home, unquote(fragment))
        if home is None or node is None:
            told = "it must point to a place in the schema, and nothing is fetched"
            raise Refused(f"{keyword} {shown(reference)} points to nothing in the schema; {told}")
        return node, self.resource_of.get(id(node), home)

    def defined(self, reference: Any, resource: Resource, keyword: str) -> Schema:
        node, home = self.target(reference, resource, keyword)
        if isinstance(node, bool):
            return node
        if id(node) not in self.definitions:
            self.definitions[id(node)] = f"r{len(self.definitions)}"
            self.pending.append((self.definitions[id(node)], node, home))
        return {"$ref": f"#/$defs/{self.definitions[id(node)]}"}

    # Values that a schema accepts

    def positive(self, schema: Any, resource: Resource) -> Schema:
        """A schema that accepts only what `schema` accepts."""
        if isinstance(schema, bool):
            return schema
        self.spend()
        resource = self.resource_of.get(id(schema), resource)
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
                parts.append(self.negative(value, resource, 0))
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
        facts = [self.facts(option, resource, 0) for option in options]
        rewritten = [self.positive(option, resource) for option in options]
        overlaps = [
            pair
            for pair in combinations(range(len(options)), 2)
            if not self.are_disjoint(*map(facts.__getitem__, pair))
        ]
        if not overlaps:
            return {"anyOf": rewritten}
        if tag := self.tag(schema, facts):
            return {"anyOf": [{"allOf": [option, {"type": "object", "required": [tag]}]} for option in rewritten]}
        excluded: list[list[Schema]] = [[] for _ in options]
        for a, b in overlaps:
            excluded[a].append(self.negative(options[b], resource, 0))
            excluded[b].append(self.negative(options[a], resource, 0))
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
            inner = [self.facts_of_all((each.properties or {})[key], 0) for each in facts]
            if all(each.values is not None for each in inner) and all(
                self.are_disjoint(a, b) for a, b in combinations(inner, 2)
            ):
                return key
        return None

    def conditional(self, schema: Mapping[str, Any], resource: Resource) -> Schema:
        then, otherwise = schema.get("then", True), schema.get("else", True)
        return any_of(
            all_of(self.positive(schema["if"], resource), self.positive(then, resource)),
            all_of(self.negative(schema["if"], resource, 0), self.positive(otherwise, resource)),
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
        resource = self.resource_of.get(id(schema), resource)
        schema = checked(schema)
        if "$ref" in schema and depth < MAX_DEPTH:
            return self.names(*self.target(schema["$ref"], resource), depth + 1)
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
                unwanted = self.negative(schema["contains"], resource, 0)
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
        facts = self.facts(items, resource, 0) if "prefixItems" not in schema and not isinstance(items, list) else None
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
        self.spend()
        resource = self.resource_of.get(id(schema), resource)
        names = list(mapping(schema, "properties"))
        patterns = list(mapping(schema, "patternProperties"))
        is_open = "additionalProperties" in schema or (depth > 0 and "unevaluatedProperties" in schema)
        inner = [(each, resource) for each in listed(schema, "allOf")]
        inner += [
            self.target(schema[name], resource, name)
            for name in ("$ref", "$dynamicRef", "$recursiveRef")
            if name in schema
        ]
        if depth and {"anyOf", "oneOf", "if", "dependentSchemas"} & set(schema):
            raise Refused("unevaluatedProperties of schemas with choices is not supported; use additionalProperties")
        for each, home in inner:
            more_names, more_patterns, more_open = self.evaluated(each, home, depth + 1)
            names, patterns, is_open = names + more_names, patterns + more_patterns, is_open or more_open
        return names, patterns, is_open

    # Values that a schema does not accept

    def negative(self, schema: Any, resource: Resource, depth: int) -> Schema:
        """A schema that accepts only what `schema` does not accept.

        It is the union of what breaks each keyword; a keyword that cannot be expressed so adds nothing.
        """
        if isinstance(schema, bool):
            return not schema
        if depth > MAX_DEPTH:
            return False
        self.spend()
        schema = checked(schema)
        resource = self.resource_of.get(id(schema), resource)

        def inner(value: Any) -> Schema:
            return self.negative(value, resource, depth + 1)

        broken: list[Schema] = []
        if "$ref" in schema:
            node, home = self.target(schema["$ref"], resource)
            broken.append(self.negative(node, home, depth + 1))
            if resource.is_legacy:
                return broken[0]
        types = types_of(schema)
        if "type" in schema:
            left = [name for name in TYPES if name not in types and not (name == "number" and "integer" in types)]
            broken.append({"type": left} if left else False)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            broken.append(none_of(values, types))
        for name, other, kind, step in OPPOSITES:
            if isinstance(schema.get(name), int | float) and not isinstance(schema[name], bool):
                limit = schema[name] + step
                broken.append({"type": kind, other: limit} if limit >= 0 or kind == "number" else False)
        for key in schema.get("required", ()):
            broken.append({"type": "object", "properties": {key: False}})
        for key, each in mapping(schema, "properties").items():
            if (without := inner(each)) is not False:
                broken.append({"type": "object", "required": [key], "properties": {key: without}})
        if isinstance(schema.get("items"), Mapping | bool) and (without := inner(schema["items"])) is not False:
            before = len(listed(schema, "prefixItems"))
            broken.append({"type": "array", "minItems": before + 1, "prefixItems": [True] * before + [without]})
        if "contains" in schema and schema.get("minContains", 1) == 1:
            broken.append(all_of({"type": "array"}, {"items": inner(schema["contains"])}))
        if "anyOf" in schema:
            broken.append(all_of(*map(inner, schema["anyOf"])))
        broken += map(inner, schema.get("allOf", ()))
        if "not" in schema:
            broken.append(self.positive(schema["not"], resource))
        if "if" in schema and ("then" in schema or "else" in schema):
            broken.append(all_of(self.positive(schema["if"], resource), inner(schema.get("then", True))))
            broken.append(all_of(inner(schema["if"]), inner(schema.get("else", True))))
        return any_of(*broken)

    # What tells schemas apart

    def facts(self, schema: Any, resource: Resource, depth: int) -> Facts:
        if schema is False:
            return Facts(frozenset())
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return Facts(frozenset(TYPES))
        self.spend()
        schema = checked(schema)
        resource = self.resource_of.get(id(schema), resource)
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
            parts.append(self.target(schema["$ref"], resource))
            if resource.is_legacy:
                own = Facts(frozenset(TYPES))
        for each, home in parts:
            own = both(own, self.facts(each, home, depth + 1))
        choices = [self.facts(each, resource, depth + 1) for each in listed(schema, "anyOf") or listed(schema, "oneOf")]
        if choices:
            types = own.types & frozenset().union(*(each.types for each in choices))
            some = [each.values for each in choices]
            values = None if None in some else tuple(value for each in some for value in each or ())
            own = both(own, Facts(types, values))
        return own

    def facts_of_all(self, schemas: Iterable[tuple[Schema, Resource]], depth: int) -> Facts:
        found = Facts(frozenset(TYPES))
        for schema, resource in schemas:
            found = both(found, self.facts(schema, resource, depth))
        return found

    def are_disjoint(self, a: Facts, b: Facts, depth: int = 0) -> bool:
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
                elif self.are_disjoint(self.facts_of_all(mine, depth), self.facts_of_all(others, depth), depth + 1):
                    return True
        return False


OPPOSITES = (  # a keyword, the one that breaks it, of which type, and how far behind
    ("minLength", "maxLength", "string", -1), ("maxLength", "minLength", "string", 1),
    ("minItems", "maxItems", "array", -1), ("maxItems", "minItems", "array", 1),
    ("minProperties", "maxProperties", "object", -1), ("maxProperties", "minProperties", "object", 1),
    ("minimum", "exclusiveMaximum", "number", 0), ("maximum", "exclusiveMinimum", "number", 0),
    ("exclusiveMinimum", "maximum", "number", 0), ("exclusiveMaximum", "minimum", "number", 0),
)  # fmt: skip
KEPT = COUNTS | NUMBERS | {"enum", "const", "pattern", "exclusiveMinimum", "exclusiveMaximum", "required"}
CONSTRAINTS = (
    SINGLE | SEVERAL | COUNTS | NUMBERS | (NAMED - {"$defs", "definitions"})
    | {"type", "enum", "const", "pattern", "required", "exclusiveMinimum", "exclusiveMaximum", "uniqueItems", "$ref"}
    | {"$dynamicRef", "$recursiveRef", "dependentRequired"}
) - {"contentSchema"}  # fmt: skip


def joined(base: str, reference: str) -> tuple[str, str]:
    """A reference as an absolute one, in two parts: before and behind its #."""
    try:
        found = urljoin(base, reference) if base.startswith(("http", "file")) or not base else reference
        return urldefrag(found)
    except ValueError as error:
        raise Refused(f"the reference or identifier {shown(reference)} is no URI: {error}") from None


def pointed_at(resource: Resource, fragment: str) -> Any:
    if fragment and not fragment.startswith("/"):
        return resource.anchors.get(fragment)
    value: Any = resource.root
    for step in fragment.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list) and key.isascii() and key.isdigit() and len(key) < 9 and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def subschemas(schema: Mapping[str, Any]) -> Iterable[Any]:
    for name, value in schema.items():
        if name in SINGLE and not isinstance(value, list):
            yield value
        if name in SEVERAL and isinstance(value, list):
            yield from value
        elif name in NAMED and isinstance(value, Mapping):
            yield from value.values()


def mapping(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return schema.get(name) or {}


def listed(schema: Mapping[str, Any], name: str) -> list[Any]:
    return schema.get(name) or []


def checked(schema: Any) -> Mapping[str, Any]:
    """The schema, whose keywords have values of their kinds; counts are integers. Refused where one has not."""
    if not isinstance(schema, Mapping):
        raise Refused(f"a schema is {shown(schema)}; it must be a JSON object")
    changed = {}
    for name, value in schema.items():
        wanted = None
        if name in COUNTS:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_count = is_number and value >= 0 and value == int(value)
            wanted = None if is_count else "a whole number, 0 or more"
            if is_count and not isinstance(value, int):
                changed[name] = int(value)
        elif name in NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
            wanted = "a number"
        elif name in ("anyOf", "allOf", "oneOf", "prefixItems", "enum", "required"):
            if not isinstance(value, list):
                wanted = "a list"
            elif not value and name not in ("prefixItems", "required"):
                wanted = "a list of at least one"
            elif name == "required" and not all(isinstance(key, str) for key in value):
                wanted = "a list of names"
        elif name in NAMED | {"dependentRequired"} and not isinstance(value, Mapping):
            wanted = "a JSON object"
        elif name in ("pattern", "format") and not isinstance(value, str):
            wanted = "a text"
        elif name == "type":
            names = value if isinstance(value, list) else [value]
            if not names or not all(isinstance(each, str) and each in (*TYPES, "integer") for each in names):
                wanted = f"{', '.join(TYPES)} or integer"
        if wanted:
            raise Refused(f"{name} is {shown(value)}; it must be {wanted}")
    return {**schema, **changed} if changed else schema


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    given = schema.get("type", list(TYPES))
    return frozenset(given if isinstance(given, list) else [given])


def types_in(schema: Schema) -> frozenset[str]:
    """The types that the values of a rewritten schema may have; references are not followed."""
    if isinstance(schema, bool):
        return frozenset(TYPES) if schema else frozenset()
    found = frozenset("number" if name == "integer" else name for name in types_of(schema))
    if "anyOf" in schema:
        found &= frozenset().union(*map(types_in, schema["anyOf"]))
    for part in schema.get("allOf", ()):
        found &= types_in(part)
    return found


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds: tuple[tuple[Any, str], ...] = ((str, "string"), ((int, float), "number"), (list, "array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


def other_types(name: str) -> Schema:
    return {"type": [each for each in TYPES if each != name]}


def is_same(a: Any, b: Any) -> bool:
    """As JSON has it: 1 is 1.0, and true is neither."""
    if type_of(a) != type_of(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    return a == b


def distinct(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if not any(is_same(value, each) for each in found):
            found.append(value)
    return found


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


def matches(pattern: str | None, text: str) -> bool:
    try:
        return pattern is None or re.search(pattern, text) is not None
    except re.error as error:
        raise Refused(f"pattern is {shown(pattern)}; it must be a regular expression: {error}") from None


def any_of(*schemas: Schema) -> Schema:
    left = [schema for schema in schemas if schema is not False]
    if True in [schema for schema in left if isinstance(schema, bool)]:
        return True
    return False if not left else left[0] if len(left) == 1 else {"anyOf": left}


def all_of(*schemas: Schema) -> Schema:
    left = [schema for schema in schemas if schema is not True and schema != {}]
    if any(schema is False for schema in left):
        return False
    return True if not left else left[0] if len(left) == 1 else {"allOf": left}


def none_of(values: Iterable[Any], types: frozenset[str]) -> Schema:
    """Values of these types that are none of some; of arrays and objects none at all, where some are one."""
    values = distinct(values)
    present = {type_of(value) for value in values}
    found: list[Schema] = []
    plain = [name for name in TYPES if name not in present]
    if plain:
        found.append({"type": plain})
    if "boolean" in present:
        found += [{"const": value} for value in (True, False) if not any(value is each for each in values)]
    if "string" in present:
        found.append({"type": "string", "pattern": other_texts([value for value in values if isinstance(value, str)])})
    if "number" in present:
        numbers = sorted(value for value in values if type_of(value) == "number")
        found.append({"type": "number", "exclusiveMaximum": numbers[0]})
        found += [
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
            for low, high in zip(numbers, numbers[1:], strict=False)
        ]
        found.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    return any_of(*found)


def other_texts(texts: Iterable[str]) -> str:
    """A pattern of all texts but some, without the look-ahead that the library does not have.

    Of a long one all texts with its beginning are left out.
    """
    tree: dict[str, Any] = {}  # by their characters; "" where a text ends, None where a long one is cut
    for text in texts:
        node = tree
        for character in text[: MAX_SPELLED - 1]:
            node = node.setdefault(character, {})
        if len(text) < MAX_SPELLED:
            node[""] = {}
        else:
            node[text[MAX_SPELLED - 1]] = None

    def behind(node: dict[str, Any]) -> str:
        """What may follow the beginning that a node stands for."""
        escaped = {letter: f"\\U{ord(letter):08X}" for letter in node if letter}
        ways = [f"[^{''.join(escaped.values())}](?s:.*)" if escaped else "(?s:.+)"]
        ways += [f"{code}{behind(node[letter])}" for letter, code in escaped.items() if node[letter] is not None]
        return f"(?:{'|'.join(ways)}){'' if '' in node else '?'}"

    return f"^{behind(tree)}$"


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
