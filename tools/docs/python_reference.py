"""The Python reference: signatures and docstrings of the exports of `quire`, and of the classes
that they return.
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
RETURNED = {  # classes of results, which are not exported because users do not construct them
    name: exported_class
    for module in (outputs, search)
    for name, exported_class in vars(module).items()
    if is_dataclass(exported_class)
    and exported_class.__module__ == module.__name__
    and name not in ("CompletionDelta", "SearchParams")
}
# Methods for internal use, left out of the reference.
INTERNAL = {"turn", "run", "step", "add", "ask", "call", "chat_prompt", "or_default"}
INTERNAL_OF = {"LLM": INTERNAL | {"abort"}, "AsyncLLM": INTERNAL}
PREFIXES = re.compile(r"\b(?:quire|collections|typing|pathlib)\.(?:[a-z_]+\.)*(?=[A-Z])")
ENTRY = re.compile(r"^(\w+): (.+)$")
COMMENTED = re.compile(r"^    (\w+)(?::| =).*?  # (.+)$", re.MULTILINE)
WIDTH = 100


def heading_for(name: str) -> str:
    """The heading under which a name is listed."""
    if name in ENGINES:
        return "Engines"
    if name.endswith(("Params", "Prompt", "Kind")):
        return "What a request asks for"
    return "Errors" if name.endswith("Error") else "What comes back"


def python_page() -> str:
    exported = {
        name: getattr(import_module(module, "quire"), name) for name, module in EXPORTS.items()
    }
    names = exported | {
        name: returned_class for name, returned_class in RETURNED.items() if name not in exported
    }
    groups: dict[str, list[str]] = {
        "Engines": [],
        "What a request asks for": [],
        "What comes back": [],
        "Errors": [],
    }
    for name in [*ENGINES, *sorted(names.keys() - set(ENGINES))]:
        groups[heading_for(name)].append(name)
    paragraphs = [
        "# Python",
        (
            "`from quire import ...` has all of these but those marked *returned*. A `Prompt` is a "
            "text, a list of token ids, a `TextPrompt` or a `TokensPrompt`. [From "
            "Python](../offline.md) shows them at work."
        ),
    ]
    for group, members in groups.items():
        paragraphs.append(f"## {group}")
        for name in members:
            paragraphs.append(f"### {name}" + ("" if name in exported else "\n\n*returned*"))
            paragraphs += describe_export(name, names[name])
    return "\n\n".join(paragraphs) + "\n"


def describe_export(name: str, member: Any) -> Iterator[str]:
    if inspect.isfunction(member):
        yield from describe_function(name, member)
        return
    description, entries = parse_docstring(member)
    yield description
    if rows := list(member_rows(member, entries)):
        yield table(("", "type", "default", ""), rows)
    if name == "LLM":
        rows = [
            (
                code(argument.name),
                code(type_text(argument.type)),
                code(default_text(argument)),
                cell(field_help(argument)),
            )
            for argument in fields(Arguments)
        ]
        yield table(("argument", "type", "default", ""), rows)
    if name == "AsyncLLM":
        yield "Its arguments are those of [LLM](#llm)."
    for inner, method in vars(member).items():
        is_public_method = (
            inspect.isfunction(method)
            and inner == method.__name__
            and inner not in INTERNAL_OF.get(name, ())
        )
        if is_public_method and not inner.startswith("_") and inspect.getdoc(method):
            yield f"#### {name}.{inner}"
            yield from describe_function(f"{name}.{inner}", method)


def describe_function(name: str, callable_object: Any) -> Iterator[str]:
    """Yield the signature as in the source, the docstring, and a table of its entries."""
    node = ast.parse(textwrap.dedent(inspect.getsource(callable_object))).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    node.args.args = [argument for argument in node.args.args if argument.arg != "self"]
    arguments = ast.unparse(node.args).replace("Seq[", "Sequence[").replace("=", " = ")
    result = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    start = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    line = f"{start}{name}({arguments}){result}"
    if len(line) > WIDTH:
        parameters = re.split(r", (?=\*|\w+:)", arguments)
        line = (
            f"{start}{name}(\n"
            + "".join(f"    {parameter},\n" for parameter in parameters)
            + f"){result}"
        )
    yield f"```python\n{line}\n```"
    description, entries = parse_docstring(callable_object)
    yield description
    if entries:
        yield table(("", ""), [(code(argument), cell(text)) for argument, text in entries.items()])


def parse_docstring(documented: Any) -> tuple[str, dict[str, str]]:
    """Split a docstring into (text, descriptions by name from lines such as `name:
    description`).
    """
    lines = []
    entries = {}
    for line in (inspect.getdoc(documented) or "").splitlines():
        if match := ENTRY.match(line):
            entries[match[1]] = match[2]
        else:
            lines.append(line)
    return "\n".join(lines).strip(), entries


def member_rows(owner: Any, entries: dict[str, str]) -> Iterator[tuple[str, str, str, str]]:
    """(name, type, default, description) of fields, enum values and properties."""
    comments = dict(COMMENTED.findall(inspect.getsource(owner)))
    if is_dataclass(owner):
        for entry in fields(owner):
            description = (
                entries.get(entry.name) or field_help(entry) or comments.get(entry.name, "")
            )
            yield (
                code(entry.name),
                code(type_text(entry.type)),
                code(default_text(entry)),
                cell(description),
            )
    elif issubclass(owner, enum.Enum):
        for value in owner:
            yield code(value.name), "", "", cell(comments.get(value.name, ""))
    elif issubclass(owner, dict):
        for entry, type_ in owner.__annotations__.items():
            yield code(entry), code(type_text(type_)), "", cell(comments.get(entry, ""))
    for entry, value in vars(owner).items():
        if isinstance(value, property):
            returns = value.fget.__annotations__.get("return", "") if value.fget else ""
            yield (
                code(entry),
                code(type_text(returns) if returns else ""),
                "",
                cell(parse_docstring(value)[0]),
            )


def type_text(type_: Any) -> str:
    return PREFIXES.sub("", type_ if isinstance(type_, str) else inspect.formatannotation(type_))


def default_text(class_field: Any) -> str:
    if class_field.default is not MISSING:
        return (
            PREFIXES.sub("", repr(class_field.default))
            if len(repr(class_field.default)) < 40
            else f"{type(class_field.default).__name__}(...)"
        )
    return (
        ""
        if class_field.default_factory is MISSING
        else f"{getattr(class_field.default_factory, '__name__', '')}()"
    )


def field_help(class_field: Any) -> str:
    """The help text in a field's metadata, with its default."""
    help_text = class_field.metadata.get("help") or ""
    text = class_field.metadata.get("default_text")
    return f"{help_text} Not given: {text}." if text else help_text
