"""Parsing of JSON objects and lists inside a request's body."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..api.errors import RequestError
from ..api.validation import refuse_unknown, shown, unicode_text

Kinds = Mapping[str, Sequence[str]]  # the fields of each `type` of object, without `type` itself
INDEX = re.compile(r"\[\d+\]")
PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def parse_object(param: str, value: Any, names: Sequence[str]) -> dict[str, Any]:
    """The non-null fields of an object; a field that is not in `names` is an error."""
    if not isinstance(value, Mapping):
        raise RequestError(param, f"must be a JSON object, got {shown(value)}")
    fields = {name: field for name, field in value.items() if field is not None}
    refuse_unknown(fields, names, f"{param}.")
    return fields


def keep_known_fields(
    param: str, fields: Mapping[str, Any], names: Sequence[str], ignored: set[str]
) -> dict[str, Any]:
    """Drop unknown fields of a message, and add their names to `ignored`."""
    pattern = INDEX.sub("[]", param)
    ignored |= {
        f"{pattern}.{name if PLAIN_NAME.fullmatch(str(name)) else '?'}"
        for name in fields
        if name not in names
    }
    return {name: value for name, value in fields.items() if name in names}


def parse_message_fields(
    param: str, value: Any, names: Sequence[str], ignored: set[str]
) -> dict[str, Any]:
    """The known non-null fields of a message; unknown ones are added to `ignored`."""
    if not isinstance(value, Mapping):
        raise RequestError(param, f"must be a JSON object, got {shown(value)}")
    return keep_known_fields(
        param, {name: field for name, field in value.items() if field is not None}, names, ignored
    )


def parse_typed_object(param: str, value: Any, kinds: Kinds) -> dict[str, Any]:
    """As `parse_object`, for an object whose `type` determines its fields."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise RequestError(
            f"{param}.type", f"must be {' or '.join(kinds)}, got {shown(kind if kind else value)}"
        )
    return parse_object(param, value, ("type", *kinds[kind]))


def parse_list(param: str, value: Any, maximum: int, minimum: int = 0) -> list[Any]:
    if not isinstance(value, list) or not minimum <= len(value) <= maximum:
        received = f"{len(value)} of them" if isinstance(value, list) else shown(value)
        raise RequestError(param, f"must be a list of {minimum} to {maximum}, got {received}")
    return value


def join_texts(param: str, value: Any, kinds: Kinds, max_parts: int) -> str:
    """A string, or the parts of a list joined by newlines.

    A part's text is the first field of its kind.
    """
    if not isinstance(value, list):
        return unicode_text(param, value)
    lines = []
    for i, content_part in enumerate(parse_list(param, value, max_parts)):
        fields = parse_typed_object(f"{param}[{i}]", content_part, kinds)
        name = kinds[fields["type"]][0]
        lines.append(unicode_text(f"{param}[{i}].{name}", fields.get(name)))
    return "\n".join(lines)
