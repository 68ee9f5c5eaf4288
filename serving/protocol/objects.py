"""JSON objects inside the body of a request: their fields are known, and their `type` says which those are."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..api.errors import RequestError
from ..api.validation import refuse_unknown, shown, unicode_text

Kinds = Mapping[str, Sequence[str]]  # the fields of each type of object, beside `type`
INDEX = re.compile(r"\[\d+\]")
PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def plain(where: str, value: Any, names: Sequence[str]) -> dict[str, Any]:
    """The fields of an object that are not null; all are known."""
    if not isinstance(value, Mapping):
        raise RequestError(where, f"must be a JSON object, got {shown(value)}")
    given = {name: field for name, field in value.items() if field is not None}
    refuse_unknown(given, names, f"{where}.")
    return given


def known_of(where: str, given: Mapping[str, Any], names: Sequence[str], ignored: set[str]) -> dict[str, Any]:
    """The fields of a message that are known here; the names of others, which other servers know, go into `ignored`."""
    place = INDEX.sub("[]", where)
    ignored |= {f"{place}.{name if PLAIN_NAME.fullmatch(str(name)) else '?'}" for name in given if name not in names}
    return {name: value for name, value in given.items() if name in names}


def message_of(where: str, value: Any, names: Sequence[str], ignored: set[str]) -> dict[str, Any]:
    """The known fields of a message that are not null."""
    if not isinstance(value, Mapping):
        raise RequestError(where, f"must be a JSON object, got {shown(value)}")
    return known_of(where, {name: field for name, field in value.items() if field is not None}, names, ignored)


def typed(where: str, value: Any, kinds: Kinds) -> dict[str, Any]:
    """The same for an object of one of several types."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise RequestError(f"{where}.type", f"must be {' or '.join(kinds)}, got {shown(kind if kind else value)}")
    return plain(where, value, ("type", *kinds[kind]))


def listed(where: str, value: Any, most: int, least: int = 0) -> list[Any]:
    if not isinstance(value, list) or not least <= len(value) <= most:
        got = f"{len(value)} of them" if isinstance(value, list) else shown(value)
        raise RequestError(where, f"must be a list of {least} to {most}, got {got}")
    return value


def texts(where: str, value: Any, kinds: Kinds, most: int) -> str:
    """A text, or the lines of its parts; what a part says stands in the first field of its kind."""
    if not isinstance(value, list):
        return unicode_text(where, value)
    lines = []
    for i, part in enumerate(listed(where, value, most)):
        given = typed(f"{where}[{i}]", part, kinds)
        name = kinds[given["type"]][0]
        lines.append(unicode_text(f"{where}[{i}].{name}", given.get(name)))
    return "\n".join(lines)
