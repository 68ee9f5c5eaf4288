"""Tool call grammars: whatever tokens are sampled, the answers parse as calls that match their
schemas.
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
FRAGMENTS = [
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


class ByteTokenizer:
    """The tokenizer interface of llguidance; the last tokens are special and never text."""

    is_tokenizer_wrapper = True
    eos_token_id = bos_token_id = None

    def __init__(self, pieces: list[str], specials: list[str]):
        self.tokens = [bytes([byte]) for byte in range(256)] + [
            piece.encode() for piece in [*pieces, *specials]
        ]
        self.special_token_ids = list(range(256 + len(pieces), len(self.tokens)))

    def __call__(self, text: str) -> list[int]:
        return []


def format_marks(form: Form) -> list[str]:
    """The format's fixed texts around its placeholders, complete and in parts."""
    fixed_texts = " ".join([form.begin, form.end, form.call, form.parameter, form.quote])
    return sorted({mark for mark in re.split(r"\{\w+\}|\s+|(?<=>)", fixed_texts) if mark})


def random_answer(
    random: Random, matcher: Any, tokens: ByteTokenizer, end_probability: float = 0.3
) -> str | None:
    """An answer of random tokens that the grammar allows; None if it does not end soon."""
    written = b""
    for count in range(4000):
        if matcher.is_accepting() and (random.random() < end_probability or count > 300):
            return written.decode()
        allowed_tokens = np.flatnonzero(
            np.frombuffer(matcher.compute_logit_bias(), np.uint8)[: len(tokens.tokens)]
        )
        if not len(allowed_tokens):
            return written.decode() if matcher.is_accepting() else None
        piece_tokens = [i for i in allowed_tokens if i > 255]
        printable_tokens = [i for i in allowed_tokens if 32 <= i < 127] or list(allowed_tokens)
        token = (
            random.choice(piece_tokens)
            if piece_tokens and (random.random() < 0.5 or count > 300)
            else random.choice(printable_tokens)
        )
        assert matcher.consume_token(int(token)), matcher.get_error()
        written += tokens.tokens[token]
    return None


def make_matcher(
    form: Form,
    tools: dict[str, Any],
    has_special_marks: bool,
    reasoning: Thoughts | None,
    in_reasoning: bool,
    calls: str = "several",
):
    marks = format_marks(form)
    if reasoning:
        marks += [reasoning.opens[0], reasoning.closes[0]]
    specials = [
        mark for mark in marks if has_special_marks and re.fullmatch(r"<.+>|\[[A-Z_]+\]", mark)
    ]
    tokens = ByteTokenizer(
        [*FRAGMENTS, *(mark for mark in marks if mark not in specials)], specials
    )
    ids = dict(zip(specials, tokens.special_token_ids, strict=True))
    if calls == "any":
        written = grammar.free_grammar(form, tools, ids, reasoning, in_reasoning)
    else:
        written = grammar.required_call_grammar(
            form, tools, ids, calls == "several", reasoning, in_reasoning
        )
    body = complete_grammar(json.dumps({"lark_grammar": written}), "")
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(tokens), body, log_level=0)  # type: ignore[arg-type]
    assert not matcher.is_error(), matcher.get_error() + written
    return matcher, tokens


def count_forced_answers(
    random: Random,
    name: str,
    tools: dict[str, Any],
    has_special_marks: bool,
    reasoning: str | None,
    in_reasoning: bool,
) -> int:
    """Number of random answers that ended; their calls match the tools' schemas."""
    reasoning_format = REASONING[reasoning] if reasoning else None
    assert reasoning_format is None or isinstance(reasoning_format, Thoughts)
    matcher, tokens = make_matcher(
        FORMS[name], tools, has_special_marks, reasoning_format, in_reasoning
    )
    parser = name.partition(",")[0]
    make = partial(
        parsing.make_parser, parser, reasoning if parser != "openai" else None, tools, in_reasoning
    )
    num_ended = 0
    for _ in range(cases(12)):
        text = random_answer(random, matcher.deep_copy(), tokens)
        if text is None:
            continue
        num_ended += 1
        content, _, calls = read(make, text)
        assert calls and not content.strip(), text
        for called, arguments in calls:
            jsonschema.validate(json.loads(arguments), tools[called])
    return num_ended


@pytest.mark.random
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.slow
def test_forced_answers_parse_as_valid_calls(name, special):
    assert count_forced_answers(Random(1), name, TOOLS, special, None, False)


@pytest.mark.random
@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize(
    "name", ["hermes", "qwen3_coder", "pythonic", "gemma4", "kimi_k2", "deepseek_v31"]
)
def test_forced_calls_after_reasoning(name, opened):
    reasoning = {"gemma4": "gemma4", "kimi_k2": "kimi_k2"}.get(name, "qwen3")
    for special in (False, True):
        assert count_forced_answers(Random(2), name, TOOLS, special, reasoning, opened)


def test_single_call_grammar():
    for name in ("hermes", "kimi_k2", "pythonic"):
        matcher, tokens = make_matcher(FORMS[name], TOOLS, False, None, False, "one")
        for text in filter(
            None, (random_answer(Random(i), matcher.deep_copy(), tokens) for i in range(5))
        ):
            assert len(read(partial(parsing.make_parser, name, None, TOOLS), text)[2]) == 1


MARKED_FORMATS = sorted(
    name for name, form in FORMS.items() if not form.starts_answer and name != "openai"
)


@pytest.mark.random
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", MARKED_FORMATS)
@pytest.mark.slow
def test_strict_calls_in_free_text(name, special):
    """Text is free, but a call that begins is completed and matches its schema."""
    random = Random(6)
    num_calls = 0
    matcher, tokens = make_matcher(FORMS[name], TOOLS, special, None, False, "any")
    make = partial(parsing.make_parser, name.partition(",")[0], None, TOOLS)
    for i in range(cases(30)):
        matcher_copy = matcher.deep_copy()
        start = f"Hm. {FORMS[name].head[0]}" * (i % 3 > 0)
        while written := start:  # token by token, longest marks first
            token = next(
                i
                for i in reversed(range(len(tokens.tokens)))
                if written.encode().startswith(tokens.tokens[i])
            )
            assert matcher_copy.consume_token(token)
            start = start.encode()[len(tokens.tokens[token]) :].decode()
        text = random_answer(random, matcher_copy, tokens, 0.02)
        if text is None:
            continue
        text = f"Hm. {FORMS[name].head[0]}" * (i % 3 > 0) + text
        _, _, calls = read(make, text)
        for name_called, arguments in calls:
            jsonschema.validate(json.loads(arguments), TOOLS[name_called])
        num_calls += len(calls)
        assert FORMS[name].head[0] not in text or calls
    assert num_calls
    for free in ("Hello, <b>world</b>! {}", "a < b\n"):
        matcher_copy = matcher.deep_copy()
        assert (
            all(matcher_copy.consume_token(byte) for byte in free.encode())
            and matcher_copy.is_accepting()
        )


INEXPRESSIBLE: dict[str, Any] = {
    "anyOf": {"anyOf": [{"properties": {"a": TEXT}}]},
    "minProperties": {"type": "object", "properties": {"a": TEXT}, "minProperties": 1},
    "format": {"type": "object", "properties": {"a": TEXT | {"format": "date"}}},
    "pattern": {"type": "object", "properties": {"a": TEXT | {"pattern": r"\bx\b"}}},
    "name": {"type": "object", "properties": {"a>b": TEXT}},
}


INEXPRESSIBLE_CASES = [
    (name, keyword)
    for name in ("qwen3_coder", "gemma4")
    for keyword in INEXPRESSIBLE
    if (name, keyword) != ("gemma4", "name")
]


@pytest.mark.parametrize(("name", "keyword"), INEXPRESSIBLE_CASES)
def test_inexpressible_schemas_raise(name, keyword):
    with pytest.raises(grammar.InexpressibleSchema):
        grammar.required_call_grammar(
            FORMS[name], {"f": INEXPRESSIBLE[keyword]}, {}, True, None, False
        )


SELF_REFERENCE = {"$ref": "#/$defs/a"}
MANY_REFERENCES = [{"$ref": "#/$defs/a", "title": str(i)} for i in range(200)]
RECURSIVE_SCHEMAS: dict[str, Any] = {  # by the keyword that refers to itself, or repeats references
    "anyOf": {"properties": {"x": SELF_REFERENCE}, "$defs": {"a": {"anyOf": [SELF_REFERENCE] * 4}}},
    "oneOf": {
        "properties": {"x": SELF_REFERENCE},
        "$defs": {"a": {"oneOf": [SELF_REFERENCE, TEXT, SELF_REFERENCE]}},
    },
    "allOf": {
        "properties": {"x": SELF_REFERENCE},
        "$defs": {"a": {"allOf": [SELF_REFERENCE, SELF_REFERENCE, {"title": "x"}]}},
    },
    "root": {"anyOf": [{"$ref": "#"}] * 20, "properties": {"x": {"$ref": "#"}, "y": {"$ref": "#"}}},
    "properties": {
        "properties": dict.fromkeys("xyz", SELF_REFERENCE),
        "$defs": {
            "a": {"type": "object", "properties": {f"p{i}": SELF_REFERENCE for i in range(30)}}
        },
    },
    "items": {
        "properties": {"x": SELF_REFERENCE},
        "$defs": {"a": {"type": "array", "items": {"anyOf": [SELF_REFERENCE] * 20}}},
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
        "$defs": {"a": {"anyOf": MANY_REFERENCES}},
    },
    "a long reference": {"properties": {"x": {"anyOf": [{"$ref": "#" + "/a" * 9_000}] * 100}}},
}


@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4", "pythonic", "hermes"])
@pytest.mark.parametrize("schema", RECURSIVE_SCHEMAS)
def test_recursive_schemas_take_bounded_steps(schema, name, monkeypatch):
    """For the grammar and the parser, the steps grow with the schema's size, whether it is
    expressible or not.
    """
    steps = 0

    def counted(pointer, root, pointed_at=schema_types._resolve_pointer):
        nonlocal steps
        steps += 1
        assert steps < 200_000  # unbounded, it would take 2^32 steps and more
        return pointed_at(pointer, root)

    monkeypatch.setattr(schema_types, "_resolve_pointer", counted)
    tools = {"f": RECURSIVE_SCHEMAS[schema]}
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
def test_pattern_becomes_a_terminal(pattern):
    assert grammar.search_terminal(pattern) == PATTERNS[pattern]


@pytest.mark.parametrize(
    "pattern",
    ["a^", "$a", "^a|b$", r"\bx", r"(a)\1", "(?=a)", "(?i)a", "[a", "[", "a\\", "[]a]", "[^]"],
)
def test_inexpressible_patterns_raise(pattern):
    with pytest.raises(grammar.InexpressibleSchema):
        grammar.search_terminal(pattern)


def test_patterns_are_parsed_in_linear_time():
    """Each of these once took quadratic time."""
    for pattern_part in ("\\", "[", "[^", "(?:", "\\[", "[\\]"):
        matches = list(grammar.PATTERN_PART.finditer(pattern_part * 60_000))
        assert "".join(match[0] for match in matches) == pattern_part * 60_000
        with contextlib.suppress(grammar.InexpressibleSchema):
            grammar.search_terminal("^" + pattern_part * 60_000)


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
def test_odd_schemas_raise_only_inexpressible_schema(schema):
    for name in ("qwen3_coder", "gemma4", "pythonic"):
        with contextlib.suppress(grammar.InexpressibleSchema):
            parsing.call_grammar(name, None, {"f": {"type": "object", **schema}}, {}, "one", None)
