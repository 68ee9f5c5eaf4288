"""Errors about structured outputs and tools, renamed to the fields that the client sent."""

from collections.abc import Mapping
from typing import Any

from ..api.errors import RequestError
from .fields import GUIDED_FIELDS, STRUCTURED_OUTPUTS


class ToolSchemaError(RequestError):
    """The schema or grammar of a tool cannot be compiled; `name` is the tool's, or ""."""

    def __init__(self, name: str, message: str):
        super().__init__("tools", message)
        self.name = name


def as_sent(error: RequestError, body: Any) -> RequestError:
    """Rename the error's field to the one in this body that caused it."""
    if not isinstance(body, Mapping):
        return error
    if isinstance(error, ToolSchemaError):
        return RequestError(tool_field(error.name, body), error.message)
    name, _, path = error.param.partition(".")
    if name != STRUCTURED_OUTPUTS or body.get(STRUCTURED_OUTPUTS) is not None:
        return error
    option, _, inner_path = path.partition(".")  # a key of structured_outputs: json, regex, ...
    field = form_field(body, option)
    return (
        RequestError(f"{field}.{inner_path}" if inner_path else field, error.message)
        if field
        else error
    )


def form_field(body: Mapping[str, Any], option: str) -> str | None:
    """The field of a body that has the text format, if it is not `structured_outputs`."""
    for parent, name in (
        (None, "response_format"),
        ("text", "format"),
        ("output_config", "format"),
        (None, "format"),
    ):
        owner = body if parent is None else body.get(parent)
        form = owner.get(name) if isinstance(owner, Mapping) else None
        if form is not None:
            path = name if parent is None else f"{parent}.{name}"
            return (
                path
                if path == "format" or not isinstance(form, Mapping)
                else path + schema_path(form)
            )
    return next(
        (
            old
            for old, guided_option in GUIDED_FIELDS.items()
            if option in ("", guided_option) and body.get(old) is not None
        ),
        None,
    )


def schema_path(form: Mapping[str, Any]) -> str:
    """The path of the schema or the pattern in a text format."""
    for parent in ("json_schema", "value"):
        if isinstance(form.get(parent), Mapping) and "schema" in form[parent]:
            return f".{parent}.schema"
    return next((f".{name}" for name in ("schema", "value") if name in form), "")


def tool_field(name: str, body: Mapping[str, Any]) -> str:
    """The field of a body that has the schema of the tool called `name`."""
    for field in ("tools", "functions"):
        tools = body.get(field)
        for index, tool in enumerate(tools if isinstance(tools, list) else ()):
            for inner in ("function", "custom", ""):
                definition = tool.get(inner) if inner and isinstance(tool, Mapping) else tool
                if isinstance(definition, Mapping) and definition.get("name") == name:
                    path = f"{field}[{index}]" + (f".{inner}" if inner else "")
                    keys = ("parameters", "input_schema", "format")
                    return next((f"{path}.{key}" for key in keys if key in definition), path)
    return "tools"
