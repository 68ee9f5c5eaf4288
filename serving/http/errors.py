"""Errors as HTTP responses, in the shape of the client's protocol."""

from typing import Any

import msgspec
from starlette.responses import Response

from ..api.errors import EngineError, NotServing, QueueFull, RequestError, TooLong
from ..engine.thread import EngineFailed
from ..protocol.answers import messages, ollama, shapes
from .storage import StorageFailed


class HttpError(Exception):
    """An error with its HTTP status; `param` is the field of the request that it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}


def as_http(error: Exception) -> HttpError:
    """Convert any error into an HttpError.

    The message of an unforeseen one is hidden from the client.
    """
    if isinstance(error, HttpError):
        return error
    if isinstance(error, QueueFull):
        return HttpError(429, str(error), error.param, "queue_full", {"Retry-After": "1"})
    if isinstance(error, NotServing | EngineFailed):
        return HttpError(503, str(error), code="unavailable", headers={"Retry-After": "5"})
    if isinstance(error, StorageFailed):
        message = "what the server stores cannot be written now; its log says why"
        return HttpError(503, message, code="storage_failed", headers={"Retry-After": "60"})
    if isinstance(error, EngineError):
        return HttpError(500, str(error), code="engine_error")
    if isinstance(error, TooLong):
        # Agents shorten the prompt on this code.
        return HttpError(400, str(error), error.param, "context_length_exceeded")
    if isinstance(error, RequestError):
        return HttpError(400, str(error), error.param)
    if isinstance(error, RecursionError):
        return HttpError(400, "body: is nested too deep", "body")
    return HttpError(
        500, "the server failed on this request; its log says why", code="internal_error"
    )


class JsonResponse(Response):
    """A body as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_response(path: str, error: Exception) -> Response:
    """The response to a request that failed before anything was sent."""
    http_error = as_http(error)
    if path.startswith("/v1/messages"):
        body = messages.error(http_error.status, http_error.message, http_error.param)
    elif path.startswith("/api/"):
        body = ollama.error(http_error.message)
    else:
        body = shapes.error(
            http_error.status, http_error.message, http_error.param, http_error.code
        )
    return JsonResponse(body, http_error.status, http_error.headers)
