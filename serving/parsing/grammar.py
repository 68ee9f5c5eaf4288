"""Grammars of answers that call tools in a model's own format, as Lark for llguidance.

Every sentence of such a grammar is parsed, by the same description of the format, into calls whose
arguments match the tools' schemas.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from .form import Form, Tools
from .schema_types import ALL, branches, json_type, resolve, value_types
from .thoughts import Thoughts

DEFINED = ("#/$defs/", "#/definitions/")
MAX_CALLS = 16  # in one answer
MAX_DEPTH = 8  # nested objects in Gemma's fields
MAX_STEPS = 4_000_000  # work to write a grammar: mostly characters of rules
REFERENCE_STEPS = 400  # cost of following a reference or a choice
SPACING = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
}
ANY_ITEM = {"type": "string"}
SCALARS = frozenset({"integer", "number", "boolean", "null"})
ANY_TEXT = "(?s:.*)"
# The items of a pattern: an escape, a class, the start of a special group, or one character. An
# unclosed class takes the rest of the pattern, so that scanning takes linear time.
PATTERN_PART = re.compile(r"\\.?|\[(?:\\.|[^\]\\])*\]|(?P<unclosed>\[.*)|\(\?(?!:)|.", re.DOTALL)
# Word boundaries, references to groups, a trailing backslash, special groups, and classes that
# other regular expression dialects read differently.
REFUSED_PARTS = frozenset({"\\", "(?", "[]", "[^]", *(f"\\{letter}" for letter in "bB123456789")})
PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Keywords that a schema of arguments may have if it is not written as JSON, and of a text.
MEMBERS = frozenset(
    (
        "type properties required additionalProperties title description examples default $schema "
        "$id $comment $defs definitions strict"
    ).split()
)
ANNOTATIONS = frozenset(
    "title description examples default $comment deprecated readOnly writeOnly".split()
)
OF_TEXT = ANNOTATIONS | {"type", "enum", "const", "pattern", "minLength", "maxLength"}
# Texts that are parsed as JSON if the schema accepts other types too.
LIKE_JSON = r"/\s*([-+0-9.{\[(].*|[tT][rR][uU][eE]\s*|[fF][aA][lL][sS][eE]\s*|[nN][uU][lL][lL]\s*|[nN][oO][nN][eE]\s*)/"
LIKE_JSON = LIKE_JSON.replace(".*", "(?s:.*)")


class InexpressibleSchema(ValueError):
    """The format of calls cannot be constrained to a schema."""


class Grammar:
    """Collects the rules of a grammar."""

    def __init__(self, specials: Mapping[str, int | None]):
        """Args:
        specials: Special token -> its id, or None if it ends an answer and is left out.
        """
        self.specials = specials
        self.special_token = re.compile(
            "|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or "(?!)"
        )
        self.rules: list[str] = []
        self.rule_names: dict[str, str] = {}
        self.budget = MAX_STEPS
        self.types: dict[int, frozenset[str] | None] = {}  # by id() of the schema
        # id() of a field's schema -> its rule, None while it is being written.
        self.fields: dict[int, str | None] = {}

    def spend(self, steps: int) -> None:
        """Charge the work of writing the grammar, which references in a schema could multiply."""
        self.budget -= steps + 1
        if self.budget < 0:
            raise InexpressibleSchema("a schema that takes too many steps to write as a grammar")

    def value_types(self, schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
        return value_types(schema, root, self.types)

    def branches(self, schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the alternatives of a schema.

        Raises InexpressibleSchema if the schema has constraints besides its alternatives.
        """
        alternatives = branches(schema, root, partial(self.check_alternatives, root))
        self.spend(len(alternatives))
        return alternatives

    def check_alternatives(self, root: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
        """Check that a schema with alternatives has no other constraint, and `oneOf` distinct
        types.
        """
        self.spend(REFERENCE_STEPS)
        if resolve(schema, root) is None or any(
            False in schema.get(name, ()) for name in ("anyOf", "oneOf")
        ):
            raise InexpressibleSchema("an alternative that is no schema")
        if constraints := set(schema) - ANNOTATIONS - {"$ref", "anyOf", "oneOf"}:
            raise InexpressibleSchema(f"{sorted(constraints)[0]} beside a choice of schemas")
        if len({"$ref", "anyOf", "oneOf"} & set(schema)) > 1:
            raise InexpressibleSchema("two choices of schemas")
        types = [self.value_types(option, root) for option in schema.get("oneOf", ())]
        if sum(map(len, types)) > len(frozenset().union(*types)):
            raise InexpressibleSchema("oneOf of schemas for values of the same type")

    def rule(self, body: str, terminal: bool = False, lazy: bool = False) -> str:
        """Return the name of the rule with this body, adding it if necessary."""
        self.spend(len(body))
        key = f"{terminal}{lazy}{body}"
        if key not in self.rule_names:
            name = f"{'T' if terminal else 'r'}{len(self.rule_names)}"
            self.rule_names[key] = name
            self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return self.rule_names[key]

    def literal(self, text: str) -> str:
        """Return a text as a rule body, with special tokens as tokens instead of their spelling."""
        pieces = []
        position = 0
        for mark in self.special_token.finditer(text):
            token = self.specials[mark[0]]
            pieces += [
                quoted(text[position : mark.start()]),
                "" if token is None else f"<[{token}]>",
            ]
            position = mark.end()
        return " ".join(piece for piece in [*pieces, quoted(text[position:])] if piece)

    def json(self, schema: Any, root: Mapping[str, Any]) -> str:
        """Return a rule for JSON values that match a schema, with the definitions of its root."""
        standalone = (
            dict(schema) if isinstance(schema, Mapping) else {} if schema is True else {"not": {}}
        )
        used = references(schema)
        if standalone != {**root, "type": "object"} and not all(
            ref.startswith(DEFINED) for ref in used
        ):
            raise InexpressibleSchema("a reference to another place than $defs")
        if used:
            standalone |= {name: root[name] for name in ("$defs", "definitions") if name in root}
        return self.rule(
            f"%json {json.dumps(standalone | {'x-guidance': SPACING}, ensure_ascii=False)}"
        )

    def text_until(self, following: str, never: Collection[str], form: str = "") -> str:
        """Return a rule for a text of a form, without any of the texts in `never`, followed by
        `following`.
        """
        marks = " | ".join(quoted(excluded) for excluded in sorted(never))
        forbidden = self.rule(f"/(?s:.*)/ ({marks}) /(?s:.*)/", terminal=True)
        body = f"{form or '/(?s:.*)/'} & ~{forbidden}"
        first = self.special_token.match(following.lstrip())
        if first:  # no text contains this token, so the end needs no other sign
            return f"{self.rule(body, terminal=True)} {self.literal(following.lstrip())}"
        end = following.rstrip()
        return f"{self.rule(f'({body}) {quoted(end)}', lazy=True)} {quoted(following[len(end) :])}".strip()

    def separated(self, members: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return a rule for members in order, with `separator` between those that are present.

        Each member is (rule, whether it is required).
        """
        tail = head = '""'
        for i in reversed(range(len(members))):
            member, is_required = members[i]
            member_and_tail = f"{member} {tail}" if tail != '""' else member
            head = self.rule(f"{member_and_tail}" + ("" if is_required else f" | {head}"))
            tail = self.rule(
                f"{quoted(separator)} {member_and_tail}" + ("" if is_required else f" | {tail}")
            )
        return head


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def references(schema: Any) -> list[str]:
    """Return the values of `$ref` anywhere in a schema."""
    targets: list[str] = []
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            targets += [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return targets


def required_call_grammar(
    form: Form,
    tools: Tools,
    specials: Mapping[str, int | None],
    allows_several: bool,
    thoughts: Thoughts | None,
    inside: bool,
) -> str:
    """Return the grammar of one or several calls of these tools, after an optional thought.

    A thought that the prompt has opened must end first.
    """
    grammar = Grammar(specials)
    calls = grammar.rule(
        " | ".join(call(grammar, form, name, schema) for name, schema in tools.items())
    )
    separator = form.separator or ("\n" if form.call.endswith("\n</tool_call>") else "")
    body = (
        f"{calls} ({quoted(separator)} {calls}){{0,{MAX_CALLS - 1}}}" if allows_several else calls
    )
    start = [
        thought(grammar, thoughts, inside),
        grammar.literal(form.begin),
        f"({body})",
        grammar.literal(form.end),
    ]
    return "\n".join([f"start: {' '.join(filter(None, start))}", *grammar.rules])


def free_grammar(
    form: Form,
    tools: Tools,
    specials: Mapping[str, int | None],
    thoughts: Thoughts | None,
    inside: bool,
) -> str:
    """Return the grammar of any answer whose calls, if there are any, are valid."""
    if form.starts_answer:
        raise InexpressibleSchema("what begins a call begins other texts too")
    grammar = Grammar(specials)
    never = {form.head[0], *form.other_openings}
    marks = " | ".join(map(quoted, sorted(never)))
    free = f"(/(?s:.+)/ & ~{grammar.rule(f'/(?s:.*)/ ({marks}) /(?s:.*)/', terminal=True)})"
    text = grammar.rule(free, terminal=True)
    # No text contains this token, so the end needs no other sign.
    if grammar.special_token.match(form.head[0]):
        opening = f"{text}?"
        skip = ""
    else:
        opening = grammar.rule(f"{free} {quoted(form.head[0])} | {quoted(form.head[0])}", lazy=True)
        skip = form.head[0]
    in_call = "" if form.begin else skip
    calls = grammar.rule(
        " | ".join(call(grammar, form, name, schema, in_call) for name, schema in tools.items())
    )
    several = (
        f"{calls} ({quoted(form.separator)} {calls}){{0,{MAX_CALLS - 1}}}" if form.begin else calls
    )
    begin = grammar.literal(form.begin.removeprefix(skip)) if form.begin else ""
    block = " ".join(filter(None, [opening, begin, several, grammar.literal(form.end)]))
    start = " ".join(
        filter(
            None, [thought(grammar, thoughts, inside), f"({block}){{0,{MAX_CALLS}}}", f"{text}?"]
        )
    )
    return "\n".join([f"start: {start}", *grammar.rules])


def thought(grammar: Grammar, thoughts: Thoughts | None, inside: bool) -> str:
    if thoughts is None or thoughts.is_kept:
        return ""
    never = {*thoughts.closes, *thoughts.other_closes, *thoughts.opens}
    remainder = f'{grammar.text_until(thoughts.closes[0], never)} ("\\n" | "\\n\\n")?'
    return remainder if inside else f"({grammar.literal(thoughts.opens[0])} {remainder})?"


def call(grammar: Grammar, form: Form, name: str, schema: Mapping[str, Any], skip: str = "") -> str:
    """Return the rule for a call of one tool, without the leading `skip`."""
    pieces: list[str] = []
    written = ""  # text not yet in `pieces`
    for i, (hole, text) in enumerate(form.parts):
        if hole in ("", "name"):
            written += name if hole else text if i else text.removeprefix(skip)
            continue
        if hole == "object":
            written += f'{{"{form.keys[0]}": {json.dumps(name)}, "{form.keys[1]}": '
        elif hole == "id":
            written += f"functions.{name}:"
        pieces += [grammar.literal(written)] if written else []
        written = "}" if hole == "object" else ""
        if hole == "id":
            pieces.append(grammar.rule("/[0-9]{1,3}/", terminal=True))
        elif hole in ("object", "arguments"):
            pieces.append(grammar.json({**schema, "type": "object"}, schema))
        elif hole == "parameters":
            pieces += [
                f"({piece})" if is_required else f"({piece})?"
                for piece, is_required in tagged_parameters(grammar, form, schema)
            ]
        elif hole == "keywords":
            members = [
                (
                    grammar.rule(
                        f"{quoted(identifier(key) + '=')} "
                        f"{python_value(grammar, value_schema, schema)}"
                    ),
                    is_required,
                )
                for key, value_schema, is_required in object_members(schema, schema)
            ]
            pieces.append(grammar.separated(members, ", "))
        else:
            pieces.append(fields(grammar, form.quote, schema, schema, 0))
    pieces += [grammar.literal(written)] if written else []
    return grammar.rule(" ".join(piece for piece in pieces if piece != '""'))


def object_members(schema: Any, root: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Return the name and the schema of each property, and whether it is required."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping):
        raise InexpressibleSchema("arguments of any kind")
    if strange := set(schema) - MEMBERS:
        raise InexpressibleSchema(f"{sorted(strange)[0]} of an object")
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    if not isinstance(properties, Mapping) or False in properties.values():
        raise InexpressibleSchema("properties that cannot be there")
    if not isinstance(required, list) or not all(
        isinstance(key, str) and key in properties for key in required
    ):
        raise InexpressibleSchema("what is required is no property")
    required_keys = frozenset(required)
    return [(key, value_schema, key in required_keys) for key, value_schema in properties.items()]


def tagged_parameters(
    grammar: Grammar, form: Form, schema: Mapping[str, Any]
) -> Iterable[tuple[str, bool]]:
    """Yield the rule of each tagged parameter, and whether it is required."""
    tag = form.tag
    tag_parts = tag.template
    value_index = next(i for i, (hole, _) in enumerate(tag_parts) if hole == "value")
    end = tag_parts[value_index + 1][1]
    never = {*tag.end_markers, *form.closing}
    for key, value_schema, is_required in object_members(schema, schema):
        if not re.fullmatch(r"[^\s<>\"'=|](?:[^\r\n<>\"'=|]*[^\s<>\"'=|])?", key):
            raise InexpressibleSchema(f"a parameter of the name {key!r}")

        def before(kind: str, key: str = key) -> str:
            texts_by_hole = {"key": key, "kind": kind}
            return grammar.literal(
                "".join(text or texts_by_hole[hole] for hole, text in tag_parts[:value_index])
            )

        has_kind = any(hole == "kind" for hole, _ in tag_parts)
        alternatives = []
        types = grammar.value_types(value_schema, schema)
        other_types = types - {"string"} if types != ALL else frozenset()
        for form_of_text in (
            text_terminals(grammar, value_schema, schema) if "string" in types else ()
        ):
            form_of_text = form_of_text or "/(?s:.*)/"
            if other_types and not has_kind:
                json_lookalike = grammar.rule(LIKE_JSON, terminal=True)
                form_of_text = f"({form_of_text}) & ~{json_lookalike}"
            alternatives.append(f"{before('true')} {grammar.text_until(end, never, form_of_text)}")
        if other_types:
            only = (
                value_schema
                if "string" not in types
                else {"allOf": [value_schema, {"type": sorted(other_types)}]}
            )
            alternatives.append(
                f"{before('false')} {grammar.json(only, schema)} {grammar.literal(end)}"
            )
        yield grammar.rule(" | ".join(alternatives)), is_required


def text_terminals(grammar: Grammar, schema: Any, root: Mapping[str, Any]) -> list[str]:
    """Return the terminal of each kind of text that a schema accepts; empty for any text."""
    return [
        text_terminal(grammar, branch)
        for branch in grammar.branches(schema, root)
        if "string" in grammar.value_types(branch, root)
    ]


def text_terminal(grammar: Grammar, schema: Mapping[str, Any]) -> str:
    """Return the terminal of texts that a schema without alternatives accepts; empty for any
    text.
    """
    if constraints := set(schema) - OF_TEXT:
        raise InexpressibleSchema(f"{sorted(constraints)[0]} of a text")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    pattern = schema.get("pattern")
    low = non_negative_int(schema, "minLength")
    high = non_negative_int(schema, "maxLength")
    if values is not None:
        if not isinstance(values, list) or (pattern, low, high) != (None, None, None):
            raise InexpressibleSchema("texts with a pattern")
        allowed_texts = [value for value in values if isinstance(value, str)]
        if not all(allowed_texts):
            raise InexpressibleSchema("an empty text of several")
        return "(" + " | ".join(map(quoted, allowed_texts)) + ")"
    terminals = []
    if pattern is not None:
        if not isinstance(pattern, str):
            raise InexpressibleSchema(f"the pattern {pattern!r:.40}")
        grammar.spend(len(pattern))
        terminals.append(search_terminal(pattern))
    if (low, high) != (None, None):
        terminals.append(f"/(?s:.{{{low or 0},{'' if high is None else high}}})/")
    return " & ".join(terminals)


def non_negative_int(schema: Mapping[str, Any], name: str) -> int | None:
    value = schema.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise InexpressibleSchema(f"{name} that is no count")
    return value


def search_terminal(pattern: str) -> str:
    """Convert a pattern, which may match anywhere in a text, to a terminal of the whole text."""
    matches = list(PATTERN_PART.finditer(pattern))
    items = [match[0] for match in matches]
    is_anchored_at_start = items[:1] == ["^"]
    is_anchored_at_end = items[-1:] == ["$"]
    anchors = items.count("^") + items.count("$")
    if (
        not REFUSED_PARTS.isdisjoint(items)
        or any(match["unclosed"] for match in matches)
        or anchors != is_anchored_at_start + is_anchored_at_end
        or (anchors and "|" in items)
    ):
        raise InexpressibleSchema(f"the pattern {pattern!r}")
    body = "".join(items[is_anchored_at_start : len(items) - is_anchored_at_end])
    body = re.sub(
        r"\\.|/", lambda item: "\\/" if item[0] == "/" else item[0], body, flags=re.DOTALL
    )
    return f"/{'' if is_anchored_at_start else ANY_TEXT}({body}){'' if is_anchored_at_end else ANY_TEXT}/"


def identifier(key: str) -> str:
    if not key.isidentifier():
        raise InexpressibleSchema(f"a parameter of the name {key!r}")
    return key


def python_value(grammar: Grammar, schema: Any, root: Mapping[str, Any]) -> str:
    """Return the rule for a Python value: JSON, except for booleans and None."""
    if not grammar.value_types(schema, root) <= {"boolean", "null"}:
        return grammar.json(schema, root)
    words = []
    for branch in grammar.branches(schema, root):
        values = [branch["const"]] if "const" in branch else branch.get("enum", [True, False, None])
        if not isinstance(values, list) or set(branch) - ANNOTATIONS - {"type", "enum", "const"}:
            raise InexpressibleSchema("more than the type of a boolean")
        types = grammar.value_types(branch, root)
        words += [repr(value) for value in values if json_type(value) in types]
    return f"({' | '.join(map(quoted, dict.fromkeys(words)))})"


def fields(grammar: Grammar, quote: str, schema: Any, root: Mapping[str, Any], depth: int) -> str:
    """Return the rule for an object in braces."""
    if depth > MAX_DEPTH:
        raise InexpressibleSchema("objects in objects without end")
    members = []
    for key, value_schema, is_required in object_members(schema, root):
        name = key if PLAIN_KEY.fullmatch(key) else f"{quote}{key}{quote}"
        if quote in key:
            raise InexpressibleSchema(f"a parameter of the name {key!r}")
        members.append(
            (
                grammar.rule(
                    f"{grammar.literal(name + ':')} "
                    f"{field(grammar, quote, value_schema, root, depth)}"
                ),
                is_required,
            )
        )
    inner = grammar.separated(members, ",")
    return grammar.rule(f'"{{" {inner} "}}"' if inner != '""' else '"{}"')


def field(grammar: Grammar, quote: str, schema: Any, root: Mapping[str, Any], depth: int) -> str:
    """Return the rule for a value: quoted, plain, or in brackets."""
    alternatives = []
    for branch in grammar.branches(schema, root):
        if id(branch) not in grammar.fields:
            grammar.fields[id(branch)] = None
            grammar.fields[id(branch)] = field_without_choice(grammar, quote, branch, root, depth)
        if (rule := grammar.fields[id(branch)]) is None:
            raise InexpressibleSchema("values in values without end")
        alternatives.append(rule)
    if not alternatives:
        raise InexpressibleSchema("a choice of nothing but itself")
    return grammar.rule(" | ".join(alternatives))


def field_without_choice(
    grammar: Grammar, quote: str, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int
) -> str:
    alternatives = []
    types = grammar.value_types(schema, root)
    if "string" in types:
        alternatives.append(
            f"{grammar.literal(quote)} "
            f"{grammar.text_until(quote, {quote}, text_terminal(grammar, schema))}"
        )
    if types != ALL:
        if scalars := types & SCALARS:
            alternatives.append(grammar.json({**schema, "type": sorted(scalars)}, root))
        if "object" in types:
            if not schema.get("properties"):
                raise InexpressibleSchema("an object with any properties")
            alternatives.append(fields(grammar, quote, schema, root, depth + 1))
        if "array" in types:
            alternatives.append(items(grammar, quote, schema, root, depth + 1))
    return grammar.rule(" | ".join(alternatives))


def items(
    grammar: Grammar, quote: str, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int
) -> str:
    """Return the rule for a list in brackets."""
    if depth > MAX_DEPTH or set(schema) & {
        "prefixItems",
        "contains",
        "uniqueItems",
        "unevaluatedItems",
    }:
        raise InexpressibleSchema("a list of more than items")
    min_items = non_negative_int(schema, "minItems") or 0
    max_items = non_negative_int(schema, "maxItems")
    item = field(grammar, quote, schema.get("items", ANY_ITEM), root, depth)
    if max_items == 0:
        return '"[]"'
    several = f'{item} ("," {item}){{{max(min_items - 1, 0)},{"" if max_items is None else max_items - 1}}}'
    return grammar.rule(f'"[" {several if min_items else f"({several})?"} "]"')
