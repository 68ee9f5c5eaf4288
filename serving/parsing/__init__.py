"""Parsers of answers: a file for each format of tool calls or thoughts, in FORMS by the names that users give."""

import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from .form import Tools
from .parser import Parser, ParserChain
from .reader import Reader
from .tool_forms import REFUSED_TOOLS, SIGNS, TOOL_FORMS

REASONING = {  # name that a user gives -> module
    "deepseek_r1": ".thinking",
    "openai_gptoss": ".harmony",
    "qwen3": ".thinking",
}
REASONING_PARSERS = tuple(REASONING)
TOOL_PARSERS = tuple(TOOL_FORMS)


def make_parser(
    tool_parser: str | None, reasoning_parser: str | None, tools: Tools | None, in_thought: bool = False
) -> Parser:
    """A parser for one answer. `tools` has the schema of each function's arguments; without it calls are text.

    `in_thought` the prompt has opened the thought.
    """
    form = known("tool parser", tool_parser, TOOL_FORMS, REFUSED_TOOLS)
    reasoning = known("reasoning parser", reasoning_parser, REASONING, {})
    if ".harmony" in (form, reasoning):
        if {tool_parser, reasoning_parser} - {"harmony", "openai", "openai_gptoss", None}:
            raise ValueError(
                f"the tool parser {tool_parser!r} and the reasoning parser {reasoning_parser!r} do not go together: "
                "harmony is both (openai and openai_gptoss)"
            )
        read = importlib.import_module(".harmony", __name__).read
        return Reader(partial(read, tools=tools is not None, inside=in_thought), keeps_special=True)
    row = []
    if reasoning:
        inside = in_thought or reasoning_parser == "deepseek_r1"  # whose prompts always open it
        row.append(Reader(partial(importlib.import_module(reasoning, __name__).read, inside=inside)))
    if form and tools is not None:
        read = importlib.import_module(form, __name__).read if isinstance(form, str) else form.read
        row.append(Reader(partial(read, tools=tools), keeps_special=True))  # marks are special tokens in some models
    return row[0] if len(row) == 1 else ParserChain(row)


def known(what: str, name: str | None, table: Mapping[str, Any], refused: Mapping[str, str]) -> Any:
    if name is None or name in table:
        return None if name is None else table[name]
    if name in refused:
        raise ValueError(f"the {what} {name!r} is not there: {refused[name]}")
    raise ValueError(f"the {what} is {name!r}; it can be {', '.join(table)}")


def detect(chat_template: str) -> tuple[str | None, str | None]:
    """The tool parser and the reasoning parser that a chat template asks for."""
    tool = next((name for signs, name in SIGNS if all(sign in chat_template for sign in signs)), None)
    if tool == "openai":
        return tool, "openai_gptoss"
    return tool, "qwen3" if "</think>" in chat_template or "<think>" in chat_template else None


def opens_thought(prompt: str) -> bool:
    """Whether a prompt ends within a thought, so that the answer begins there."""
    return prompt.rstrip().endswith(("<think>", "<|channel|>analysis<|message|>"))
