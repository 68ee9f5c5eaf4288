"""Parsing of OpenAI's /v1/conversations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..api.errors import RequestError
from ..api.validation import shown
from .conversation import Conversation
from .fields import known_fields
from .objects import parse_list
from .responses import add_items, input_items

FIELDS = ("items", "metadata")
ITEMS = ("items",)
MAX_ITEMS = 20  # in one request
MAX_METADATA = 16
MAX_KEY = 64  # characters
MAX_VALUE = 512


@dataclass(frozen=True)
class ConversationRequest:
    """Items and metadata for a conversation."""

    items: list[dict[str, Any]] = field(default_factory=list)
    metadata: Mapping[str, str] = field(default_factory=dict)


def parse(body: Any) -> ConversationRequest:
    fields = known_fields(body, FIELDS, {})
    return ConversationRequest(
        parse_new_items(fields.get("items", [])), parse_metadata(fields.get("metadata", {}))
    )


def parse_update(body: Any) -> ConversationRequest:
    return ConversationRequest(
        metadata=parse_metadata(known_fields(body, ("metadata",), {}).get("metadata", {}))
    )


def parse_items(body: Any) -> ConversationRequest:
    fields = known_fields(body, ITEMS, {})
    return ConversationRequest(
        parse_new_items(parse_list("items", fields.get("items"), MAX_ITEMS, minimum=1))
    )


def parse_new_items(value: Any) -> list[dict[str, Any]]:
    """Check new items; the result of a call may belong to a call that is stored already."""
    items = parse_list("items", value, MAX_ITEMS)
    for i, item in enumerate(items):
        talk = Conversation()
        if isinstance(item, Mapping) and isinstance(call_id := item.get("call_id"), str):
            talk.called[call_id] = ""
        add_items(talk, f"items[{i}]", [item], set())
    return input_items(items)


def parse_metadata(value: Any) -> Mapping[str, str]:
    is_small = isinstance(value, Mapping) and len(value) <= MAX_METADATA
    if not is_small or not all(
        isinstance(text, str) and len(name) <= MAX_KEY and len(text) <= MAX_VALUE
        for name, text in value.items()
    ):
        expected = f"at most {MAX_METADATA} names of {MAX_KEY} characters with texts of {MAX_VALUE}"
        raise RequestError("metadata", f"must be {expected}, got {shown(value)}")
    return value
