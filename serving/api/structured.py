"""What an answer has to look like, checked in form and size; request/grammar.py compiles it."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import RequestError
from .validation import boolean, items, refuse_unknown, shown, unicode_text

FIELD = "structured_outputs"
SHAPES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")  # exactly one of them
SPACING = ("whitespace_pattern", "disable_any_whitespace")  # between the parts of JSON
MAX_SCHEMA = 65_536  # bytes
MAX_GRAMMAR = 16_384  # bytes, of a regex too
MAX_WANTED = 1024  # choices
MAX_CHOICE = 1024  # bytes
MAX_PATTERN = 1024
MAX_TAGS = 128
OWN_SPACING = ("whitespace_pattern", "whitespace_flexible")  # the same within a schema, in its `x-guidance`
OLD_DRAFT = re.compile(r"json-schema\.org/draft-0[0-3]\b")


class ServersGrammar(str):
    """A grammar in Lark's notation that the server wrote, of schemas that were checked before."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What an answer has to look like: exactly one of the shapes, and where its JSON may have white space.

    json: a JSON schema, as an object or as its text.
    regex: a regular expression for the whole answer.
    choice: texts, one of which is the answer.
    grammar: a grammar in Lark's notation.
    json_object: any JSON object.
    structural_tag: tags around JSON in a free text: {"structures": [{"begin", "schema", "end"}], "triggers"}.
    whitespace_pattern: a regular expression for what stands between the parts of JSON.
    disable_any_whitespace: nothing stands between them.
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
        checked_structure(self)


def checked_structure(given: object) -> dict[str, Any]:
    """The one shape that is asked for, and the spacing of JSON; a schema as text, choices as a tuple."""
    if isinstance(given, StructuredOutputsParams):
        given = {name: value for name, value in vars(given).items() if value is not None}
    if not isinstance(given, Mapping):
        raise RequestError(FIELD, f"must be an object with one of {', '.join(SHAPES)}, got {shown(given)}")
    refuse_unknown(given, (*SHAPES, *SPACING), f"{FIELD}.")
    for name in ("json_object", "disable_any_whitespace"):
        if given.get(name) is not None:
            boolean(f"{FIELD}.{name}", given[name])
    asked = {name: value for name, value in given.items() if value is not None and value is not False}
    shapes = [name for name in SHAPES if name in asked]
    if len(shapes) != 1:
        raise RequestError(FIELD, f"must have exactly one of {', '.join(SHAPES)}, got {' and '.join(shapes) or 'none'}")
    (shape,) = shapes
    spacing = [name for name in SPACING if name in asked]
    if spacing and (shape not in ("json", "json_object") or len(spacing) > 1):
        why = "says where JSON has spaces" if len(spacing) == 1 else f"and {spacing[1]} contradict each other"
        raise RequestError(f"{FIELD}.{spacing[0]}", f"{why}; leave it out beside {' and '.join([shape, *spacing[1:]])}")
    found = {name: asked[name] for name in (shape, *spacing)}
    if shape == "json":
        found["json"] = schema(asked["json"])
        if spacing and "x-guidance" in json.loads(found["json"]):
            why = "and the schema's x-guidance say the same; leave one of them out"
            raise RequestError(f"{FIELD}.{spacing[0]}", why)
    elif shape == "choice":
        found["choice"] = choices(asked["choice"])
    elif shape == "structural_tag":
        found["structural_tag"] = tags(asked["structural_tag"])
    elif shape in ("regex", "grammar") and not isinstance(asked[shape], ServersGrammar):
        text(f"{FIELD}.{shape}", asked[shape], MAX_GRAMMAR)
    if "whitespace_pattern" in found:
        text(f"{FIELD}.whitespace_pattern", found["whitespace_pattern"], MAX_PATTERN)
    return found


def text(param: str, value: object, most: int) -> str:
    """`value` as a text of 1 to `most` bytes."""
    found = unicode_text(param, value)
    if not 1 <= len(found.encode()) <= most:
        raise RequestError(param, f"must have 1 to {most} bytes, got {len(found.encode())}")
    return found


def choices(value: object) -> tuple[str, ...]:
    found = items(f"{FIELD}.choice", value, MAX_WANTED)
    if not found:
        raise RequestError(f"{FIELD}.choice", "must have at least one text to choose")
    return tuple(text(f"{FIELD}.choice[{i}]", item, MAX_CHOICE) for i, item in enumerate(found))


def tags(value: object) -> str:
    """Text in which each trigger begins a tag around JSON: [(trigger, begin, schema, end)] as text.

    Given as {"structures": [{"begin", "schema", "end"}], "triggers"}, or as {"format": {"type": "triggered_tags",
    "tags": [{"begin", "content": {"type": "json_schema", "json_schema"}, "end"}], "triggers"}}.
    """
    param = f"{FIELD}.structural_tag"
    if isinstance(value, str):
        try:
            value = json.loads(text(param, value, MAX_SCHEMA))
        except (ValueError, RecursionError) as error:
            raise RequestError(
                param, f"must be a JSON object, or its text: {' '.join(str(error).split()):.100}"
            ) from None
    given = fields_of(param, value, ("type", "structures", "triggers", "format"))
    form, where, name = given, param, "structures"
    if "format" in given:
        where, name = f"{param}.format", "tags"
        form = fields_of(where, given["format"], ("type", "triggers", "tags", "at_least_one", "stop_after_first"))
        if form.get("type") != "triggered_tags":
            raise RequestError(f"{where}.type", f"must be 'triggered_tags', got {shown(form.get('type'))}")
        for flag in ("at_least_one", "stop_after_first"):
            if form.get(flag, False) is not False:
                raise RequestError(f"{where}.{flag}", f"is not implemented, leave it out; got {shown(form[flag])}")
    triggers = [
        text(f"{where}.triggers[{i}]", trigger, MAX_CHOICE)
        for i, trigger in enumerate(items(f"{where}.triggers", form.get("triggers"), MAX_TAGS))
    ]
    found = []
    for i, each in enumerate(items(f"{where}.{name}", form.get(name), MAX_TAGS)):
        place = f"{where}.{name}[{i}]"
        begin, wanted, end = tag_of(place, each, name)
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise RequestError(f"{place}.begin", f"must begin with one of the triggers, got {shown(begin)}")
        found.append((trigger, begin, wanted, end))
    if not found:
        raise RequestError(f"{where}.{name}", "must hold at least one tag")
    return text(param, json.dumps(found), MAX_SCHEMA)


def tag_of(place: str, value: object, name: str) -> tuple[str, Any, str]:
    """(begin, schema, end) of a tag."""
    tag = fields_of(
        place, value, ("begin", "end", "schema") if name == "structures" else ("type", "begin", "end", "content")
    )
    wanted = tag.get("schema", {})
    if name == "tags":
        content = fields_of(f"{place}.content", tag.get("content"), ("type", "json_schema"))
        if content.get("type") != "json_schema":
            raise RequestError(f"{place}.content.type", f"must be 'json_schema', got {shown(content.get('type'))}")
        wanted = content.get("json_schema")
    end = tag.get("end", "")
    if end != "":
        text(f"{place}.end", end, MAX_CHOICE)
    return text(f"{place}.begin", tag.get("begin"), MAX_CHOICE), json.loads(schema(wanted, place)), end


def fields_of(where: str, value: object, known: Sequence[str]) -> dict[str, Any]:
    """The fields of an object that are not null."""
    if not isinstance(value, Mapping):
        raise RequestError(where, f"must be a JSON object, got {shown(value)}")
    refuse_unknown(value, known, f"{where}.")
    return {name: field for name, field in value.items() if field is not None}


def schema(value: object, param: str = f"{FIELD}.json") -> str:
    """A JSON schema, given as an object or as its text, as text."""
    try:
        if isinstance(value, str):
            value = json.loads(text(param, value, MAX_SCHEMA))
        if not isinstance(value, Mapping):
            raise RequestError(param, f"must be a JSON schema, an object or its text, got {shown(value)}")
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RequestError:
        raise
    except (TypeError, ValueError, RecursionError) as error:  # no JSON, a number without end, nested without end
        raise RequestError(param, f"must be a JSON schema: {' '.join(str(error).split()):.100}") from None
    draft = value.get("$schema")
    if isinstance(draft, str) and OLD_DRAFT.search(draft):  # its own words would be passed over
        raise RequestError(f"{param}.$schema", f"must be draft 4 or later, got {shown(draft)}; rewrite the schema")
    check_spacing(f"{param}.x-guidance", value.get("x-guidance", {}))
    return text(param, written, MAX_SCHEMA)


def check_spacing(param: str, given: Any) -> None:
    """What a schema says of its spaces, and nothing else that the grammars' library would read there."""
    found = fields_of(param, given, OWN_SPACING)
    if "whitespace_pattern" in found:
        text(f"{param}.whitespace_pattern", found["whitespace_pattern"], MAX_PATTERN)
    if "whitespace_flexible" in found:
        boolean(f"{param}.whitespace_flexible", found["whitespace_flexible"])
