"""Answers forced into a format: whatever tokens are drawn, they are read back as calls that keep to
their schemas.
"""

import contextlib
import json
import re
from functools import partial
from random import Random
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest

from quire.serving import parsing
from quire.serving.parsing import grammar, harmony, mistral, schema_types
from quire.serving.parsing.form import Form
from quire.serving.parsing.thoughts import REASONING, Thoughts
from quire.serving.parsing.tool_forms import TOOL_FORMS
from quire.serving.request.grammar_text import complete_grammar
from quire.tests.support.cases import cases
from quire.tests.support.recorded_calls import read

FORMS: dict[str, Form] = {name: form for name, form in TOOL_FORMS.items() if isinstance(form, Form)}
FORMS |= {
    "mistral, a list": mistral.LISTED,
    "mistral, by name": mistral.NAMED,
    "openai": harmony.call_form(()),
}
TEXT = {"type": "string"}
TOOLS: dict[str, Any] = {
    "find-trains.v2": {
        "type": "object",
        "properties": {
            "to": TEXT,
            "seats": {"type": "integer", "minimum": 1},
            "first": {"type": "boolean"},
            "note": {"anyOf": [TEXT, {"type": "null"}]},
            "kind": {"enum": ["ICE", "S 3", "<b>"]},
            "code": {"type": "string", "pattern": "^[A-Z]{2}/[0-9]+$"},
            "via": {"type": "array", "items": TEXT, "maxItems": 2},
            "at": {"$ref": "#/$defs/place"},
            "never": {"type": ["boolean", "null"]},
            "fare": {"type": ["number", "string"]},
        },
        "required": ["to", "via", "at"],
        "additionalProperties": False,
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "name": TEXT},
                "required": ["x"],
            }
        },
    },
    "now": {"type": "object", "properties": {}},
    "count": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
PIECES = [
    '"',
    "{",
    "}",
    "[",
    "]",
    ", ",
    ": ",
    "true",
    "null",
    "1",
    "0.5",
    "True",
    "None",
    "12",
    "\n",
    "</",
    "<",
    "'",
    ")",
]


class Tokens:
    """What the library asks of a tokenizer; the last ones are never text."""

    is_tokenizer_wrapper = True
    eos_token_id = bos_token_id = None

    def __init__(self, pieces: list[str], specials: list[str]):
        self.tokens = [bytes([byte]) for byte in range(256)] + [
            piece.encode() for piece in [*pieces, *specials]
        ]
        self.special_token_ids = list(range(256 + len(pieces), len(self.tokens)))

    def __call__(self, text: str) -> list[int]:
        return []


def marks_of(form: Form) -> list[str]:
    """The texts round the holes, whole and in parts."""
    found = " ".join([form.begin, form.end, form.call, form.parameter, form.quote])
    return sorted({each for each in re.split(r"\{\w+\}|\s+|(?<=>)", found) if each})


def sentence(random: Random, matcher: Any, tokens: Tokens, ends: float = 0.3) -> str | None:
    """An answer of random tokens that may come; None if it has no end soon."""
    written = b""
    for count in range(4000):
        if matcher.is_accepting() and (random.random() < ends or count > 300):
            return written.decode()
        allowed = np.flatnonzero(
            np.frombuffer(matcher.compute_logit_bias(), np.uint8)[: len(tokens.tokens)]
        )
        if not len(allowed):
            return written.decode() if matcher.is_accepting() else None
        known = [i for i in allowed if i > 255]
        plain = [i for i in allowed if 32 <= i < 127] or list(allowed)
        pick = (
            random.choice(known)
            if known and (random.random() < 0.5 or count > 300)
            else random.choice(plain)
        )
        assert matcher.consume_token(int(pick)), matcher.get_error()
        written += tokens.tokens[pick]
    return None


def made(
    form: Form,
    tools: dict[str, Any],
    special: bool,
    thoughts: Thoughts | None,
    inside: bool,
    calls: str = "several",
):
    marks = marks_of(form)
    if thoughts:
        marks += [thoughts.opens[0], thoughts.closes[0]]
    specials = [mark for mark in marks if special and re.fullmatch(r"<.+>|\[[A-Z_]+\]", mark)]
    tokens = Tokens([*PIECES, *(mark for mark in marks if mark not in specials)], specials)
    ids = dict(zip(specials, tokens.special_token_ids, strict=True))
    if calls == "any":
        written = grammar.free_grammar(form, tools, ids, thoughts, inside)
    else:
        written = grammar.required_call_grammar(
            form, tools, ids, calls == "several", thoughts, inside
        )
    body = complete_grammar(json.dumps({"lark_grammar": written}), "")
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(tokens), body, log_level=0)  # type: ignore[arg-type]
    assert not matcher.is_error(), matcher.get_error() + written
    return matcher, tokens


def check(
    random: Random,
    name: str,
    tools: dict[str, Any],
    special: bool,
    reasoning: str | None,
    opened: bool,
) -> int:
    """How many of some answers came to an end; what they call keeps to its schema."""
    described = REASONING[reasoning] if reasoning else None
    assert described is None or isinstance(described, Thoughts)
    matcher, tokens = made(FORMS[name], tools, special, described, opened)
    parser = name.partition(",")[0]
    make = partial(
        parsing.make_parser, parser, reasoning if parser != "openai" else None, tools, opened
    )
    ended = 0
    for _ in range(cases(12)):
        text = sentence(random, matcher.deep_copy(), tokens)
        if text is None:
            continue
        ended += 1
        said, _, calls = read(make, text)
        assert calls and not said.strip(), text
        for called, arguments in calls:
            jsonschema.validate(json.loads(arguments), tools[called])
    return ended


@pytest.mark.random
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.slow
def test_forced_answers_are_calls(name, special):
    assert check(Random(1), name, TOOLS, special, None, False)


@pytest.mark.random
@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize(
    "name", ["hermes", "qwen3_coder", "pythonic", "gemma4", "kimi_k2", "deepseek_v31"]
)
def test_a_thought_may_come_first(name, opened):
    reasoning = {"gemma4": "gemma4", "kimi_k2": "kimi_k2"}.get(name, "qwen3")
    for special in (False, True):
        assert check(Random(2), name, TOOLS, special, reasoning, opened)


def test_one_call_where_one_is_wanted():
    for name in ("hermes", "kimi_k2", "pythonic"):
        matcher, tokens = made(FORMS[name], TOOLS, False, None, False, "one")
        for text in filter(
            None, (sentence(Random(i), matcher.deep_copy(), tokens) for i in range(5))
        ):
            assert len(read(partial(parsing.make_parser, name, None, TOOLS), text)[2]) == 1


MARKED = sorted(name for name, form in FORMS.items() if not form.starts_answer and name != "openai")


@pytest.mark.random
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", MARKED)
@pytest.mark.slow
def test_strict_calls_within_any_text(name, special):
    """Text is free; a call that begins is one, and keeps to its schema."""
    random = Random(6)
    called = 0
    matcher, tokens = made(FORMS[name], TOOLS, special, None, False, "any")
    make = partial(parsing.make_parser, name.partition(",")[0], None, TOOLS)
    for i in range(cases(30)):
        trial = matcher.deep_copy()
        start = f"Hm. {FORMS[name].head[0]}" * (i % 3 > 0)
        while written := start:  # token by token, those of marks first
            token = next(
                i
                for i in reversed(range(len(tokens.tokens)))
                if written.encode().startswith(tokens.tokens[i])
            )
            assert trial.consume_token(token)
            start = start.encode()[len(tokens.tokens[token]) :].decode()
        text = sentence(random, trial, tokens, 0.02)
        if text is None:
            continue
        text = f"Hm. {FORMS[name].head[0]}" * (i % 3 > 0) + text
        _, _, calls = read(make, text)
        for name_called, arguments in calls:
            jsonschema.validate(json.loads(arguments), TOOLS[name_called])
        called += len(calls)
        assert FORMS[name].head[0] not in text or calls
    assert called
    for free in ("Hello, <b>world</b>! {}", "a < b\n"):
        trial = matcher.deep_copy()
        assert all(trial.consume_token(byte) for byte in free.encode()) and trial.is_accepting()


UNSAYABLE: dict[str, Any] = {
    "anyOf": {"anyOf": [{"properties": {"a": TEXT}}]},
    "minProperties": {"type": "object", "properties": {"a": TEXT}, "minProperties": 1},
    "format": {"type": "object", "properties": {"a": TEXT | {"format": "date"}}},
    "pattern": {"type": "object", "properties": {"a": TEXT | {"pattern": r"\bx\b"}}},
    "name": {"type": "object", "properties": {"a>b": TEXT}},
}


SAID = [
    (name, why)
    for name in ("qwen3_coder", "gemma4")
    for why in UNSAYABLE
    if (name, why) != ("gemma4", "name")
]


@pytest.mark.parametrize(("name", "why"), SAID)
def test_what_a_format_cannot_be_held_to_is_said(name, why):
    with pytest.raises(grammar.InexpressibleSchema):
        grammar.required_call_grammar(FORMS[name], {"f": UNSAYABLE[why]}, {}, True, None, False)


SELF = {"$ref": "#/$defs/a"}
MANY = [{"$ref": "#/$defs/a", "title": str(i)} for i in range(200)]
REPEATED: dict[str, Any] = {  # by what refers back to itself, or to the same again and again
    "anyOf": {"properties": {"x": SELF}, "$defs": {"a": {"anyOf": [SELF] * 4}}},
    "oneOf": {"properties": {"x": SELF}, "$defs": {"a": {"oneOf": [SELF, TEXT, SELF]}}},
    "allOf": {"properties": {"x": SELF}, "$defs": {"a": {"allOf": [SELF, SELF, {"title": "x"}]}}},
    "root": {"anyOf": [{"$ref": "#"}] * 20, "properties": {"x": {"$ref": "#"}, "y": {"$ref": "#"}}},
    "properties": {
        "properties": dict.fromkeys("xyz", SELF),
        "$defs": {"a": {"type": "object", "properties": {f"p{i}": SELF for i in range(30)}}},
    },
    "items": {
        "properties": {"x": SELF},
        "$defs": {"a": {"type": "array", "items": {"anyOf": [SELF] * 20}}},
    },
    "doubled": {
        "properties": {"x": {"$ref": "#/$defs/a0"}},
        "$defs": {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(60)}
        | {"a60": TEXT},
    },
    "doubled objects": {
        "properties": {"x": {"$ref": "#/$defs/a0"}},
        "$defs": {
            f"a{i}": {
                "type": "object",
                "properties": dict.fromkeys("abcdefgh", {"$ref": f"#/$defs/a{i + 1}"}),
            }
            for i in range(7)
        }
        | {"a7": TEXT},
    },
    "many of many": {
        "properties": {f"p{i}": {"anyOf": [{"$ref": "#/$defs/a"}]} for i in range(200)},
        "$defs": {"a": {"anyOf": MANY}},
    },
    "a long reference": {"properties": {"x": {"anyOf": [{"$ref": "#" + "/a" * 9_000}] * 100}}},
}


@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4", "pythonic", "hermes"])
@pytest.mark.parametrize("schema", REPEATED)
def test_schemas_that_refer_to_themselves_take_bounded_steps(schema, name, monkeypatch):
    """Written and read: as many steps as the schema is large, whether it can be held to or not."""
    steps = 0

    def counted(pointer, root, pointed_at=schema_types._resolve_pointer):
        nonlocal steps
        steps += 1
        assert steps < 200_000  # 2^32 and more, without a bound
        return pointed_at(pointer, root)

    monkeypatch.setattr(schema_types, "_resolve_pointer", counted)
    tools = {"f": REPEATED[schema]}
    for calls in ("one", "any"):
        with contextlib.suppress(grammar.InexpressibleSchema):
            assert len(parsing.call_grammar(name, None, tools, {}, calls, None)) < 1 << 22
    parser = parsing.make_parser(name, None, tools)
    parser.push(
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    )
    parser.push("<|tool_call>call:f{x:1}<tool_call|>")
    parser.finish()


PATTERNS = {
    "^a$": "/(a)/",
    "a/b": "/(?s:.*)(a\\/b)(?s:.*)/",
    r"^a\/b": r"/(a\/b)(?s:.*)/",
    r"^[/]\$$": r"/([\/]\$)/",
    "^[$^|]$": "/([$^|])/",
    "(?:a|b)": "/(?s:.*)((?:a|b))(?s:.*)/",
    r"\\$": r"/(?s:.*)(\\)/",
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_as_a_terminal(pattern):
    assert grammar.search_terminal(pattern) == PATTERNS[pattern]


@pytest.mark.parametrize(
    "pattern",
    ["a^", "$a", "^a|b$", r"\bx", r"(a)\1", "(?=a)", "(?i)a", "[a", "[", "a\\", "[]a]", "[^]"],
)
def test_a_pattern_that_is_no_terminal(pattern):
    with pytest.raises(grammar.InexpressibleSchema):
        grammar.search_terminal(pattern)


def test_a_pattern_is_read_in_linear_time():
    """Each part of these once took as many steps as there is pattern before or behind it."""
    for part in ("\\", "[", "[^", "(?:", "\\[", "[\\]"):
        matches = list(grammar.PATTERN_PART.finditer(part * 60_000))
        assert "".join(match[0] for match in matches) == part * 60_000
        with contextlib.suppress(grammar.InexpressibleSchema):
            grammar.search_terminal("^" + part * 60_000)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": {"type": "string", "minLength": "1"}}},
        {"properties": {"x": {"type": "string", "enum": 5}}},
        {"properties": {"x": {"type": "string", "pattern": 5}}},
        {"properties": {"x": {"type": "boolean", "enum": 5}}},
        {"properties": {"x": {"type": "array", "minItems": 1.5}}},
        {"properties": {"x": {"anyOf": [TEXT, False]}}},
        {"properties": {"x": {"$ref": "#/nowhere"}}},
        {"properties": {"x": TEXT | {"anyOf": [{"minLength": 1}]}}},
        {"properties": {"x": {"oneOf": [TEXT, {"type": "string", "minLength": 4}]}}},
        {"properties": {"x": TEXT}, "required": 5},
        {"properties": {"x": TEXT}, "required": [[]]},
        {"properties": {"x": False}},
        {"properties": [1]},
    ],
)
def test_what_cannot_be_held_to_is_said_and_does_not_fail(schema):
    for name in ("qwen3_coder", "gemma4", "pythonic"):
        with contextlib.suppress(grammar.InexpressibleSchema):
            parsing.call_grammar(name, None, {"f": {"type": "object", **schema}}, {}, "one", None)
