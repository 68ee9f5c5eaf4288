"""Parsers of answers: descriptions of the formats of tool calls and of thoughts, by the names that users give."""

import importlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from . import thoughts
from .form import Form, Tools
from .grammar import Unsayable as Unsayable
from .grammar import free_grammar, grammar_of
from .parser import Parser, ParserChain
from .reader import Reader
from .thoughts import REASONING, REFUSED_REASONING, Thoughts
from .tool_forms import REFUSED_TOOLS, SIGNS, TOOL_FORMS

REASONING_PARSERS = tuple(REASONING)
TOOL_PARSERS = tuple(TOOL_FORMS)
HARMONY = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")


def make_parser(
    tool_parser: str | None,
    reasoning_parser: str | None,
    tools: Tools | None,
    opened: bool | None = None,
    is_json: bool = False,
) -> Parser:
    """A parser for one answer.

    Args:
        tools: The schema of each function's arguments; without it calls are text.
        opened: Whether the prompt has opened a thought, or closed one; None if neither.
        is_json: Whether the request asks for JSON, so that calls need the marks of their format.
    """
    form = known("tool parser", tool_parser, TOOL_FORMS, REFUSED_TOOLS)
    reasoning = known("reasoning parser", reasoning_parser, REASONING, REFUSED_REASONING)
    if ".harmony" in (form, reasoning):
        if {form, reasoning} - {".harmony", None}:
            raise ValueError(
                f"the tool parser {tool_parser!r} and the reasoning parser {reasoning_parser!r} do not go together: "
                "harmony is both (openai and openai_gptoss)"
            )
        read = importlib.import_module(".harmony", __name__).read
        return Reader(partial(read, tools=tools is not None, inside=bool(opened)), keeps_special=True)
    row = []
    if reasoning:
        row.append(Reader(partial(reasoning.read, inside=reasoning.inside(opened)), reasoning.keeps_special))
    if form and tools is not None:
        if is_json and isinstance(form, Form):
            form = replace(form, unmarked=False)
        read = importlib.import_module(form, __name__).read if isinstance(form, str) else form.read
        row.append(Reader(partial(read, tools=tools), keeps_special=True))  # marks are special tokens in some models
    return row[0] if len(row) == 1 else ParserChain(row)


def call_grammar(
    tool_parser: str,
    reasoning_parser: str | None,
    tools: Tools,
    specials: Mapping[str, int | None],
    calls: str,
    opened: bool | None,
) -> str:
    """The grammar, for llguidance, of an answer that calls these tools in a model's own format.

    `calls`: "one", "several", or "any" number of them within any text.

    `specials` has the ids of the tokens that are never text, None for those that end an answer. Unsayable where the
    format has no texts for a schema.
    """
    form = known("tool parser", tool_parser, TOOL_FORMS, REFUSED_TOOLS)
    reasoning = known("reasoning parser", reasoning_parser, REASONING, REFUSED_REASONING)
    if form == ".harmony":
        if calls == "any":
            raise Unsayable("harmony has headers and channels round its texts")
        calls, reasoning = "one", Thoughts((HARMONY[0],), (HARMONY[1],))
    if isinstance(form, str):
        form = importlib.import_module(form, __name__).written(specials)
    inside = reasoning is not None and reasoning.inside(opened)
    if calls == "any":
        return free_grammar(form, tools, specials, reasoning, inside)
    return grammar_of(form, tools, specials, calls == "several", reasoning, inside)


def known(what: str, name: str | None, table: Mapping[str, Any], refused: Mapping[str, str]) -> Any:
    if name is None or name in table:
        return None if name is None else table[name]
    if name in refused:
        raise ValueError(f"the {what} {name!r} is not served: {refused[name]}")
    raise ValueError(f"the {what} is {name!r}; it can be {', '.join(table)}")


def detect(chat_template: str) -> tuple[str | None, str | None]:
    """The tool parser and the reasoning parser that a chat template asks for."""
    tool, reasoning = (
        next((name for signs, name in table if all(sign in chat_template for sign in signs)), None)
        for table in (SIGNS, thoughts.SIGNS)
    )
    return tool, reasoning


def opens_thought(prompt: str) -> bool | None:
    """Whether a prompt ends where a thought has begun, so that the answer goes on with it; None: nor has one ended."""
    end = prompt.rstrip()
    found = [each for each in REASONING.values() if isinstance(each, Thoughts)]
    if end.endswith((HARMONY[0], *(text for each in found for text in each.opens))):
        return True
    return False if end.endswith(tuple(text for each in found for text in each.closes)) else None
