"""Parsing of tools and tool choices in OpenAI's forms.

In chat completions (`nested`) the fields of a tool are in an object named like its type; in
responses they are beside the type.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..api.errors import RequestError
from ..api.validation import boolean, refuse_unknown, shown
from .fields import MAX_SCHEMA, bounded_text
from .objects import parse_list, parse_object, parse_typed_object

MAX_TOOLS = 128
MAX_NAME = 128
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]+")
KINDS = {
    "function": ("name", "description", "parameters", "strict"),
    "custom": ("name", "description", "format"),
}
FORMATS = {"text": (), "grammar": ("syntax", "definition")}  # of a custom tool's input
SYNTAXES = {"lark": "grammar", "regex": "regex"}
INPUT = "input"  # the single argument by which models see a custom tool's text
Custom = dict[str, Mapping[str, Any] | None]  # the formats of custom tools' texts, by tool name


def flat_fields(
    param: str, value: Any, kinds: Mapping[str, Sequence[str]], nested: bool
) -> tuple[str, dict[str, Any]]:
    """The path of a tool's fields, and the fields without the type."""
    if not nested:
        fields = parse_typed_object(param, value, kinds)
        return param, {name: field for name, field in fields.items() if name != "type"}
    kind = parse_typed_object(param, value, {kind: (kind,) for kind in kinds})["type"]
    return f"{param}.{kind}", parse_object(f"{param}.{kind}", value.get(kind), kinds[kind])


def parse_tools(value: Any, nested: bool) -> tuple[list[dict[str, Any]], Custom]:
    """Tools as functions for the chat template, and the formats of the custom tools among them."""
    tools = []
    custom = {}
    for i, tool in enumerate(parse_list("tools", value, MAX_TOOLS)):
        param, fields = flat_fields(f"tools[{i}]", tool, KINDS, nested)
        form = None
        if tool["type"] == "custom":
            fields["parameters"], form = parse_format(
                f"{param}.format", fields.pop("format", {"type": "text"}), nested
            )
        tools.append({"type": "function", "function": parse_function(param, fields)})
        if tool["type"] == "custom":
            custom[fields["name"]] = form
    return tools, custom


def strict_functions(tools: Any) -> frozenset[str]:
    """The names of functions with `strict`, whose arguments must match their schemas."""
    flats = [tool.get("function") or tool for tool in tools or []]
    return frozenset(
        flat["name"] for flat in flats if flat.get("strict") is True and "format" not in flat
    )


def parse_function(param: str, function: Mapping[str, Any]) -> dict[str, Any]:
    """Check a function's name, description and argument schema."""
    refuse_unknown(function, KINDS["function"], f"{param}.")
    name = function.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not TOOL_NAME.fullmatch(name):
        raise RequestError(
            f"{param}.name",
            f"must be 1 to {MAX_NAME} letters, digits, _, - and ., got {shown(name)}",
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or len(json.dumps(parameters)) > MAX_SCHEMA:
        raise RequestError(
            f"{param}.parameters",
            f"must be a JSON schema of at most {MAX_SCHEMA} bytes, got {shown(parameters)}",
        )
    if function.get("strict") is not None:
        boolean(f"{param}.strict", function["strict"])
    parsed = {"name": name, "parameters": dict(parameters)}
    if function.get("description") is not None:
        parsed["description"] = bounded_text(
            f"{param}.description", function["description"], MAX_SCHEMA
        )
    return parsed


def parse_format(
    param: str, value: Any, nested: bool
) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """A custom tool's format as the schema of a function, and as structured outputs."""
    text_schema: dict[str, Any] = {"type": "string"}
    parameters = {
        "type": "object",
        "properties": {INPUT: text_schema},
        "required": [INPUT],
        "additionalProperties": False,
    }
    if isinstance(value, Mapping) and value.get("type") == "text":
        parse_object(param, value, ("type",))
        return parameters, None
    param, fields = flat_fields(param, value, FORMATS, nested)
    syntax = fields.get("syntax")
    if not isinstance(syntax, str) or syntax not in SYNTAXES:
        raise RequestError(
            f"{param}.syntax", f"must be {' or '.join(SYNTAXES)}, got {shown(syntax)}"
        )
    definition = bounded_text(f"{param}.definition", fields.get("definition"), MAX_SCHEMA)
    text_schema["description"] = f"A text of this form ({syntax}): {definition}"
    return parameters, {SYNTAXES[syntax]: definition}


def parse_choice(
    value: Any, tools: list[dict[str, Any]], nested: bool
) -> tuple[list[dict[str, Any]], str]:
    """The callable tools, and `auto`, `none`, `required`, or `function:NAME`."""
    if value is None:
        return tools, "auto"
    if isinstance(value, str) and value in ("auto", "none", "required"):
        if value == "required" and not tools:
            raise RequestError("tool_choice", "is 'required' and tools are missing")
        return tools, value
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "allowed_tools":
        param, fields = flat_fields(
            "tool_choice", value, {"allowed_tools": ("mode", "tools")}, nested
        )
        mode = fields.get("mode")
        if mode not in ("auto", "required"):
            raise RequestError(f"{param}.mode", f"must be auto or required, got {shown(mode)}")
        names = {
            parse_tool_name(f"{param}.tools[{i}]", tool, tools, nested)
            for i, tool in enumerate(
                parse_list(f"{param}.tools", fields.get("tools"), MAX_TOOLS, minimum=1)
            )
        }
        return [tool for tool in tools if tool["function"]["name"] in names], mode
    if not isinstance(kind, str) or kind not in KINDS:
        expected = "auto, none, required or an object of type function, custom or allowed_tools"
        raise RequestError("tool_choice", f"must be {expected}, got {shown(value)}")
    return tools, f"function:{parse_tool_name('tool_choice', value, tools, nested)}"


def parse_tool_name(param: str, value: Any, tools: list[dict[str, Any]], nested: bool) -> str:
    """The name in an object that refers to one of the tools."""
    param, fields = flat_fields(param, value, dict.fromkeys(KINDS, ("name",)), nested)
    return check_tool_name(fields.get("name"), f"{param}.name", tools)


def function_choice(name: Any, param: str, tools: list[dict[str, Any]]) -> str:
    """The tool choice of one function."""
    return f"function:{check_tool_name(name, param, tools)}"


def check_tool_name(name: Any, param: str, tools: list[dict[str, Any]]) -> str:
    if not isinstance(name, str) or name not in [tool["function"]["name"] for tool in tools]:
        raise RequestError(param, f"must be the name of one of the tools, got {shown(name)}")
    return name
