"""OpenAI's /v1/batches: a file of requests becomes a file of answers and one of errors."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request

from ...api.errors import RequestError
from ...protocol import batches as protocol
from ...protocol.batch_file import MAX_LINES, BatchLine, error_line, parse_lines, result_line
from ..batches import ENDED, Batch, Outcome, new_name
from ..errors import HttpError, JsonResponse
from ..pages import count_of, page_of
from ..service import Protocol, Service

MAX_LISTED = 100
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
CODES = {400: "invalid_request", 404: "model_not_found", 408: "batch_expired"}


async def create(protocols: dict[str, Protocol], service: Service, request: Request) -> JsonResponse:
    asked, body = await service.read(request, protocol.parse)
    key = service.key(request)
    file = service.files.get(key, asked.input_file_id, "input_file_id")
    lines = await service.beside(lines_of, file.data, asked.endpoint)
    keep = partial(keep_files, service, asked.seconds)
    batch = Batch(new_name("batch_"), key, lines, protocols[asked.endpoint], keep, body)
    service.batches.add(request, batch)
    return JsonResponse(shown(batch))


def lines_of(data: bytes, endpoint: str) -> list[BatchLine]:
    lines = list(parse_lines(data.split(b"\n"), (endpoint,)))
    if not 1 <= len(lines) <= MAX_LINES:
        raise RequestError("input_file_id", f"must be a file of 1 to {MAX_LINES} requests, got {len(lines)}")
    return lines


def keep_files(service: Service, seconds: int | None, batch: Batch) -> None:
    """The answers in one file, the errors in another, both in the order of the requests; what was cancelled in none."""
    settled = [(line, batch.outcomes[index]) for index, line in enumerate(batch.lines)]
    kept = {
        "output_file_id": [
            result_line(line, name_of(batch, line), msgspec.Raw(outcome.body))
            for line, outcome in settled
            if outcome.kind == "succeeded"
        ],
        "error_file_id": [
            failed(line, name_of(batch, line), outcome) for line, outcome in settled if outcome.error is not None
        ],
    }
    for name, found in kept.items():
        if found:
            data = jsonl(found)
            purpose, own = "batch_output", f"{batch.id}_{name.removesuffix('_file_id')}.jsonl"
            batch.files[name] = service.files.put(batch.key, own, purpose, data, seconds).id


def name_of(batch: Batch, line: BatchLine) -> str:
    return f"batch_req_{batch.id}_{line.number}"


def failed(line: BatchLine, name: str, outcome: Outcome) -> dict[str, Any]:
    error = outcome.error
    assert error is not None
    why: Exception = error
    if isinstance(line.request, RequestError):
        why = line.request
    elif error.param is not None and error.message.startswith(f"{error.param}: "):
        why = RequestError(error.param, error.message.removeprefix(f"{error.param}: "))
    return error_line(line, name, why, error.code or CODES.get(error.status, "server_error"))


def jsonl(lines: Iterable[Any]) -> bytes:
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def shown(batch: Batch) -> dict[str, Any]:
    """A batch as OpenAI describes one."""
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.asked["endpoint"],
        "input_file_id": batch.asked["input_file_id"],
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": batch.files.get("output_file_id"),
        "error_file_id": batch.files.get("error_file_id"),
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


def found(service: Service, request: Request) -> Batch:
    batch = service.batches.get(service.key(request), request.path_params["id"])
    if "endpoint" not in batch.asked:  # one of /v1/messages
        raise HttpError(404, "id: is a batch of /v1/messages/batches", "id", "batch_not_found")
    return batch


async def listed(service: Service, request: Request) -> JsonResponse:
    batches = [shown(batch) for batch in service.batches.of(service.key(request)) if "endpoint" in batch.asked]
    return JsonResponse(page_of(batches, request.query_params, count_of(request.query_params, 20, MAX_LISTED)))


async def retrieve(service: Service, request: Request) -> JsonResponse:
    return JsonResponse(shown(found(service, request)))


async def cancel(service: Service, request: Request) -> JsonResponse:
    batch = found(service, request)
    if batch.status in ENDED and batch.status != "cancelled":
        raise RequestError("id", f"cannot be cancelled: the batch is {batch.status}")
    service.batches.cancel(batch)
    return JsonResponse(shown(batch))


def routes(protocols: dict[str, Protocol]) -> dict[tuple[str, str], Callable]:
    return {
        ("POST", "/v1/batches"): partial(create, protocols),
        ("GET", "/v1/batches"): listed,
        ("GET", "/v1/batches/{id}"): retrieve,
        ("POST", "/v1/batches/{id}/cancel"): cancel,
    }
