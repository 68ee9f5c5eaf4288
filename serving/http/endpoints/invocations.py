"""/invocations, where Amazon SageMaker sends every request: its fields say which endpoint is meant."""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request

from ...api.errors import RequestError
from ...api.validation import shown
from ..service import Service, decode

# The first whose field is in the body is meant.
MEANT = (
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
    """The answer of the endpoint that is meant; `handlers` are by path."""
    raw = await service.body(request)
    body = await service.beside(decode, raw)
    if not isinstance(body, Mapping):
        raise RequestError("body", f"must be a JSON object, got {shown(body)}")
    path = next((path for field, path in MEANT if body.get(field) is not None), None)
    if path is None:
        fields = ", ".join(field for field, _ in MEANT)
        raise RequestError("body", f"must have a field that says what is asked, one of {fields}")
    return await handlers[path](Request(request.scope, again(raw, request.receive)))


def again(raw: bytes, receive: Callable) -> Callable:
    """A body that has been read, and then what the client sends."""
    parts = [{"type": "http.request", "body": raw, "more_body": False}]

    async def following() -> Any:
        return parts.pop() if parts else await receive()

    return following
