"""Parsing of OpenAI's /v1/batches and Anthropic's /v1/messages/batches."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..api.errors import RequestError
from ..api.validation import integer, shown
from . import messages
from .batch_file import ENDPOINTS, MAX_LINES, BatchLine
from .conversations import parse_metadata
from .fields import known_fields
from .objects import parse_list, parse_object

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
    seconds: int | None = None  # for which the result files are kept


@dataclass(frozen=True)
class MessageBatchRequest:
    """Unparsed requests, each with an id and parameters."""

    requests: Sequence[Mapping[str, Any]]


def parse(body: Any) -> BatchRequest:
    fields = known_fields(body, FIELDS, NEUTRAL)
    name = fields.get("input_file_id")
    endpoint = fields.get("endpoint")
    if not isinstance(name, str):
        raise RequestError("input_file_id", f"must be the id of a file, got {shown(name)}")
    if not isinstance(endpoint, str) or endpoint not in ENDPOINTS:
        raise RequestError("endpoint", f"must be {' or '.join(ENDPOINTS)}, got {shown(endpoint)}")
    metadata = None if fields.get("metadata") is None else parse_metadata(fields["metadata"])
    seconds = parse_expiry("output_expires_after", fields.get("output_expires_after"))
    return BatchRequest(name, endpoint, metadata, seconds)


def parse_expiry(param: str, value: Any) -> int | None:
    """{"anchor": "created_at", "seconds": ...}"""
    if value is None:
        return None
    fields = parse_object(param, value, ("anchor", "seconds"))
    if fields.get("anchor") != "created_at":
        raise RequestError(
            f"{param}.anchor", f"must be 'created_at', got {shown(fields.get('anchor'))}"
        )
    return integer(f"{param}.seconds", fields.get("seconds"), *EXPIRY)


def parse_messages(body: Any) -> MessageBatchRequest:
    """Parse the ids of the requests.

    Errors in parameters become results later; only an invalid or repeated id refuses the batch.
    """
    fields = known_fields(body, MESSAGE_FIELDS, {})
    requests = []
    names = set()
    for i, request in enumerate(
        parse_list("requests", fields.get("requests"), MAX_LINES, minimum=1)
    ):
        param = f"requests[{i}]"
        request_fields = parse_object(param, request, ("custom_id", "params"))
        name = request_fields.get("custom_id")
        if not isinstance(name, str) or not 1 <= len(name) <= 64:
            raise RequestError(
                f"{param}.custom_id", f"must be 1 to 64 characters, got {shown(name)}"
            )
        if name in names:
            raise RequestError(
                f"{param}.custom_id", f"must differ from those before it, got {shown(name)}"
            )
        names.add(name)
        requests.append({"custom_id": name, "params": request_fields.get("params")})
    return MessageBatchRequest(requests)


def message_lines(lines: Iterable[bytes]) -> Iterator[BatchLine]:
    """Parse stored requests of `parse_messages`, one JSON object per line."""
    for number, raw in enumerate(lines, start=1):
        if raw:
            request = json.loads(raw)
            yield BatchLine(number, request["custom_id"], parse_message_fields(request["params"]))


def parse_message_fields(params: Any) -> Any:
    """A parsed request of a batch, or the error in it."""
    try:
        if isinstance(params, Mapping) and params.get("stream"):
            raise RequestError("stream", "has no place in a batch; leave it out")
        return messages.parse(params)
    except RequestError as error:
        return error
