"""OpenAI's /v1/batches: a file of requests becomes a file of answers and one of errors."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request

from ...api.errors import RequestError
from ...protocol import batches as protocol
from ...protocol.batch_file import (
    ENDPOINTS,
    MAX_LINES,
    BatchLine,
    error_line,
    parse_lines,
    result_line,
)
from ..batches import ENDED, Batch, BatchKind, Outcome, Result, new_batch_id, split_lines
from ..errors import HttpError, JsonResponse
from ..pages import make_page, parse_limit
from ..service import Protocol, Service

MAX_LISTED = 100
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
CODES = {400: "invalid_request", 404: "model_not_found", 408: "batch_expired"}


async def create(service: Service, request: Request) -> JsonResponse:
    parsed, _ = await service.read(request, protocol.parse)
    key = service.key(request)
    file = service.files.get(key, parsed.input_file_id, "input_file_id")
    service.files.use(key, file.id)  # until the batch itself holds it
    try:
        total = await service.run_in_thread(count_requests, service.files.pieces(key, file.id))
        if not 1 <= total <= MAX_LINES:
            raise RequestError(
                "input_file_id", f"must be a file of 1 to {MAX_LINES} requests, got {total}"
            )
        repeated_fields = {
            "endpoint": parsed.endpoint,
            "input_file_id": file.id,
            "metadata": parsed.metadata,
        }
        batch = Batch(
            new_batch_id("batch_"),
            key,
            parsed.endpoint,
            file.id,
            total,
            repeated_fields,
            parsed.seconds,
        )
        service.batches.add(batch)
    finally:
        service.files.release(key, file.id)
    return JsonResponse(batch_body(batch))


def count_requests(pieces: Iterable[bytes]) -> int:
    return sum(1 for line in split_lines(pieces) if line.strip())


def make_result(batch: Batch, line: BatchLine, outcome: Outcome) -> Result | None:
    """A line of the output file or of the error file; None for a cancelled request."""
    name = f"batch_req_{batch.id}_{line.number}"
    if outcome.kind == "succeeded":
        return Result(
            "output_file_id", json_line(result_line(line, name, msgspec.Raw(outcome.body)))
        )
    if outcome.error is not None:
        return Result("error_file_id", json_line(error_result(line, name, outcome.error)))
    return None


def error_result(line: BatchLine, name: str, error: HttpError) -> dict[str, Any]:
    reason: Exception = error
    if isinstance(line.request, RequestError):
        reason = line.request
    elif error.param is not None and error.message.startswith(f"{error.param}: "):
        reason = RequestError(error.param, error.message.removeprefix(f"{error.param}: "))
    return error_line(line, name, reason, error.code or CODES.get(error.status, "server_error"))


def json_line(line: Any) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def batch_body(batch: Batch) -> dict[str, Any]:
    """A batch as OpenAI describes one; its result files are named when it has ended."""
    files = batch.files if batch.is_over else {}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.asked["endpoint"],
        "input_file_id": batch.asked["input_file_id"],
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": files.get("output_file_id"),
        "error_file_id": files.get("error_file_id"),
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "created_at": batch.created,
        "expires_at": batch.expires,
        **{f"{name}_at": batch.times.get(name) for name in TIMES},
        "request_counts": {
            "total": batch.total,
            "completed": batch.counts.get("succeeded", 0),
            "failed": batch.counts.get("errored", 0) + batch.counts.get("expired", 0),
        },
        "metadata": batch.asked.get("metadata"),
    }


def requested_batch(service: Service, request: Request) -> Batch:
    batch = service.batches.get(service.key(request), request.path_params["id"])
    if batch.kind not in ENDPOINTS:  # it belongs to /v1/messages/batches
        raise HttpError(404, "id: is a batch of /v1/messages/batches", "id", "batch_not_found")
    return batch


async def list_batches(service: Service, request: Request) -> JsonResponse:
    batches = [
        batch_body(batch)
        for batch in service.batches.of(service.key(request))
        if batch.kind in ENDPOINTS
    ]
    return JsonResponse(
        make_page(batches, request.query_params, parse_limit(request.query_params, 20, MAX_LISTED))
    )


async def retrieve(service: Service, request: Request) -> JsonResponse:
    return JsonResponse(batch_body(requested_batch(service, request)))


async def cancel(service: Service, request: Request) -> JsonResponse:
    batch = requested_batch(service, request)
    if batch.status in ENDED and batch.status != "cancelled":
        raise RequestError("id", f"cannot be cancelled: the batch is {batch.status}")
    service.batches.cancel(batch)
    return JsonResponse(batch_body(batch))


def kinds(protocols: Mapping[str, Protocol]) -> dict[str, BatchKind]:
    """The kinds of batches that /v1/batches serves, by endpoint."""
    return {
        endpoint: BatchKind(
            protocols[endpoint],
            partial(parse_lines, endpoints=(endpoint,)),
            make_result,
            "batch_output",
            ("expired",),
        )
        for endpoint in ENDPOINTS
    }


ROUTES: dict[tuple[str, str], Callable] = {
    ("POST", "/v1/batches"): create,
    ("GET", "/v1/batches"): list_batches,
    ("GET", "/v1/batches/{id}"): retrieve,
    ("POST", "/v1/batches/{id}/cancel"): cancel,
}
