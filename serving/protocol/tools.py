"""Tools of a request in OpenAI's spellings: what the model is told of them, and which it may or must call.

In chat completions what a tool is stands in a field named as its type, in responses beside the type: here it is flat.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..api.errors import RequestError
from ..api.validation import boolean, refuse_unknown, shown
from .fields import MAX_SCHEMA, text
from .objects import listed, plain, typed

MAX_TOOLS = 128
MAX_NAME = 128
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]+")
KINDS = {"function": ("name", "description", "parameters", "strict"), "custom": ("name", "description", "format")}
FORMATS = {"text": (), "grammar": ("syntax", "definition")}  # of the text that a custom tool takes
SYNTAXES = {"lark": "grammar", "regex": "regex"}
INPUT = "input"  # the one argument of a custom tool, as chat templates and models see it
Custom = dict[str, Mapping[str, Any] | None]  # the forms of the texts that custom tools take, by their names


def flat(where: str, value: Any, kinds: Mapping[str, Sequence[str]], nested: bool) -> tuple[str, dict[str, Any]]:
    """An object of one of these kinds, without its type, and where its fields are."""
    if not nested:
        given = typed(where, value, kinds)
        return where, {name: field for name, field in given.items() if name != "type"}
    kind = typed(where, value, {kind: (kind,) for kind in kinds})["type"]
    return f"{where}.{kind}", plain(f"{where}.{kind}", value.get(kind), kinds[kind])


def parse_tools(value: Any, nested: bool) -> tuple[list[dict[str, Any]], Custom]:
    """Functions that the model may call, as chat templates take them, and which of them are custom tools."""
    tools, custom = [], {}
    for i, tool in enumerate(listed("tools", value, MAX_TOOLS)):
        where, given = flat(f"tools[{i}]", tool, KINDS, nested)
        form = None
        if tool["type"] == "custom":
            given["parameters"], form = parse_format(f"{where}.format", given.pop("format", {"type": "text"}), nested)
        tools.append({"type": "function", "function": parse_function(where, given)})
        if tool["type"] == "custom":
            custom[given["name"]] = form
    return tools, custom


def strict_names(tools: Any) -> frozenset[str]:
    """The functions, of tools that were parsed, whose arguments are to keep to their schemas."""
    flats = [tool.get("function") or tool for tool in tools or []]
    return frozenset(flat["name"] for flat in flats if flat.get("strict") is True and "format" not in flat)


def parse_function(where: str, function: Mapping[str, Any]) -> dict[str, Any]:
    """A function's name, what it does, and the schema of its arguments."""
    refuse_unknown(function, KINDS["function"], f"{where}.")
    name = function.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not TOOL_NAME.fullmatch(name):
        raise RequestError(f"{where}.name", f"must be 1 to {MAX_NAME} letters, digits, _, - and ., got {shown(name)}")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or len(json.dumps(parameters)) > MAX_SCHEMA:
        raise RequestError(
            f"{where}.parameters", f"must be a JSON schema of at most {MAX_SCHEMA} bytes, got {shown(parameters)}"
        )
    if function.get("strict") is not None:
        boolean(f"{where}.strict", function["strict"])
    found = {"name": name, "parameters": dict(parameters)}
    if function.get("description") is not None:
        found["description"] = text(f"{where}.description", function["description"], MAX_SCHEMA)
    return found


def parse_format(where: str, value: Any, nested: bool) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """What a custom tool takes, as the schema of a function that takes a text, and as the form of the text."""
    told: dict[str, Any] = {"type": "string"}
    parameters = {"type": "object", "properties": {INPUT: told}, "required": [INPUT], "additionalProperties": False}
    if isinstance(value, Mapping) and value.get("type") == "text":
        plain(where, value, ("type",))
        return parameters, None
    where, given = flat(where, value, FORMATS, nested)
    syntax = given.get("syntax")
    if not isinstance(syntax, str) or syntax not in SYNTAXES:
        raise RequestError(f"{where}.syntax", f"must be {' or '.join(SYNTAXES)}, got {shown(syntax)}")
    definition = text(f"{where}.definition", given.get("definition"), MAX_SCHEMA)
    told["description"] = f"A text of this form ({syntax}): {definition}"
    return parameters, {SYNTAXES[syntax]: definition}


def parse_choice(value: Any, tools: list[dict[str, Any]], nested: bool) -> tuple[list[dict[str, Any]], str]:
    """The tools that may be called, and `auto`, `none`, `required`, or `function:NAME`."""
    if value is None:
        return tools, "auto"
    if isinstance(value, str) and value in ("auto", "none", "required"):
        if value == "required" and not tools:
            raise RequestError("tool_choice", "is 'required' and tools are missing")
        return tools, value
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "allowed_tools":
        where, given = flat("tool_choice", value, {"allowed_tools": ("mode", "tools")}, nested)
        mode = given.get("mode")
        if mode not in ("auto", "required"):
            raise RequestError(f"{where}.mode", f"must be auto or required, got {shown(mode)}")
        names = {
            named(f"{where}.tools[{i}]", one, tools, nested)
            for i, one in enumerate(listed(f"{where}.tools", given.get("tools"), MAX_TOOLS, least=1))
        }
        return [tool for tool in tools if tool["function"]["name"] in names], mode
    if not isinstance(kind, str) or kind not in KINDS:
        wanted = "auto, none, required or an object of type function, custom or allowed_tools"
        raise RequestError("tool_choice", f"must be {wanted}, got {shown(value)}")
    return tools, f"function:{named('tool_choice', value, tools, nested)}"


def named(where: str, value: Any, tools: list[dict[str, Any]], nested: bool) -> str:
    """The name of one of the tools."""
    where, given = flat(where, value, dict.fromkeys(KINDS, ("name",)), nested)
    return known_name(given.get("name"), f"{where}.name", tools)


def choice_of(name: Any, where: str, tools: list[dict[str, Any]]) -> str:
    """The tool choice that means one function."""
    return f"function:{known_name(name, where, tools)}"


def known_name(name: Any, where: str, tools: list[dict[str, Any]]) -> str:
    if not isinstance(name, str) or name not in [tool["function"]["name"] for tool in tools]:
        raise RequestError(where, f"must be the name of one of the tools, got {shown(name)}")
    return name
