"""/invocations, for Amazon SageMaker: the fields of the body determine the endpoint."""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request

from ...api.errors import RequestError
from ...api.validation import shown
from ..service import Service, decode

# The first field that the body has determines the endpoint.
PATH_BY_FIELD = (
    ("messages", "/v1/chat/completions"),
    ("prompt", "/v1/completions"),
    ("texts", "/v2/embed"),
    ("input", "/v1/embeddings"),
    ("label_token_ids", "/generative_scoring"),
    ("text_1", "/score"),
    ("data_1", "/score"),
    ("queries", "/score"),
    ("query", "/rerank"),
)


async def invocations(handlers: Mapping[str, Callable], service: Service, request: Request) -> Any:
    """Forward a request to the handler of its endpoint; `handlers` are by path."""
    raw = await service.body(request)
    body = await service.run_in_thread(decode, raw)
    if not isinstance(body, Mapping):
        raise RequestError("body", f"must be a JSON object, got {shown(body)}")
    path = next((path for field, path in PATH_BY_FIELD if body.get(field) is not None), None)
    if path is None:
        fields = ", ".join(field for field, _ in PATH_BY_FIELD)
        raise RequestError("body", f"must have a field that says what is asked, one of {fields}")
    return await handlers[path](Request(request.scope, replay_body(raw, request.receive)))


def replay_body(raw: bytes, receive: Callable) -> Callable:
    """An ASGI `receive` that returns the body `raw` first, which was received already."""
    messages = [{"type": "http.request", "body": raw, "more_body": False}]

    async def next_message() -> Any:
        return messages.pop() if messages else await receive()

    return next_message
