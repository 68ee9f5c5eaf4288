"""A JSON schema document: its resources, anchors, references and the kinds of its keywords."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from ..api.validation import shown

Schema = Mapping[str, Any] | bool

TYPES = ("null", "boolean", "number", "string", "array", "object")
SINGLE = frozenset(
    "not if then else contains propertyNames items additionalItems additionalProperties".split()
)
SINGLE |= {"unevaluatedItems", "unevaluatedProperties", "contentSchema"}
SEVERAL = frozenset({"anyOf", "allOf", "oneOf", "prefixItems", "items"})
NAMED = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
COUNTS = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
)
COUNTS |= {"minContains", "maxContains"}
NUMBERS = frozenset({"minimum", "maximum", "multipleOf"})
# Before 2019-09 `$ref` replaces the keywords beside it.
BEFORE_2019 = re.compile(r"json-schema\.org/draft-0[4-7]\b")
MAX_SCHEMAS = 20_000  # visits, counted over the whole rewrite
MAX_DEPTH = 24  # references followed to compare or negate schemas
COPIED_KEYWORDS = (
    COUNTS
    | NUMBERS
    | {"enum", "const", "pattern", "exclusiveMinimum", "exclusiveMaximum", "required"}
)
CONSTRAINTS = (
    SINGLE
    | SEVERAL
    | COUNTS
    | NUMBERS
    | (NAMED - {"$defs", "definitions"})
    | {
        "type",
        "enum",
        "const",
        "pattern",
        "required",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "uniqueItems",
        "$ref",
    }
    | {"$dynamicRef", "$recursiveRef", "dependentRequired"}
) - {"contentSchema"}


class UnsupportedSchema(ValueError):
    """A schema cannot be expressed or narrowed. The message names the keyword."""


@dataclass(frozen=True, eq=False)
class Resource:
    """A schema with its own identifier, against which relative references are resolved."""

    uri: str
    root: Schema
    is_legacy: bool  # is of a draft before 2019-09
    anchors: dict[str, Any]


class Document:
    """A schema document whose references can be resolved."""

    def __init__(self, schema: Mapping[str, Any]):
        self.root = schema
        self.budget = MAX_SCHEMAS
        self.resources: dict[str, Resource] = {}
        self.resources_by_schema: dict[int, Resource] = {}  # by id() of the schema
        self.index(schema)

    def index(self, schema: Any) -> None:
        """Find the resources of the document and their anchors."""
        pending: list[tuple[Any, Resource | None]] = [(schema, None)]
        while pending:
            node, resource = pending.pop()
            if not isinstance(node, Mapping):
                continue
            self.spend_budget()
            draft = node.get("$schema")
            is_legacy = (
                bool(BEFORE_2019.search(draft))
                if isinstance(draft, str)
                else resource is not None and resource.is_legacy
            )
            identifier = node.get("$id", node.get("id") if is_legacy else None)
            if "$ref" in node and is_legacy:
                identifier = None
            if resource is None or (isinstance(identifier, str) and not identifier.startswith("#")):
                base = resource.uri if resource else ""
                uri = resolve_uri(base, identifier)[0] if isinstance(identifier, str) else base
                resource = Resource(uri, node, is_legacy, {})
                self.resources.setdefault(resource.uri, resource)
            for name in ("$anchor", "$dynamicAnchor"):
                if isinstance(node.get(name), str):
                    resource.anchors.setdefault(node[name], node)
            if isinstance(identifier, str) and identifier.startswith("#"):
                resource.anchors.setdefault(identifier[1:], node)
            self.resources_by_schema[id(node)] = resource
            pending += [(subschema, resource) for subschema in subschemas(node)]

    def spend_budget(self) -> None:
        self.budget -= 1
        if self.budget < 0:
            raise UnsupportedSchema(
                f"the schema has more than {MAX_SCHEMAS} parts; it must be simpler"
            )

    def target(
        self, reference: Any, resource: Resource, keyword: str = "$ref"
    ) -> tuple[Any, Resource]:
        """Return the schema that a reference points to, and its resource."""
        if not isinstance(reference, str):
            raise UnsupportedSchema(f"{keyword} is {shown(reference)}; it must be a text")
        if keyword != "$ref" and len(self.resources) > 1:
            raise UnsupportedSchema(
                f"{keyword} in a schema of several resources is not supported; use $ref"
            )
        is_inside = reference.startswith("#")
        address, fragment = (
            ("", reference[1:]) if is_inside else resolve_uri(resource.uri, reference)
        )
        home = resource if is_inside else self.resources.get(address)
        node = home and resolve_fragment(home, unquote(fragment))
        # Many documents count from the root even inside embedded schemas.
        if node is None and is_inside:
            home = self.resources_by_schema[id(self.root)]
            node = resolve_fragment(home, unquote(fragment))
        if home is None or node is None:
            remedy = "it must point to a place in the schema, and nothing is fetched"
            raise UnsupportedSchema(
                f"{keyword} {shown(reference)} points to nothing in the schema; {remedy}"
            )
        return node, self.resources_by_schema.get(id(node), home)


def resolve_uri(base: str, reference: str) -> tuple[str, str]:
    """Resolve a reference to an absolute URI and split it at the `#`."""
    try:
        uri = (
            urljoin(base, reference) if base.startswith(("http", "file")) or not base else reference
        )
        return urldefrag(uri)
    except ValueError as error:
        raise UnsupportedSchema(
            f"the reference or identifier {shown(reference)} is no URI: {error}"
        ) from None


def resolve_fragment(resource: Resource, fragment: str) -> Any:
    if fragment and not fragment.startswith("/"):
        return resource.anchors.get(fragment)
    value: Any = resource.root
    for step in fragment.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value.get(key)
        elif (
            isinstance(value, list)
            and key.isascii()
            and key.isdigit()
            and len(key) < 9
            and int(key) < len(value)
        ):
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


def mapping_keyword(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return schema.get(name) or {}


def list_keyword(schema: Mapping[str, Any], name: str) -> list[Any]:
    return schema.get(name) or []


def validate_keywords(schema: Any) -> Mapping[str, Any]:
    """Return a schema with integral counts; raise UnsupportedSchema for a value of a wrong kind."""
    if not isinstance(schema, Mapping):
        raise UnsupportedSchema(f"a schema is {shown(schema)}; it must be a JSON object")
    changed = {}
    for name, value in schema.items():
        expected = None
        if name in COUNTS:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_count = is_number and value >= 0 and value == int(value)
            expected = None if is_count else "a whole number, 0 or more"
            if is_count and not isinstance(value, int):
                changed[name] = int(value)
        elif name in NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
            expected = "a number"
        elif name in ("anyOf", "allOf", "oneOf", "prefixItems", "enum", "required"):
            if not isinstance(value, list):
                expected = "a list"
            elif not value and name not in ("prefixItems", "required"):
                expected = "a list of at least one"
            elif name == "required" and not all(isinstance(key, str) for key in value):
                expected = "a list of names"
        elif name in NAMED | {"dependentRequired"} and not isinstance(value, Mapping):
            expected = "a JSON object"
        elif name in ("pattern", "format") and not isinstance(value, str):
            expected = "a text"
        elif name == "type":
            names = value if isinstance(value, list) else [value]
            if not names or not all(
                isinstance(kind, str) and kind in (*TYPES, "integer") for kind in names
            ):
                expected = f"{', '.join(TYPES)} or integer"
        if expected:
            raise UnsupportedSchema(f"{name} is {shown(value)}; it must be {expected}")
    return {**schema, **changed} if changed else schema


def schema_types(schema: Mapping[str, Any]) -> frozenset[str]:
    types = schema.get("type", list(TYPES))
    return frozenset(types if isinstance(types, list) else [types])


def json_type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds: tuple[tuple[Any, str], ...] = (
        (str, "string"),
        ((int, float), "number"),
        (list, "array"),
    )
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


def is_same(a: Any, b: Any) -> bool:
    """Compare as JSON does: 1 equals 1.0, and true equals neither."""
    if json_type(a) != json_type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    return a == b


def distinct(values: Iterable[Any]) -> list[Any]:
    unique: list[Any] = []
    for value in values:
        if not any(is_same(value, other_value) for other_value in unique):
            unique.append(value)
    return unique
