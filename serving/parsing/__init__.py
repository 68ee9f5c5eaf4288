"""Parsers of answers: a file for each format of tool calls or thoughts, in FORMS by the names that users give."""

import importlib
from functools import partial

from .parser import Parser, ParserChain
from .reader import Reader

FORMS = {  # name that a user gives -> module
    "deepseek_r1": ".thinking",
    "harmony": ".harmony",
    "hermes": ".hermes",
    "llama3_json": ".llama3_json",
    "mistral": ".mistral",
    "openai": ".harmony",
    "openai_gptoss": ".harmony",
    "qwen3": ".thinking",
}
REASONING_PARSERS = ("deepseek_r1", "openai_gptoss", "qwen3")
TOOL_PARSERS = tuple(name for name in FORMS if name not in REASONING_PARSERS)
# What a chat template shows of the format; the first sign counts.
SIGNS = (
    ("<|channel|>", "openai"),
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", None),  # between the tags of hermes, but no JSON
    ("<arg_key>", None),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("ipython", "llama3_json"),
)


def make_parser(tool_parser: str | None, reasoning_parser: str | None, tools: bool, in_thought: bool = False) -> Parser:
    """A parser for one answer. Without `tools` calls are text; `in_thought` the prompt has opened the thought."""
    tool = module_of("tool parser", tool_parser, TOOL_PARSERS)
    reasoning = module_of("reasoning parser", reasoning_parser, REASONING_PARSERS)
    if ".harmony" in (tool, reasoning):
        if {tool, reasoning} - {".harmony", None}:
            raise ValueError(
                f"the tool parser {tool_parser!r} and the reasoning parser {reasoning_parser!r} do not go together: "
                "harmony is both (openai and openai_gptoss)"
            )
        read = importlib.import_module(".harmony", __name__).read
        return Reader(partial(read, tools=tools, inside=in_thought), keeps_special=True)
    row = []
    if reasoning:
        inside = in_thought or reasoning_parser == "deepseek_r1"  # whose prompts always open it
        row.append(Reader(partial(importlib.import_module(reasoning, __name__).read, inside=inside)))
    if tool and tools:
        module = importlib.import_module(tool, __name__)
        row.append(Reader(module.read, module.KEEPS_SPECIAL))
    return row[0] if len(row) == 1 else ParserChain(row)


def module_of(what: str, name: str | None, known: tuple[str, ...]) -> str | None:
    if name is not None and name not in known:
        raise ValueError(f"the {what} is {name!r}; it can be {', '.join(known)}")
    return None if name is None else FORMS[name]


def detect(chat_template: str) -> tuple[str | None, str | None]:
    """The tool parser and the reasoning parser that a chat template asks for."""
    tool = next((name for sign, name in SIGNS if sign in chat_template), None)
    if tool == "openai":
        return tool, "openai_gptoss"
    return tool, "qwen3" if "</think>" in chat_template or "<think>" in chat_template else None


def opens_thought(prompt: str) -> bool:
    """Whether a prompt ends within a thought, so that the answer begins there."""
    return prompt.rstrip().endswith(("<think>", "<|channel|>analysis<|message|>"))
