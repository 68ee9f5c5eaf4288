"""The opposite of a JSON schema, as far as the keywords of llguidance can say it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .schema_document import (
    MAX_DEPTH,
    TYPES,
    Document,
    Resource,
    Schema,
    checked,
    distinct,
    listed,
    mapping,
    type_of,
    types_of,
)

MAX_SPELLED = 32  # characters of a text that must not come; the library nests 250 groups
OPPOSITES = (  # a keyword, the one that breaks it, of which type, and how far behind
    ("minLength", "maxLength", "string", -1), ("maxLength", "minLength", "string", 1),
    ("minItems", "maxItems", "array", -1), ("maxItems", "minItems", "array", 1),
    ("minProperties", "maxProperties", "object", -1), ("maxProperties", "minProperties", "object", 1),
    ("minimum", "exclusiveMaximum", "number", 0), ("maximum", "exclusiveMinimum", "number", 0),
    ("exclusiveMinimum", "maximum", "number", 0), ("exclusiveMaximum", "minimum", "number", 0),
)  # fmt: skip


class Negation:
    """Writes schemas of what the schemas of a document do not accept."""

    def __init__(self, document: Document, positive: Callable[[Any, Resource], Schema]):
        """`positive`: writes a schema of what a schema of the document accepts."""
        self.document, self.positive = document, positive

    def negative(self, schema: Any, resource: Resource, depth: int) -> Schema:
        """A schema that accepts only what `schema` does not accept.

        It is the union of what breaks each keyword; a keyword that cannot be expressed so adds nothing.
        """
        if isinstance(schema, bool):
            return not schema
        if depth > MAX_DEPTH:
            return False
        self.document.spend()
        schema = checked(schema)
        resource = self.document.resource_of.get(id(schema), resource)

        def inner(value: Any) -> Schema:
            return self.negative(value, resource, depth + 1)

        broken: list[Schema] = []
        if "$ref" in schema:
            node, home = self.document.target(schema["$ref"], resource)
            broken.append(self.negative(node, home, depth + 1))
            if resource.is_legacy:
                return broken[0]
        types = types_of(schema)
        if "type" in schema:
            left = [name for name in TYPES if name not in types and not (name == "number" and "integer" in types)]
            broken.append({"type": left} if left else False)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            broken.append(none_of(values))
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


def other_types(name: str) -> Schema:
    return {"type": [each for each in TYPES if each != name]}


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


def none_of(values: Iterable[Any]) -> Schema:
    """Values other than some; no array at all where one of them is an array, and no object likewise."""
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
