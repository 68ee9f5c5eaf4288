"""The ASGI application: routes, middleware and error handlers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..protocol import chat, completion, messages
from ..protocol.answers import chat as chat_answer
from ..protocol.answers import completion as completion_answer
from ..protocol.answers import messages as message_answer
from . import prompting
from .answering import ClientLeft
from .endpoints import (
    adapters,
    admin,
    batches,
    conversations,
    files,
    message_batches,
    ollama,
    pooled,
    responses,
    status,
    tokens,
)
from .endpoints.invocations import invocations
from .endpoints.static import page_routes
from .errors import HttpError, as_http, error_response
from .guard import Guard
from .service import Protocol, Service

log = logging.getLogger("quire")

PROTOCOLS = {
    "/v1/completions": Protocol(
        "cmpl-",
        completion.parse,
        prompting.completion,
        completion_answer.response,
        completion_answer.CompletionStream,
    ),
    "/v1/chat/completions": Protocol(
        "chatcmpl-", chat.parse, prompting.chat, chat_answer.response, chat_answer.ChatStream
    ),
    "/v1/chat/completions/batch": Protocol(
        "chatcmpl-",
        chat.parse_batch,
        prompting.chat_batch,
        chat_answer.batch_response,
        chat_answer.ChatStream,
    ),
    "/v1/responses": responses.RESPONSES,
    "/v1/messages": Protocol(
        "msg_",
        messages.parse,
        prompting.chat,
        message_answer.response,
        message_answer.MessagesStream,
    ),
}

LLAMA_SERVER_PATHS = {  # to Quire's
    "/completion": "/v1/completions",
    "/embedding": "/v1/embeddings",
    "/props": "/v1/models",
    "/docs": "/openapi.json",
}


def make_app(service: Service) -> Any:
    """The ASGI application."""

    def answer_with(protocol: Protocol) -> Callable:
        async def handler(request: Request) -> Any:
            return await service.answer(request, protocol)

        return handler

    def bind_service(handler: Callable) -> Callable:
        async def endpoint(request: Request) -> Any:
            return await handler(service, request)

        return endpoint

    service.batches.kinds = batches.kinds(PROTOCOLS)
    service.batches.kinds[message_batches.ENDPOINT] = message_batches.kind(
        PROTOCOLS[message_batches.ENDPOINT]
    )
    handlers = {path: answer_with(protocol) for path, protocol in PROTOCOLS.items()}
    handlers["/v1/responses"] = bind_service(responses.create)
    handlers |= {path: bind_service(handler) for (_, path), handler in pooled.ROUTES.items()}
    routes = [Route(path, handle_errors(handlers[path]), methods=["POST"]) for path in PROTOCOLS]
    routes.append(
        Route(
            "/invocations",
            handle_errors(bind_service(partial(invocations, handlers))),
            methods=["POST"],
        )
    )
    tables = [
        responses.ROUTES,
        conversations.ROUTES,
        files.ROUTES,
        batches.ROUTES,
        message_batches.ROUTES,
        tokens.ROUTES,
        pooled.ROUTES,
        status.ROUTES,
        ollama.ROUTES,
        *([admin.ROUTES, adapters.ROUTES] if service.settings.admin else []),
        *([tokens.INFO] if service.settings.enable_tokenizer_info_endpoint else []),
    ]
    for table in tables:
        for (method, path), handler in table.items():
            routes.append(Route(path, handle_errors(bind_service(handler)), methods=[method]))
    routes += page_routes()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(service.heartbeat())
        try:
            yield
        finally:
            task.cancel()

    origins = service.settings.allowed_origins
    middleware = []
    if origins:
        middleware = [
            Middleware(
                CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
            )
        ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=middleware,
        exception_handlers={HTTPException: not_found, Exception: unforeseen},
    )
    app.router.redirect_slashes = False  # `/x/` is not `/x`
    return Guard(app, service.settings, service.shutdown_error, service.record_request)


def handle_errors(handler: Callable) -> Callable:
    """Turn errors into responses.

    An unforeseen one is logged, and the client sees no detail of it.
    """

    async def endpoint(request: Request) -> Any:
        try:
            return await handler(request)
        except ClientLeft:
            request.state.facts["ended"] = "client left"
            return Response(status_code=499)
        except Exception as error:
            if as_http(error).status == 500:
                log.exception("%s failed", request.url.path)
            return error_response(request.url.path, error)

    return endpoint


async def not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    paths = {getattr(route, "path", "") for route in request.app.routes}
    message = f"{request.method} {path[:200]}: {error.detail}"
    if error.status_code == 404 and (served_path := intended_path(path, paths)):
        message += f"; here it is {served_path}"
    return error_response(request.url.path, HttpError(error.status_code, message))


def intended_path(path: str, paths: Collection[str]) -> str | None:
    """The served path that an unknown one stands for, to be suggested to the client.

    Its base URL may lack /v1 or have it twice, or it may expect llama-server.
    """
    candidates = (f"/v1{path}", path.removeprefix("/v1"), LLAMA_SERVER_PATHS.get(path, ""))
    return next((served_path for served_path in candidates if served_path in paths), None)


async def unforeseen(request: Request, error: Exception) -> Response:
    return error_response(request.url.path, error)
