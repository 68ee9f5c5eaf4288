"""Errors about the form of an answer, under the names of the fields that the client sent."""

from collections.abc import Mapping
from typing import Any

from ..api.errors import RequestError
from .fields import FORM, OLD_FORMS


class ToolSchemaError(RequestError):
    """The schema of a tool's arguments, or the form of its text, cannot be kept."""

    def __init__(self, name: str, message: str):
        super().__init__("tools", message)
        self.name = name


def as_sent(error: RequestError, body: Any) -> RequestError:
    """The error with the field of this body that it is about."""
    if not isinstance(body, Mapping):
        return error
    if isinstance(error, ToolSchemaError):
        return RequestError(tool_field(error.name, body), error.message)
    name, _, rest = error.param.partition(".")
    if name != FORM or body.get(FORM) is not None:
        return error
    shape, _, inside = rest.partition(".")  # of `structured_outputs`: json, regex, ...
    field = form_field(body, shape)
    return RequestError(f"{field}.{inside}" if inside else field, error.message) if field else error


def form_field(body: Mapping[str, Any], shape: str) -> str | None:
    """The field of a body that says what form the text has, if it is not `structured_outputs`."""
    for outer, name in ((None, "response_format"), ("text", "format"), ("output_config", "format"), (None, "format")):
        owner = body if outer is None else body.get(outer)
        form = owner.get(name) if isinstance(owner, Mapping) else None
        if form is not None:
            place = name if outer is None else f"{outer}.{name}"
            return place if place == "format" or not isinstance(form, Mapping) else place + schema_place(form)
    return next((old for old, part in OLD_FORMS.items() if shape in ("", part) and body.get(old) is not None), None)


def schema_place(form: Mapping[str, Any]) -> str:
    """Where the schema or the pattern stands in a form of a text."""
    for outer in ("json_schema", "value"):
        if isinstance(form.get(outer), Mapping) and "schema" in form[outer]:
            return f".{outer}.schema"
    return next((f".{name}" for name in ("schema", "value") if name in form), "")


def tool_field(name: str, body: Mapping[str, Any]) -> str:
    """The field of a body that has the schema of a tool."""
    for field in ("tools", "functions"):
        tools = body.get(field)
        for index, tool in enumerate(tools if isinstance(tools, list) else ()):
            for inner in ("function", "custom", ""):
                given = tool.get(inner) if inner and isinstance(tool, Mapping) else tool
                if isinstance(given, Mapping) and given.get("name") == name:
                    place = f"{field}[{index}]" + (f".{inner}" if inner else "")
                    places = ("parameters", "input_schema", "format")
                    return next((f"{place}.{each}" for each in places if each in given), place)
    return "tools"
