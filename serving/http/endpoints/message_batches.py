"""Anthropic's /v1/messages/batches: the body has the requests; the results are JSON lines."""

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
from ..batches import Batch, BatchKind, Outcome, Result, new_batch_id
from ..errors import HttpError, JsonResponse
from ..files import StoredFile, StoredFiles, split_pieces
from ..pages import make_page, parse_limit
from ..service import Protocol, Service
from .batches import json_line
from .files import file_response

PREFIX = "msgbatch_"
ENDPOINT = "/v1/messages"
REQUESTS = "messages_batch_requests"
RESULTS = "messages_batch_results"
MAX_LISTED = 1000
KINDS = ("succeeded", "errored", "canceled", "expired")


async def create(service: Service, request: Request) -> JsonResponse:
    parsed, _ = await service.read(request, protocol.parse_messages)
    key = service.key(request)
    name = new_batch_id(PREFIX)
    file = await service.run_in_thread(write_requests, service.files, key, name, parsed.requests)
    batch = Batch(name, key, ENDPOINT, file.id, len(parsed.requests))
    try:
        service.batches.add(batch)
    finally:
        service.files.release(key, file.id)
    return JsonResponse(batch_body(batch))


def write_requests(
    files: StoredFiles, key: str | None, name: str, requests: Sequence[Any]
) -> StoredFile:
    """Store the requests of a batch in a hidden file; the caller releases it."""
    data = b"".join(map(json_line, requests))
    file = files.put(
        key,
        f"{name}_requests.jsonl",
        REQUESTS,
        split_pieces(data),
        is_hidden=True,
        param="requests",
    )
    files.use(key, file.id)
    return file


def make_result(batch: Batch, line: BatchLine, outcome: Outcome) -> Result:
    result: dict[str, Any] = {"type": outcome.kind}
    if outcome.kind == "succeeded":
        result["message"] = msgspec.Raw(outcome.body)
    elif outcome.kind == "errored" and (error := outcome.error) is not None:
        result["error"] = answers.error(error.status, error.message, error.param)
    return Result(RESULTS, json_line({"custom_id": line.custom_id, "result": result}))


def batch_body(batch: Batch) -> dict[str, Any]:
    """A batch in Anthropic's form; all its requests count as processing until it has ended."""
    counts = {kind: batch.counts.get(kind, 0) if batch.is_over else 0 for kind in KINDS}
    status = (
        "ended" if batch.is_over else "canceling" if batch.status == "cancelling" else "in_progress"
    )
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": {"processing": batch.total - sum(counts.values()), **counts},
        "created_at": iso_time(batch.created),
        "expires_at": iso_time(batch.expires),
        "ended_at": iso_time(batch.times[batch.status]) if batch.is_over else None,
        "cancel_initiated_at": iso_time(batch.times.get("cancelling")),
        "archived_at": None,
        "results_url": f"/v1/messages/batches/{batch.id}/results"
        if batch.is_over and RESULTS in batch.files
        else None,
    }


def iso_time(seconds: int | None) -> str | None:
    return (
        None
        if seconds is None
        else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
    )


def requested_batch(service: Service, request: Request) -> Batch:
    name = request.path_params["id"]
    if not name.startswith(PREFIX):
        raise HttpError(404, "id: is no batch of /v1/messages/batches", "id")
    return service.batches.get(service.key(request), name)


async def list_batches(service: Service, request: Request) -> JsonResponse:
    query = request.query_params
    batches = [
        batch_body(batch)
        for batch in service.batches.of(service.key(request))
        if batch.kind == ENDPOINT
    ]
    page = make_page(batches, query, parse_limit(query, 20, MAX_LISTED), "after_id")
    del page["object"]
    return JsonResponse(page)


async def retrieve(service: Service, request: Request) -> JsonResponse:
    return JsonResponse(batch_body(requested_batch(service, request)))


async def cancel(service: Service, request: Request) -> JsonResponse:
    batch = requested_batch(service, request)
    service.batches.cancel(batch)
    return JsonResponse(batch_body(batch))


async def delete(service: Service, request: Request) -> JsonResponse:
    batch = requested_batch(service, request)
    if not batch.is_over:
        raise RequestError("id", "cannot be deleted: the batch is not over; cancel it first")
    service.batches.forget(batch)
    if RESULTS in batch.files:
        service.files.delete(batch.key, batch.files[RESULTS])
    return JsonResponse({"id": batch.id, "type": "message_batch_deleted"})


async def results(service: Service, request: Request) -> Response:
    batch = requested_batch(service, request)
    if RESULTS not in batch.files or not batch.is_over:
        reason = batch.errors[0]["message"] if batch.errors else "the batch is not over"
        raise HttpError(404, f"id: there are no results: {reason}", "id")
    return await file_response(service, batch.key, batch.files[RESULTS], "application/x-jsonl")


def kind(messages: Protocol) -> BatchKind:
    return BatchKind(
        messages, protocol.message_lines, make_result, RESULTS, ("canceled", "expired")
    )


ROUTES: dict[tuple[str, str], Callable] = {
    ("POST", "/v1/messages/batches"): create,
    ("GET", "/v1/messages/batches"): list_batches,
    ("GET", "/v1/messages/batches/{id}"): retrieve,
    ("DELETE", "/v1/messages/batches/{id}"): delete,
    ("POST", "/v1/messages/batches/{id}/cancel"): cancel,
    ("GET", "/v1/messages/batches/{id}/results"): results,
}
