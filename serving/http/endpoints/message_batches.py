"""Anthropic's /v1/messages/batches: requests in a body, and their results as lines of JSON."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...api.errors import RequestError
from ...protocol import batches as protocol
from ...protocol.answers import messages as answers
from ...protocol.batch_file import BatchLine
from ..batches import Batch, BatchKind, Outcome, Result, new_name
from ..errors import HttpError, JsonResponse
from ..files import StoredFile, StoredFiles, pieces_of
from ..pages import count_of, page_of
from ..service import Protocol, Service
from .batches import json_line
from .files import file_response

PREFIX, ENDPOINT = "msgbatch_", "/v1/messages"
REQUESTS, RESULTS = "messages_batch_requests", "messages_batch_results"
MAX_LISTED = 1000
KINDS = ("succeeded", "errored", "canceled", "expired")


async def create(service: Service, request: Request) -> JsonResponse:
    asked, _ = await service.read(request, protocol.parse_messages)
    key = service.key(request)
    name = new_name(PREFIX)
    file = await service.beside(write_requests, service.files, key, name, asked.requests)
    batch = Batch(name, key, ENDPOINT, file.id, len(asked.requests))
    try:
        service.batches.add(batch)
    finally:
        service.files.release(key, file.id)
    return JsonResponse(shown(batch))


def write_requests(files: StoredFiles, key: str | None, name: str, requests: Sequence[Any]) -> StoredFile:
    """The requests of a batch in a file that no client sees; it is in use."""
    data = b"".join(map(json_line, requests))
    file = files.put(key, f"{name}_requests.jsonl", REQUESTS, pieces_of(data), is_hidden=True, param="requests")
    files.use(key, file.id)
    return file


def result_of(batch: Batch, line: BatchLine, outcome: Outcome) -> Result:
    found: dict[str, Any] = {"type": outcome.kind}
    if outcome.kind == "succeeded":
        found["message"] = msgspec.Raw(outcome.body)
    elif outcome.kind == "errored" and (error := outcome.error) is not None:
        found["error"] = answers.error(error.status, error.message, error.param)
    return Result(RESULTS, json_line({"custom_id": line.custom_id, "result": found}))


def shown(batch: Batch) -> dict[str, Any]:
    """A batch as Anthropic describes one; its requests count as processing until all are over."""
    counts = {kind: batch.counts.get(kind, 0) if batch.over else 0 for kind in KINDS}
    status = "ended" if batch.over else "canceling" if batch.status == "cancelling" else "in_progress"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": {"processing": batch.total - sum(counts.values()), **counts},
        "created_at": moment(batch.created),
        "expires_at": moment(batch.expires),
        "ended_at": moment(batch.times[batch.status]) if batch.over else None,
        "cancel_initiated_at": moment(batch.times.get("cancelling")),
        "archived_at": None,
        "results_url": f"/v1/messages/batches/{batch.id}/results" if batch.over and RESULTS in batch.files else None,
    }


def moment(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def found(service: Service, request: Request) -> Batch:
    name = request.path_params["id"]
    if not name.startswith(PREFIX):
        raise HttpError(404, "id: is no batch of /v1/messages/batches", "id")
    return service.batches.get(service.key(request), name)


async def listed(service: Service, request: Request) -> JsonResponse:
    given = request.query_params
    batches = [shown(batch) for batch in service.batches.of(service.key(request)) if batch.kind == ENDPOINT]
    page = page_of(batches, given, count_of(given, 20, MAX_LISTED), "after_id")
    del page["object"]
    return JsonResponse(page)


async def retrieve(service: Service, request: Request) -> JsonResponse:
    return JsonResponse(shown(found(service, request)))


async def cancel(service: Service, request: Request) -> JsonResponse:
    batch = found(service, request)
    service.batches.cancel(batch)
    return JsonResponse(shown(batch))


async def delete(service: Service, request: Request) -> JsonResponse:
    batch = found(service, request)
    if not batch.over:
        raise RequestError("id", "cannot be deleted: the batch is not over; cancel it first")
    service.batches.forget(batch)
    if RESULTS in batch.files:
        service.files.delete(batch.key, batch.files[RESULTS])
    return JsonResponse({"id": batch.id, "type": "message_batch_deleted"})


async def results(service: Service, request: Request) -> Response:
    batch = found(service, request)
    if RESULTS not in batch.files or not batch.over:
        reason = batch.errors[0]["message"] if batch.errors else "the batch is not over"
        raise HttpError(404, f"id: there are no results: {reason}", "id")
    return await file_response(service, batch.key, batch.files[RESULTS], "application/x-jsonl")


def kind(messages: Protocol) -> BatchKind:
    return BatchKind(messages, protocol.message_lines, result_of, RESULTS, ("canceled", "expired"))


ROUTES: dict[tuple[str, str], Callable] = {
    ("POST", "/v1/messages/batches"): create,
    ("GET", "/v1/messages/batches"): listed,
    ("GET", "/v1/messages/batches/{id}"): retrieve,
    ("DELETE", "/v1/messages/batches/{id}"): delete,
    ("POST", "/v1/messages/batches/{id}/cancel"): cancel,
    ("GET", "/v1/messages/batches/{id}/results"): results,
}
