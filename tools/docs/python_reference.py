"""The Python reference: signatures and docstrings of what `quire` exports, and of what that
returns.
"""

import ast
import enum
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from typing import Any

from quire import EXPORTS
from quire.serving import search
from quire.serving.api import outputs
from quire.serving.llm import Arguments

from .tables import cell, code, table

ENGINES = ["LLM", "AsyncLLM", "follow"]
RETURNED = {  # not exported, since nobody makes one
    name: made
    for module in (outputs, search)
    for name, made in vars(module).items()
    if is_dataclass(made)
    and made.__module__ == module.__name__
    and name not in ("CompletionDelta", "SearchParams")
}
# What the engine's own code calls.
INTERNAL = {"turn", "run", "step", "add", "ask", "call", "chat_prompt", "or_default"}
INTERNAL_OF = {"LLM": INTERNAL | {"abort"}, "AsyncLLM": INTERNAL}
PREFIXES = re.compile(r"\b(?:quire|collections|typing|pathlib)\.(?:[a-z_]+\.)*(?=[A-Z])")
ENTRY = re.compile(r"^(\w+): (.+)$")
COMMENTED = re.compile(r"^    (\w+)(?::| =).*?  # (.+)$", re.MULTILINE)
WIDTH = 100


def kind_of(name: str) -> str:
    """The heading that a name stands under."""
    if name in ENGINES:
        return "Engines"
    if name.endswith(("Params", "Prompt", "Kind")):
        return "What a request asks for"
    return "Errors" if name.endswith("Error") else "What comes back"


def python_page() -> str:
    exported = {
        name: getattr(import_module(module, "quire"), name) for name, module in EXPORTS.items()
    }
    names = exported | {name: made for name, made in RETURNED.items() if name not in exported}
    groups: dict[str, list[str]] = {
        "Engines": [],
        "What a request asks for": [],
        "What comes back": [],
        "Errors": [],
    }
    for name in [*ENGINES, *sorted(names.keys() - set(ENGINES))]:
        groups[kind_of(name)].append(name)
    parts = [
        "# Python",
        (
            "`from quire import ...` has all of these but those marked *returned*. A `Prompt` is a "
            "text, a list of token ids, a `TextPrompt` or a `TokensPrompt`. [From "
            "Python](../offline.md) shows them at work."
        ),
    ]
    for group, members in groups.items():
        parts.append(f"## {group}")
        for name in members:
            parts.append(f"### {name}" + ("" if name in exported else "\n\n*returned*"))
            parts += described(name, names[name])
    return "\n\n".join(parts) + "\n"


def described(name: str, made: Any) -> Iterator[str]:
    if inspect.isfunction(made):
        yield from function(name, made)
        return
    said, entries = docstring(made)
    yield said
    if rows := list(members(made, entries)):
        yield table(("", "type", "default", ""), rows)
    if name == "LLM":
        rows = [
            (code(each.name), code(kind(each.type)), code(default(each)), cell(about(each)))
            for each in fields(Arguments)
        ]
        yield table(("argument", "type", "default", ""), rows)
    if name == "AsyncLLM":
        yield "Its arguments are those of [LLM](#llm)."
    for inner, method in vars(made).items():
        own = (
            inspect.isfunction(method)
            and inner == method.__name__
            and inner not in INTERNAL_OF.get(name, ())
        )
        if own and not inner.startswith("_") and inspect.getdoc(method):
            yield f"#### {name}.{inner}"
            yield from function(f"{name}.{inner}", method)


def function(name: str, made: Any) -> Iterator[str]:
    """A signature as it is written, and what is said of it."""
    node = ast.parse(textwrap.dedent(inspect.getsource(made))).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    node.args.args = [each for each in node.args.args if each.arg != "self"]
    arguments = ast.unparse(node.args).replace("Seq[", "Sequence[").replace("=", " = ")
    result = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    start = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    line = f"{start}{name}({arguments}){result}"
    if len(line) > WIDTH:
        parts = re.split(r", (?=\*|\w+:)", arguments)
        line = f"{start}{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"
    yield f"```python\n{line}\n```"
    said, entries = docstring(made)
    yield said
    if entries:
        yield table(("", ""), [(code(each), cell(text)) for each, text in entries.items()])


def docstring(made: Any) -> tuple[str, dict[str, str]]:
    """What is said, and what is said of each name."""
    lines = []
    entries = {}
    for line in (inspect.getdoc(made) or "").splitlines():
        if match := ENTRY.match(line):
            entries[match[1]] = match[2]
        else:
            lines.append(line)
    return "\n".join(lines).strip(), entries


def members(made: Any, entries: dict[str, str]) -> Iterator[tuple[str, str, str, str]]:
    """(name, type, default, what it is) of fields, properties and values."""
    comments = dict(COMMENTED.findall(inspect.getsource(made)))
    if is_dataclass(made):
        for each in fields(made):
            said = entries.get(each.name) or about(each) or comments.get(each.name, "")
            yield code(each.name), code(kind(each.type)), code(default(each)), cell(said)
    elif isinstance(made, enum.EnumMeta):
        for value in made:
            yield code(value.name), "", "", cell(comments.get(value.name, ""))
    elif issubclass(made, dict):
        for each, type_ in made.__annotations__.items():
            yield code(each), code(kind(type_)), "", cell(comments.get(each, ""))
    for each, value in vars(made).items():
        if isinstance(value, property):
            returns = value.fget.__annotations__.get("return", "") if value.fget else ""
            yield code(each), code(kind(returns) if returns else ""), "", cell(docstring(value)[0])


def kind(type_: Any) -> str:
    return PREFIXES.sub("", type_ if isinstance(type_, str) else inspect.formatannotation(type_))


def default(each: Any) -> str:
    if each.default is not MISSING:
        return (
            PREFIXES.sub("", repr(each.default))
            if len(repr(each.default)) < 40
            else f"{type(each.default).__name__}(...)"
        )
    return (
        ""
        if each.default_factory is MISSING
        else f"{getattr(each.default_factory, '__name__', '')}()"
    )


def about(each: Any) -> str:
    """What a field's declaration says of it."""
    said = each.metadata.get("help") or ""
    text = each.metadata.get("default_text")
    return f"{said} Not given: {text}." if text else said
