"""OpenAI's /v1/batches and Anthropic's /v1/messages/batches: bodies to requests."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..api.errors import RequestError
from ..api.validation import integer, shown
from . import messages
from .batch_file import ENDPOINTS, MAX_LINES, BatchLine
from .conversations import metadata_of
from .fields import known_fields
from .objects import listed, plain

FIELDS = ("input_file_id", "endpoint", "output_expires_after", "metadata")
NEUTRAL = {"completion_window": "24h"}
MESSAGE_FIELDS = ("requests",)
EXPIRY = 3600, 30 * 24 * 3600  # seconds


@dataclass(frozen=True)
class BatchRequest:
    """A file of requests to answer."""

    input_file_id: str
    endpoint: str
    metadata: Mapping[str, str] | None = None
    seconds: int | None = None  # for which its results are kept


@dataclass(frozen=True)
class MessageBatchRequest:
    """Requests to answer, as they were sent: an id and parameters each."""

    requests: Sequence[Mapping[str, Any]]


def parse(body: Any) -> BatchRequest:
    given = known_fields(body, FIELDS, NEUTRAL)
    name, endpoint = given.get("input_file_id"), given.get("endpoint")
    if not isinstance(name, str):
        raise RequestError("input_file_id", f"must be the id of a file, got {shown(name)}")
    if not isinstance(endpoint, str) or endpoint not in ENDPOINTS:
        raise RequestError("endpoint", f"must be {' or '.join(ENDPOINTS)}, got {shown(endpoint)}")
    metadata = None if given.get("metadata") is None else metadata_of(given["metadata"])
    seconds = expiry("output_expires_after", given.get("output_expires_after"))
    return BatchRequest(name, endpoint, metadata, seconds)


def expiry(where: str, value: Any) -> int | None:
    """{"anchor": "created_at", "seconds": ...}"""
    if value is None:
        return None
    given = plain(where, value, ("anchor", "seconds"))
    if given.get("anchor") != "created_at":
        raise RequestError(f"{where}.anchor", f"must be 'created_at', got {shown(given.get('anchor'))}")
    return integer(f"{where}.seconds", given.get("seconds"), *EXPIRY)


def parse_messages(body: Any) -> MessageBatchRequest:
    """What is wrong with one request is its result; only where nobody could tell it from others all are refused."""
    given = known_fields(body, MESSAGE_FIELDS, {})
    found, seen = [], set()
    for i, request in enumerate(listed("requests", given.get("requests"), MAX_LINES, least=1)):
        where = f"requests[{i}]"
        one = plain(where, request, ("custom_id", "params"))
        name = one.get("custom_id")
        if not isinstance(name, str) or not 1 <= len(name) <= 64:
            raise RequestError(f"{where}.custom_id", f"must be 1 to 64 characters, got {shown(name)}")
        if name in seen:
            raise RequestError(f"{where}.custom_id", f"must differ from those before it, got {shown(name)}")
        seen.add(name)
        found.append({"custom_id": name, "params": one.get("params")})
    return MessageBatchRequest(found)


def message_lines(lines: Iterable[bytes]) -> Iterator[BatchLine]:
    """The requests of a batch, a line of JSON each, as `parse_messages` found them."""
    for number, raw in enumerate(lines, start=1):
        if raw:
            one = json.loads(raw)
            yield BatchLine(number, one["custom_id"], message_of(one["params"]))


def message_of(params: Any) -> Any:
    """A request of a batch, or what is wrong with it."""
    try:
        if isinstance(params, Mapping) and params.get("stream"):
            raise RequestError("stream", "has no place in a batch; leave it out")
        return messages.parse(params)
    except RequestError as error:
        return error
