"""The document that a JSON schema is: its resources, anchors and references, and the kinds of its keywords."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
KEPT = COUNTS | NUMBERS | {"enum", "const", "pattern", "exclusiveMinimum", "exclusiveMaximum", "required"}
CONSTRAINTS = (
    SINGLE | SEVERAL | COUNTS | NUMBERS | (NAMED - {"$defs", "definitions"})
    | {"type", "enum", "const", "pattern", "required", "exclusiveMinimum", "exclusiveMaximum", "uniqueItems", "$ref"}
    | {"$dynamicRef", "$recursiveRef", "dependentRequired"}
) - {"contentSchema"}  # fmt: skip


class Refused(ValueError):
    """A schema cannot be kept; the message names the keyword."""


@dataclass(frozen=True, eq=False)
class Resource:
    """A schema with an identifier of its own, within which references without one are resolved."""

    uri: str
    root: Schema
    is_legacy: bool  # of a draft before 2019-09
    anchors: dict[str, Any]


class Document:
    """A schema, in which references are followed."""

    def __init__(self, schema: Mapping[str, Any]):
        self.root = schema
        self.budget = MAX_SCHEMAS
        self.resources: dict[str, Resource] = {}
        self.resource_of: dict[int, Resource] = {}  # by the id of a schema
        self.index(schema)

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


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds: tuple[tuple[Any, str], ...] = ((str, "string"), ((int, float), "number"), (list, "array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


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
