"""The grammar of an answer that calls tools in a model's own format, as Lark for llguidance.

Every sentence of it is read back, by the same description, as calls whose arguments keep to the tools' schemas.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from .form import Form, Tools
from .schema_types import ALL, branches, kind_of, kinds, resolved
from .thoughts import Thoughts

DEFINED = ("#/$defs/", "#/definitions/")
MAX_CALLS = 16  # in one answer
MAX_DEPTH = 8  # of objects in Gemma's fields
MAX_STEPS = 4_000_000  # to write a grammar: characters of rules, mostly
REFERENCE_STEPS = 400  # a reference or a choice that is followed
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
ANY_ITEM = {"type": "string"}
SCALARS = frozenset({"integer", "number", "boolean", "null"})
ANY_TEXT = "(?s:.*)"
# The parts of a pattern: an escape, a class, the beginning of a special group, or one character. A class that is not
# closed takes the rest of the pattern, so that reading a pattern takes linear time.
PATTERN_PART = re.compile(r"\\.?|\[(?:\\.|[^\]\\])*\]|(?P<unclosed>\[.*)|\(\?(?!:)|.", re.DOTALL)
# Word boundaries, references to groups, a backslash at the end, special groups, and classes that regular expressions
# of other languages read differently.
REFUSED_PARTS = frozenset({"\\", "(?", "[]", "[^]", *(f"\\{letter}" for letter in "bB123456789")})
PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What a schema of arguments may say where they are not one piece of JSON, and one of a text.
MEMBERS = frozenset(
    "type properties required additionalProperties title description examples default $schema $id $comment $defs "
    "definitions strict".split()
)
ANNOTATIONS = frozenset("title description examples default $comment deprecated readOnly writeOnly".split())
OF_TEXT = ANNOTATIONS | {"type", "enum", "const", "pattern", "minLength", "maxLength"}
# Texts that are read as JSON where the schema has more than texts.
LIKE_JSON = r"/\s*([-+0-9.{\[(].*|[tT][rR][uU][eE]\s*|[fF][aA][lL][sS][eE]\s*|[nN][uU][lL][lL]\s*|[nN][oO][nN][eE]\s*)/"
LIKE_JSON = LIKE_JSON.replace(".*", "(?s:.*)")


class Unsayable(ValueError):
    """The format's own texts cannot be held to a schema."""


class Grammar:
    """Rules that are written down while an answer's are put together."""

    def __init__(self, specials: Mapping[str, int | None]):
        """`specials`: the ids of the tokens that are never text; None for one that ends an answer: it is left out."""
        self.specials = specials
        self.marks = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or "(?!)")
        self.rules: list[str] = []
        self.known: dict[str, str] = {}
        self.budget = MAX_STEPS
        self.types: dict[int, frozenset[str] | None] = {}  # of the schemas that were visited, by id
        self.fields: dict[int, str | None] = {}  # schemas of fields by id -> their rules, None while one is written

    def spend(self, steps: int) -> None:
        """Count the work of writing the grammar, which a schema of many references could multiply."""
        self.budget -= steps + 1
        if self.budget < 0:
            raise Unsayable("a schema that takes too many steps to write as a grammar")

    def kinds(self, schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
        return kinds(schema, root, self.types)

    def branches(self, schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The alternatives of a schema that consists of them; Unsayable where it demands something else as well."""
        found = branches(schema, root, partial(self.check_alternatives, root))
        self.spend(len(found))
        return found

    def check_alternatives(self, root: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
        """Check that a schema with `$ref`, `anyOf` or `oneOf` has no other constraint, and `oneOf` distinct types."""
        self.spend(REFERENCE_STEPS)
        if resolved(schema, root) is None or any(False in schema.get(name, ()) for name in ("anyOf", "oneOf")):
            raise Unsayable("an alternative that is no schema")
        if beside := set(schema) - ANNOTATIONS - {"$ref", "anyOf", "oneOf"}:
            raise Unsayable(f"{sorted(beside)[0]} beside a choice of schemas")
        if len({"$ref", "anyOf", "oneOf"} & set(schema)) > 1:
            raise Unsayable("two choices of schemas")
        each = [self.kinds(one, root) for one in schema.get("oneOf", ())]
        if sum(map(len, each)) > len(frozenset().union(*each)):
            raise Unsayable("oneOf of schemas for values of the same type")

    def rule(self, body: str, terminal: bool = False, lazy: bool = False) -> str:
        """The name of a rule with this body."""
        self.spend(len(body))
        key = f"{terminal}{lazy}{body}"
        if key not in self.known:
            name = f"{'T' if terminal else 'r'}{len(self.known)}"
            self.known[key] = name
            self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return self.known[key]

    def literal(self, text: str) -> str:
        """A text, whose special tokens are these tokens and no others that spell them."""
        found, at = [], 0
        for mark in self.marks.finditer(text):
            token = self.specials[mark[0]]
            found += [quoted(text[at : mark.start()]), "" if token is None else f"<[{token}]>"]
            at = mark.end()
        return " ".join(each for each in [*found, quoted(text[at:])] if each)

    def json(self, schema: Any, root: Mapping[str, Any]) -> str:
        """A value that keeps to a schema, with the definitions of its root."""
        own = dict(schema) if isinstance(schema, Mapping) else {} if schema is True else {"not": {}}
        used = references(schema)
        if own != {**root, "type": "object"} and not all(ref.startswith(DEFINED) for ref in used):
            raise Unsayable("a reference to another place than $defs")
        if used:
            own |= {name: root[name] for name in ("$defs", "definitions") if name in root}
        return self.rule(f"%json {json.dumps(own | {'x-guidance': SPACING}, ensure_ascii=False)}")

    def text(self, after: str, never: Collection[str], form: str = "") -> str:
        """A text of a form, with none of `never` in it, and `after` behind it."""
        marks = " | ".join(quoted(each) for each in sorted(never))
        forbidden = self.rule(f"/(?s:.*)/ ({marks}) /(?s:.*)/", terminal=True)
        body = f"{form or '/(?s:.*)/'} & ~{forbidden}"
        first = self.marks.match(after.lstrip())
        if first:  # no text has this token, so nothing has to tell where the text ends
            return f"{self.rule(body, terminal=True)} {self.literal(after.lstrip())}"
        end = after.rstrip()
        return f"{self.rule(f'({body}) {quoted(end)}', lazy=True)} {quoted(after[len(end) :])}".strip()

    def separated(self, members: Sequence[tuple[str, bool]], between: str) -> str:
        """Members in their order, those that are not wanted perhaps, with `between` between those that are there."""
        rest = first = '""'
        for i in reversed(range(len(members))):
            member, wanted = members[i]
            behind = f"{member} {rest}" if rest != '""' else member
            first = self.rule(f"{behind}" + ("" if wanted else f" | {first}"))
            rest = self.rule(f"{quoted(between)} {behind}" + ("" if wanted else f" | {rest}"))
        return first


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def references(schema: Any) -> list[str]:
    """The values of `$ref` anywhere in a schema."""
    found: list[str] = []
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            found += [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return found


def grammar_of(
    form: Form, tools: Tools, specials: Mapping[str, int | None], many: bool, thoughts: Thoughts | None, inside: bool
) -> str:
    """The grammar of one call of these tools, or of `many`; a thought may come before, and ends if it has begun."""
    grammar = Grammar(specials)
    calls = grammar.rule(" | ".join(call(grammar, form, name, schema) for name, schema in tools.items()))
    between = form.between or ("\n" if form.call.endswith("\n</tool_call>") else "")
    body = f"{calls} ({quoted(between)} {calls}){{0,{MAX_CALLS - 1}}}" if many else calls
    start = [thought(grammar, thoughts, inside), grammar.literal(form.begin), f"({body})", grammar.literal(form.end)]
    return "\n".join([f"start: {' '.join(filter(None, start))}", *grammar.rules])


def free_grammar(
    form: Form, tools: Tools, specials: Mapping[str, int | None], thoughts: Thoughts | None, inside: bool
) -> str:
    """The grammar of any answer whose calls, if it has some, are such calls."""
    if form.bare:
        raise Unsayable("what begins a call begins other texts too")
    grammar = Grammar(specials)
    never = {form.head[0], *form.also}
    marks = " | ".join(map(quoted, sorted(never)))
    free = f"(/(?s:.+)/ & ~{grammar.rule(f'/(?s:.*)/ ({marks}) /(?s:.*)/', terminal=True)})"
    text = grammar.rule(free, terminal=True)
    if grammar.marks.match(form.head[0]):  # no text has this token, so nothing has to tell where the text ends
        begins, skip = f"{text}?", ""
    else:
        begins, skip = grammar.rule(f"{free} {quoted(form.head[0])} | {quoted(form.head[0])}", lazy=True), form.head[0]
    in_call = "" if form.begin else skip
    calls = grammar.rule(" | ".join(call(grammar, form, name, schema, in_call) for name, schema in tools.items()))
    several = f"{calls} ({quoted(form.between)} {calls}){{0,{MAX_CALLS - 1}}}" if form.begin else calls
    begin = grammar.literal(form.begin.removeprefix(skip)) if form.begin else ""
    block = " ".join(filter(None, [begins, begin, several, grammar.literal(form.end)]))
    start = " ".join(filter(None, [thought(grammar, thoughts, inside), f"({block}){{0,{MAX_CALLS}}}", f"{text}?"]))
    return "\n".join([f"start: {start}", *grammar.rules])


def thought(grammar: Grammar, thoughts: Thoughts | None, inside: bool) -> str:
    if thoughts is None or thoughts.said:
        return ""
    never = {*thoughts.closes, *thoughts.ends, *thoughts.opens}
    found = f'{grammar.text(thoughts.closes[0], never)} ("\\n" | "\\n\\n")?'
    return found if inside else f"({grammar.literal(thoughts.opens[0])} {found})?"


def call(grammar: Grammar, form: Form, name: str, schema: Mapping[str, Any], skip: str = "") -> str:
    """The rule of a call of one tool, from behind `skip`."""
    found: list[str] = []
    written = ""  # text that is not in `found` yet
    for i, (hole, text) in enumerate(form.parts):
        if hole in ("", "name"):
            written += name if hole else text if i else text.removeprefix(skip)
            continue
        if hole == "object":
            written += f'{{"{form.keys[0]}": {json.dumps(name)}, "{form.keys[1]}": '
        elif hole == "id":
            written += f"functions.{name}:"
        found += [grammar.literal(written)] if written else []
        written = "}" if hole == "object" else ""
        if hole == "id":
            found.append(grammar.rule("/[0-9]{1,3}/", terminal=True))
        elif hole in ("object", "arguments"):
            found.append(grammar.json({**schema, "type": "object"}, schema))
        elif hole == "parameters":
            found += [f"({each})" if wanted else f"({each})?" for each, wanted in tagged(grammar, form, schema)]
        elif hole == "keywords":
            members = [
                (grammar.rule(f"{quoted(identifier(key) + '=')} {python(grammar, own, schema)}"), wanted)
                for key, own, wanted in members_of(schema, schema)
            ]
            found.append(grammar.separated(members, ", "))
        else:
            found.append(fields(grammar, form.quote, schema, schema, 0))
    found += [grammar.literal(written)] if written else []
    return grammar.rule(" ".join(each for each in found if each != '""'))


def members_of(schema: Any, root: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """The name and the schema of each property, and whether it is required."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        raise Unsayable("arguments of any kind")
    if strange := set(schema) - MEMBERS:
        raise Unsayable(f"{sorted(strange)[0]} of an object")
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, Mapping) or False in properties.values():
        raise Unsayable("properties that cannot be there")
    if not isinstance(required, list) or not all(isinstance(key, str) and key in properties for key in required):
        raise Unsayable("what is required is no property")
    wanted = frozenset(required)
    return [(key, own, key in wanted) for key, own in properties.items()]


def tagged(grammar: Grammar, form: Form, schema: Mapping[str, Any]) -> Iterable[tuple[str, bool]]:
    """Each parameter between its tags."""
    tag = form.tag
    parts = tag.parts
    at = next(i for i, (hole, _) in enumerate(parts) if hole == "value")
    end = parts[at + 1][1]
    never = {*tag.ends, *form.closing}
    for key, own, wanted in members_of(schema, schema):
        if not re.fullmatch(r"[^\s<>\"'=|](?:[^\r\n<>\"'=|]*[^\s<>\"'=|])?", key):
            raise Unsayable(f"a parameter of the name {key!r}")

        def before(kind: str, key: str = key) -> str:
            given = {"key": key, "kind": kind}
            return grammar.literal("".join(text or given[hole] for hole, text in parts[:at]))

        told = any(hole == "kind" for hole, _ in parts)
        found = []
        has = grammar.kinds(own, schema)
        other = has - {"string"} if has != ALL else frozenset()
        for form_of_text in texts(grammar, own, schema) if "string" in has else ():
            form_of_text = form_of_text or "/(?s:.*)/"
            if other and not told:
                like = grammar.rule(LIKE_JSON, terminal=True)
                form_of_text = f"({form_of_text}) & ~{like}"
            found.append(f"{before('true')} {grammar.text(end, never, form_of_text)}")
        if other:
            only = own if "string" not in has else {"allOf": [own, {"type": sorted(other)}]}
            found.append(f"{before('false')} {grammar.json(only, schema)} {grammar.literal(end)}")
        yield grammar.rule(" | ".join(found)), wanted


def texts(grammar: Grammar, schema: Any, root: Mapping[str, Any]) -> list[str]:
    """The terminal of each kind of text that a schema takes; an empty one is of any text."""
    return [
        text_form(grammar, branch)
        for branch in grammar.branches(schema, root)
        if "string" in grammar.kinds(branch, root)
    ]


def text_form(grammar: Grammar, schema: Mapping[str, Any]) -> str:
    """The terminal of the texts that a schema without alternatives takes; an empty one is of any text."""
    if constraints := set(schema) - OF_TEXT:
        raise Unsayable(f"{sorted(constraints)[0]} of a text")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    pattern, low, high = schema.get("pattern"), count_of(schema, "minLength"), count_of(schema, "maxLength")
    if values is not None:
        if not isinstance(values, list) or (pattern, low, high) != (None, None, None):
            raise Unsayable("texts with a pattern")
        given = [value for value in values if isinstance(value, str)]
        if not all(given):
            raise Unsayable("an empty text of several")
        return "(" + " | ".join(map(quoted, given)) + ")"
    parts = []
    if pattern is not None:
        if not isinstance(pattern, str):
            raise Unsayable(f"the pattern {pattern!r:.40}")
        grammar.spend(len(pattern))
        parts.append(regex_of(pattern))
    if (low, high) != (None, None):
        parts.append(f"/(?s:.{{{low or 0},{'' if high is None else high}}})/")
    return " & ".join(parts)


def count_of(schema: Mapping[str, Any], name: str) -> int | None:
    value = schema.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise Unsayable(f"{name} that is no count")
    return value


def regex_of(pattern: str) -> str:
    """A pattern, which may be found anywhere in a text, as a terminal that is the whole text."""
    matches = list(PATTERN_PART.finditer(pattern))
    parts = [match[0] for match in matches]
    starts, ends = parts[:1] == ["^"], parts[-1:] == ["$"]
    anchors = parts.count("^") + parts.count("$")
    if (
        not REFUSED_PARTS.isdisjoint(parts)
        or any(match["unclosed"] for match in matches)
        or anchors != starts + ends
        or (anchors and "|" in parts)
    ):
        raise Unsayable(f"the pattern {pattern!r}")
    body = "".join(parts[starts : len(parts) - ends])
    body = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], body, flags=re.DOTALL)
    return f"/{'' if starts else ANY_TEXT}({body}){'' if ends else ANY_TEXT}/"


def identifier(key: str) -> str:
    if not key.isidentifier():
        raise Unsayable(f"a parameter of the name {key!r}")
    return key


def python(grammar: Grammar, own: Any, root: Mapping[str, Any]) -> str:
    """A value of Python's: JSON, where the values that are words have their own."""
    if not grammar.kinds(own, root) <= {"boolean", "null"}:
        return grammar.json(own, root)
    words = []
    for branch in grammar.branches(own, root):
        values = [branch["const"]] if "const" in branch else branch.get("enum", [True, False, None])
        if not isinstance(values, list) or set(branch) - ANNOTATIONS - {"type", "enum", "const"}:
            raise Unsayable("more than the type of a boolean")
        has = grammar.kinds(branch, root)
        words += [repr(value) for value in values if kind_of(value) in has]
    return f"({' | '.join(map(quoted, dict.fromkeys(words)))})"


def fields(grammar: Grammar, quote: str, schema: Any, root: Mapping[str, Any], depth: int) -> str:
    """An object in braces."""
    if depth > MAX_DEPTH:
        raise Unsayable("objects in objects without end")
    members = []
    for key, own, wanted in members_of(schema, root):
        name = key if PLAIN_KEY.fullmatch(key) else f"{quote}{key}{quote}"
        if quote in key:
            raise Unsayable(f"a parameter of the name {key!r}")
        members.append(
            (grammar.rule(f"{grammar.literal(name + ':')} {field(grammar, quote, own, root, depth)}"), wanted)
        )
    inner = grammar.separated(members, ",")
    return grammar.rule(f'"{{" {inner} "}}"' if inner != '""' else '"{}"')


def field(grammar: Grammar, quote: str, schema: Any, root: Mapping[str, Any], depth: int) -> str:
    """A value between quotes, bare, or in brackets."""
    found = []
    for branch in grammar.branches(schema, root):
        if id(branch) not in grammar.fields:
            grammar.fields[id(branch)] = None
            grammar.fields[id(branch)] = field_without_choice(grammar, quote, branch, root, depth)
        if (rule := grammar.fields[id(branch)]) is None:
            raise Unsayable("values in values without end")
        found.append(rule)
    if not found:
        raise Unsayable("a choice of nothing but itself")
    return grammar.rule(" | ".join(found))


def field_without_choice(
    grammar: Grammar, quote: str, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int
) -> str:
    found = []
    has = grammar.kinds(schema, root)
    if "string" in has:
        found.append(f"{grammar.literal(quote)} {grammar.text(quote, {quote}, text_form(grammar, schema))}")
    if has != ALL:
        if scalars := has & SCALARS:
            found.append(grammar.json({**schema, "type": sorted(scalars)}, root))
        if "object" in has:
            if not schema.get("properties"):
                raise Unsayable("an object with any properties")
            found.append(fields(grammar, quote, schema, root, depth + 1))
        if "array" in has:
            found.append(items(grammar, quote, schema, root, depth + 1))
    return grammar.rule(" | ".join(found))


def items(grammar: Grammar, quote: str, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
    """A list in brackets."""
    if depth > MAX_DEPTH or set(schema) & {"prefixItems", "contains", "uniqueItems", "unevaluatedItems"}:
        raise Unsayable("a list of more than items")
    least, most = count_of(schema, "minItems") or 0, count_of(schema, "maxItems")
    item = field(grammar, quote, schema.get("items", ANY_ITEM), root, depth)
    if most == 0:
        return '"[]"'
    several = f'{item} ("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
    return grammar.rule(f'"[" {several if least else f"({several})?"} "]"')
