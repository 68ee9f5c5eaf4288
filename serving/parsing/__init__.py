"""Parsers of answers: the formats of tool calls and reasoning, by the names that users give."""

import importlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from . import thoughts
from .form import Form, Tools
from .grammar import InexpressibleSchema as InexpressibleSchema
from .grammar import free_grammar, required_call_grammar
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
    """Create the parser of one answer.

    Args:
        tools: The schema of each function's arguments. Without it, calls are text.
        opened: Whether the prompt has opened a thought (True) or closed one (False); None if
            neither.
        is_json: Whether the request asks for JSON, so that only marked calls count.
    """
    form = look_up_format("tool parser", tool_parser, TOOL_FORMS, REFUSED_TOOLS)
    reasoning = look_up_format("reasoning parser", reasoning_parser, REASONING, REFUSED_REASONING)
    if ".harmony" in (form, reasoning):
        if {form, reasoning} - {".harmony", None}:
            raise ValueError(
                f"the tool parser {tool_parser!r} and the reasoning parser {reasoning_parser!r} do "
                "not go together: harmony is both (openai and openai_gptoss)"
            )
        read = importlib.import_module(".harmony", __name__).read
        return Reader(
            partial(read, tools=tools is not None, inside=bool(opened)), keeps_special=True
        )
    parsers = []
    if reasoning:
        parsers.append(
            Reader(
                partial(reasoning.read, inside=reasoning.inside(opened)), reasoning.keeps_special
            )
        )
    if form and tools is not None:
        if is_json and isinstance(form, Form):
            form = replace(form, unmarked=False)
        read = importlib.import_module(form, __name__).read if isinstance(form, str) else form.read
        # In some models the marks of calls are special tokens.
        parsers.append(Reader(partial(read, tools=tools), keeps_special=True))
    return parsers[0] if len(parsers) == 1 else ParserChain(parsers)


def call_grammar(
    tool_parser: str,
    reasoning_parser: str | None,
    tools: Tools,
    specials: Mapping[str, int | None],
    calls: str,
    opened: bool | None,
) -> str:
    """Return the llguidance grammar of an answer that calls these tools in a model's own format.

    Raises InexpressibleSchema if the format cannot express a schema.

    Args:
        specials: Special token -> its id, or None if the token ends an answer.
        calls: "one", "several", or "any" number of calls within any text.
        opened: As for `make_parser`.
    """
    form = look_up_format("tool parser", tool_parser, TOOL_FORMS, REFUSED_TOOLS)
    reasoning = look_up_format("reasoning parser", reasoning_parser, REASONING, REFUSED_REASONING)
    if form == ".harmony":
        if calls == "any":
            raise InexpressibleSchema("harmony has headers and channels round its texts")
        calls = "one"
        reasoning = Thoughts((HARMONY[0],), (HARMONY[1],))
    if isinstance(form, str):
        form = importlib.import_module(form, __name__).call_form(specials)
    inside = reasoning is not None and reasoning.inside(opened)
    if calls == "any":
        return free_grammar(form, tools, specials, reasoning, inside)
    return required_call_grammar(form, tools, specials, calls == "several", reasoning, inside)


def look_up_format(
    kind: str, name: str | None, table: Mapping[str, Any], refused: Mapping[str, str]
) -> Any:
    if name is None or name in table:
        return None if name is None else table[name]
    if name in refused:
        raise ValueError(f"the {kind} {name!r} is not served: {refused[name]}")
    raise ValueError(f"the {kind} is {name!r}; it can be {', '.join(table)}")


def detect(chat_template: str) -> tuple[str | None, str | None]:
    """Return the tool parser and the reasoning parser that fit a chat template."""
    tool, reasoning = (
        next((name for signs, name in table if all(sign in chat_template for sign in signs)), None)
        for table in (SIGNS, thoughts.SIGNS)
    )
    return tool, reasoning


def opens_thought(prompt: str) -> bool | None:
    """Return whether a prompt ends within an open thought.

    False if it ends with a closed one, None if neither.
    """
    end = prompt.rstrip()
    formats = [
        thoughts_format
        for thoughts_format in REASONING.values()
        if isinstance(thoughts_format, Thoughts)
    ]
    if end.endswith(
        (HARMONY[0], *(text for thoughts_format in formats for text in thoughts_format.opens))
    ):
        return True
    return (
        False
        if end.endswith(
            tuple(text for thoughts_format in formats for text in thoughts_format.closes)
        )
        else None
    )
