"""Checks of `structured_outputs` for form and size; request/grammar.py compiles them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import RequestError
from .validation import boolean, items, refuse_unknown, shown, unicode_text

FIELD = "structured_outputs"
# Exactly one of them is given.
SHAPES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
SPACING = ("whitespace_pattern", "disable_any_whitespace")  # white space in JSON
MAX_SCHEMA = 65_536  # bytes
MAX_GRAMMAR = 16_384  # bytes, also of a regex
MAX_CHOICES = 1024  # choices
MAX_CHOICE = 1024  # bytes
MAX_PATTERN = 1024
MAX_TAGS = 128
# The same options in the `x-guidance` of a schema.
SCHEMA_SPACING = ("whitespace_pattern", "whitespace_flexible")
OLD_DRAFT = re.compile(r"json-schema\.org/draft-0[0-3]\b")


class ServersGrammar(str):
    """A grammar in Lark that the server wrote from schemas that are checked already."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The required form of an answer: exactly one shape, and where its JSON may have white space.

    json: a JSON schema, as an object or as its text.
    regex: a regular expression for the whole answer.
    choice: texts, one of which is the answer.
    grammar: a grammar in Lark's notation.
    json_object: any JSON object.
    structural_tag: JSON in a text: {"structures": [{"begin", "schema", "end"}], "triggers"}.
    whitespace_pattern: a regular expression for white space between the elements of JSON.
    disable_any_whitespace: no white space between them.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None

    def __post_init__(self):
        check_structure(self)


def check_structure(structure: object) -> dict[str, Any]:
    """Return the requested shape and the spacing of JSON; schemas as text, choices as a tuple."""
    if isinstance(structure, StructuredOutputsParams):
        structure = {name: value for name, value in vars(structure).items() if value is not None}
    if not isinstance(structure, Mapping):
        raise RequestError(
            FIELD, f"must be an object with one of {', '.join(SHAPES)}, got {shown(structure)}"
        )
    refuse_unknown(structure, (*SHAPES, *SPACING), f"{FIELD}.")
    for name in ("json_object", "disable_any_whitespace"):
        if structure.get(name) is not None:
            boolean(f"{FIELD}.{name}", structure[name])
    requested = {
        name: value for name, value in structure.items() if value is not None and value is not False
    }
    shapes = [name for name in SHAPES if name in requested]
    if len(shapes) != 1:
        raise RequestError(
            FIELD,
            f"must have exactly one of {', '.join(SHAPES)}, got {' and '.join(shapes) or 'none'}",
        )
    (shape,) = shapes
    spacing = [name for name in SPACING if name in requested]
    if spacing and (shape not in ("json", "json_object") or len(spacing) > 1):
        reason = (
            "says where JSON has spaces"
            if len(spacing) == 1
            else f"and {spacing[1]} contradict each other"
        )
        raise RequestError(
            f"{FIELD}.{spacing[0]}",
            f"{reason}; leave it out beside {' and '.join([shape, *spacing[1:]])}",
        )
    checked = {name: requested[name] for name in (shape, *spacing)}
    if shape == "json":
        checked["json"] = checked_schema(requested["json"])
        if spacing and "x-guidance" in json.loads(checked["json"]):
            reason = "and the schema's x-guidance say the same; leave one of them out"
            raise RequestError(f"{FIELD}.{spacing[0]}", reason)
    elif shape == "choice":
        checked["choice"] = checked_choices(requested["choice"])
    elif shape == "structural_tag":
        checked["structural_tag"] = parse_tags(requested["structural_tag"])
    elif shape in ("regex", "grammar") and not isinstance(requested[shape], ServersGrammar):
        bounded_text(f"{FIELD}.{shape}", requested[shape], MAX_GRAMMAR)
    if "whitespace_pattern" in checked:
        bounded_text(f"{FIELD}.whitespace_pattern", checked["whitespace_pattern"], MAX_PATTERN)
    return checked


def bounded_text(param: str, value: object, max_bytes: int) -> str:
    """Return `value` as a text of 1 to `max_bytes` bytes."""
    checked = unicode_text(param, value)
    if not 1 <= len(checked.encode()) <= max_bytes:
        raise RequestError(param, f"must have 1 to {max_bytes} bytes, got {len(checked.encode())}")
    return checked


def checked_choices(value: object) -> tuple[str, ...]:
    options = items(f"{FIELD}.choice", value, MAX_CHOICES)
    if not options:
        raise RequestError(f"{FIELD}.choice", "must have at least one text to choose")
    return tuple(
        bounded_text(f"{FIELD}.choice[{i}]", item, MAX_CHOICE) for i, item in enumerate(options)
    )


def parse_tags(value: object) -> str:
    """Return [(trigger, begin, schema, end)] as JSON text: each trigger starts a tag around JSON.

    The value is {"structures": [{"begin", "schema", "end"}], "triggers"} or {"format": {"type":
    "triggered_tags", "tags": [{"begin", "content": {"type": "json_schema", "json_schema"}, "end"}],
    "triggers"}}.
    """
    param = f"{FIELD}.structural_tag"
    if isinstance(value, str):
        try:
            value = json.loads(bounded_text(param, value, MAX_SCHEMA))
        except (ValueError, RecursionError) as error:
            raise RequestError(
                param, f"must be a JSON object, or its text: {' '.join(str(error).split()):.100}"
            ) from None
    fields = checked_fields(param, value, ("type", "structures", "triggers", "format"))
    form = fields
    path = param
    name = "structures"
    if "format" in fields:
        path = f"{param}.format"
        name = "tags"
        form = checked_fields(
            path, fields["format"], ("type", "triggers", "tags", "at_least_one", "stop_after_first")
        )
        if form.get("type") != "triggered_tags":
            raise RequestError(
                f"{path}.type", f"must be 'triggered_tags', got {shown(form.get('type'))}"
            )
        for flag in ("at_least_one", "stop_after_first"):
            if form.get(flag, False) is not False:
                raise RequestError(
                    f"{path}.{flag}", f"is not implemented, leave it out; got {shown(form[flag])}"
                )
    triggers = [
        bounded_text(f"{path}.triggers[{i}]", trigger, MAX_CHOICE)
        for i, trigger in enumerate(items(f"{path}.triggers", form.get("triggers"), MAX_TAGS))
    ]
    tags = []
    for i, tag in enumerate(items(f"{path}.{name}", form.get(name), MAX_TAGS)):
        tag_path = f"{path}.{name}[{i}]"
        begin, tag_schema, end = parse_tag(tag_path, tag, name)
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise RequestError(
                f"{tag_path}.begin", f"must begin with one of the triggers, got {shown(begin)}"
            )
        tags.append((trigger, begin, tag_schema, end))
    if not tags:
        raise RequestError(f"{path}.{name}", "must hold at least one tag")
    return bounded_text(param, json.dumps(tags), MAX_SCHEMA)


def parse_tag(path: str, value: object, name: str) -> tuple[str, Any, str]:
    """Return (begin, schema, end) of a tag."""
    tag = checked_fields(
        path,
        value,
        ("begin", "end", "schema") if name == "structures" else ("type", "begin", "end", "content"),
    )
    tag_schema = tag.get("schema", {})
    if name == "tags":
        content = checked_fields(f"{path}.content", tag.get("content"), ("type", "json_schema"))
        if content.get("type") != "json_schema":
            raise RequestError(
                f"{path}.content.type", f"must be 'json_schema', got {shown(content.get('type'))}"
            )
        tag_schema = content.get("json_schema")
    end = tag.get("end", "")
    if end != "":
        bounded_text(f"{path}.end", end, MAX_CHOICE)
    return (
        bounded_text(f"{path}.begin", tag.get("begin"), MAX_CHOICE),
        json.loads(checked_schema(tag_schema, path)),
        end,
    )


def checked_fields(path: str, value: object, known_names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of an object that are not null."""
    if not isinstance(value, Mapping):
        raise RequestError(path, f"must be a JSON object, got {shown(value)}")
    refuse_unknown(value, known_names, f"{path}.")
    return {name: field for name, field in value.items() if field is not None}


def checked_schema(value: object, param: str = f"{FIELD}.json") -> str:
    """Return a JSON schema, given as an object or as text, as text."""
    try:
        if isinstance(value, str):
            value = json.loads(bounded_text(param, value, MAX_SCHEMA))
        if not isinstance(value, Mapping):
            raise RequestError(
                param, f"must be a JSON schema, an object or its text, got {shown(value)}"
            )
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RequestError:
        raise
    except (
        TypeError,
        ValueError,
        RecursionError,
    ) as error:  # not JSON, infinite numbers, or unbounded nesting
        raise RequestError(
            param, f"must be a JSON schema: {' '.join(str(error).split()):.100}"
        ) from None
    draft = value.get("$schema")
    if isinstance(draft, str) and OLD_DRAFT.search(draft):  # its keywords would be ignored
        raise RequestError(
            f"{param}.$schema", f"must be draft 4 or later, got {shown(draft)}; rewrite the schema"
        )
    check_spacing(f"{param}.x-guidance", value.get("x-guidance", {}))
    return bounded_text(param, written, MAX_SCHEMA)


def check_spacing(param: str, options: Any) -> None:
    """Check the spacing options of a schema; llguidance would accept further keys there."""
    checked = checked_fields(param, options, SCHEMA_SPACING)
    if "whitespace_pattern" in checked:
        bounded_text(f"{param}.whitespace_pattern", checked["whitespace_pattern"], MAX_PATTERN)
    if "whitespace_flexible" in checked:
        boolean(f"{param}.whitespace_flexible", checked["whitespace_flexible"])
