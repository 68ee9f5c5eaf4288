"""The grammar of an answer that calls tools in a model's own format, as Lark for llguidance.

Every sentence of it is read back, by the same description, as calls whose arguments keep to the tools' schemas.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from .form import Form, Tools
from .schema_types import ALL, branches, kind_of, kinds, resolved
from .thoughts import Thoughts

DEFINED = ("#/$defs/", "#/definitions/")
MAX_CALLS = 16  # in one answer
MAX_DEPTH = 8  # of objects in Gemma's fields
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
SCALARS = frozenset({"integer", "number", "boolean", "null"})
PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What a schema of arguments may say where they are not one piece of JSON, and one of a text.
MEMBERS = frozenset(
    "type properties required additionalProperties title description examples default $schema $id $comment $defs "
    "definitions strict".split()
)
OF_TEXT = frozenset(
    "type enum const pattern minLength maxLength title description examples default anyOf oneOf".split()
)
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

    def rule(self, body: str, terminal: bool = False, lazy: bool = False) -> str:
        """The name of a rule with this body."""
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
        if own != {**root, "type": "object"} and not all(ref.startswith(DEFINED) for ref in references(schema)):
            raise Unsayable("a reference to another place than $defs")
        for name in ("$defs", "definitions"):
            if name in root:
                own[name] = root[name]
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


def references(schema: Any) -> Iterable[str]:
    if isinstance(schema, Mapping):
        for name, value in schema.items():
            if name == "$ref" and isinstance(value, str):
                yield value
            yield from references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from references(value)


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
    if not isinstance(properties, Mapping) or not set(required) <= set(properties):
        raise Unsayable("what is required is no property")
    return [(key, own, key in required) for key, own in properties.items()]


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
        has = kinds(own, schema)
        other = has - {"string"} if has != ALL else frozenset()
        for form_of_text in texts(own, schema) if "string" in has else ():
            form_of_text = form_of_text or "/(?s:.*)/"
            if other and not told:
                like = grammar.rule(LIKE_JSON, terminal=True)
                form_of_text = f"({form_of_text}) & ~{like}"
            found.append(f"{before('true')} {grammar.text(end, never, form_of_text)}")
        if other:
            only = own if "string" not in has else {"allOf": [own, {"type": sorted(other)}]}
            found.append(f"{before('false')} {grammar.json(only, schema)} {grammar.literal(end)}")
        yield grammar.rule(" | ".join(found)), wanted


def texts(schema: Any, root: Mapping[str, Any]) -> list[str]:
    """The terminal of each kind of text that a schema takes; an empty one is of any text."""
    found = []
    for branch in branches(schema, root):
        if "string" not in kinds(branch, root):
            continue
        if (constraints := set(branch) - OF_TEXT) and kinds(branch, root) != ALL:
            raise Unsayable(f"{sorted(constraints)[0]} of a text")
        values = [branch["const"]] if "const" in branch else branch.get("enum")
        limits = [branch.get("minLength"), branch.get("maxLength")]
        if values is not None:
            given = [value for value in values if isinstance(value, str)]
            if not all(given) or "pattern" in branch or limits != [None, None]:
                raise Unsayable("an empty text of several, or texts with a pattern")
            found.append("(" + " | ".join(map(quoted, given)) + ")")
            continue
        parts = [regex_of(branch["pattern"])] if "pattern" in branch else []
        if limits != [None, None]:
            low, high = (limits[0] or 0), ("" if limits[1] is None else limits[1])
            parts.append(f"/(?s:.{{{low},{high}}})/")
        found.append(" & ".join(parts))
    return found


def regex_of(pattern: str) -> str:
    """A pattern, which may be found anywhere in a text, as a terminal that is the whole text."""
    body = pattern.removeprefix("^")
    fixed = len(body) < len(pattern), bool(re.search(r"(?<!\\)(?:\\\\)*\$$", body))
    body = body[:-1] if fixed[1] else body
    outside = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", body)
    if re.search(r"[\^$]|\(\?(?!:)", outside) or re.search(r"\\[bB1-9]", body) or ("|" in outside and any(fixed)):
        raise Unsayable(f"the pattern {pattern!r}")
    body = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], body)
    any_text = "(?s:.*)"
    return f"/{'' if fixed[0] else any_text}({body}){'' if fixed[1] else any_text}/"


def identifier(key: str) -> str:
    if not key.isidentifier():
        raise Unsayable(f"a parameter of the name {key!r}")
    return key


def python(grammar: Grammar, own: Any, root: Mapping[str, Any]) -> str:
    """A value of Python's: JSON, where the values that are words have their own."""
    has = kinds(own, root)
    if not has <= {"boolean", "null"}:
        return grammar.json(own, root)
    words = [
        repr(value)
        for branch in branches(own, root)
        for value in ([branch["const"]] if "const" in branch else branch.get("enum") or [True, False, None])
        if kind_of(value) in kinds(branch, root)
    ]
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
    for branch in branches(schema, root):
        has = kinds(branch, root)
        if "string" in has:
            found += [f"{grammar.literal(quote)} {grammar.text(quote, {quote}, form)}" for form in texts(branch, root)]
        if has == ALL:
            continue
        if scalars := has & SCALARS:
            found.append(grammar.json({**branch, "type": sorted(scalars)}, root))
        if "object" in has:
            if not branch.get("properties"):
                raise Unsayable("an object with any properties")
            found.append(fields(grammar, quote, branch, root, depth + 1))
        if "array" in has:
            found.append(items(grammar, quote, branch, root, depth + 1))
    return grammar.rule(" | ".join(found))


def items(grammar: Grammar, quote: str, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
    """A list in brackets."""
    if depth > MAX_DEPTH or set(schema) & {"prefixItems", "contains", "uniqueItems", "unevaluatedItems"}:
        raise Unsayable("a list of more than items")
    least, most = schema.get("minItems") or 0, schema.get("maxItems")
    item = field(grammar, quote, schema.get("items", {"type": "string"}), root, depth)
    if most == 0:
        return '"[]"'
    several = f'{item} ("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
    return grammar.rule(f'"[" {several if least else f"({several})?"} "]"')
