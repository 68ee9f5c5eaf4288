"""OpenAI's /v1/conversations: bodies to requests."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..api.errors import RequestError
from ..api.validation import shown
from .conversation import Conversation
from .fields import known_fields
from .objects import listed
from .responses import add_items, items_of

FIELDS = ("items", "metadata")
ITEMS = ("items",)
MAX_ITEMS = 20  # at once
MAX_METADATA = 16
MAX_KEY, MAX_VALUE = 64, 512  # characters


@dataclass(frozen=True)
class ConversationRequest:
    """Items for a conversation, and what its maker notes beside it."""

    items: list[dict[str, Any]] = field(default_factory=list)
    metadata: Mapping[str, str] = field(default_factory=dict)


def parse(body: Any) -> ConversationRequest:
    given = known_fields(body, FIELDS, {})
    return ConversationRequest(parsed_items(given.get("items", [])), metadata_of(given.get("metadata", {})))


def parse_update(body: Any) -> ConversationRequest:
    return ConversationRequest(metadata=metadata_of(known_fields(body, ("metadata",), {}).get("metadata", {})))


def parse_items(body: Any) -> ConversationRequest:
    given = known_fields(body, ITEMS, {})
    return ConversationRequest(parsed_items(listed("items", given.get("items"), MAX_ITEMS, least=1)))


def parsed_items(value: Any) -> list[dict[str, Any]]:
    """Items that a response could go on from; the result of a call may be to one that is there already."""
    found = listed("items", value, MAX_ITEMS)
    for i, item in enumerate(found):
        talk = Conversation()
        if isinstance(item, Mapping) and isinstance(called := item.get("call_id"), str):
            talk.called[called] = ""
        add_items(talk, f"items[{i}]", [item], set())
    return items_of(found)


def metadata_of(value: Any) -> Mapping[str, str]:
    known = isinstance(value, Mapping) and len(value) <= MAX_METADATA
    if not known or not all(
        isinstance(text, str) and len(name) <= MAX_KEY and len(text) <= MAX_VALUE for name, text in value.items()
    ):
        wanted = f"at most {MAX_METADATA} names of {MAX_KEY} characters with texts of {MAX_VALUE}"
        raise RequestError("metadata", f"must be {wanted}, got {shown(value)}")
    return value
