"""The front of the replicas: forwards each request, and retries it elsewhere if a replica fails."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from ray import serve
from ray.exceptions import ObjectLostError, RayActorError, WorkerCrashedError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)
from starlette.requests import Request
from starlette.responses import Response

from ..api.errors import QueueFull
from ..http.errors import HttpError, JsonResponse, error_response
from ..http.guard import Guard, too_large
from ..http.logs import setup_logging
from ..observe.metric_families import Family
from ..observe.prometheus import expose
from .affinity import body_prefix
from .message import ForwardedRequest, ResponsePiece, ResponseStart
from .replica import ReplicaFailed
from .scale import DeploymentPlan

log = logging.getLogger("quire")

TRIES = 3  # replicas per request: a request that crashes replicas must not reach all of them
LOST = (RayActorError, WorkerCrashedError, ObjectLostError, ReplicaUnavailableError, ReplicaFailed)
HOP_BY_HOP = {
    b"connection",
    b"keep-alive",
    b"transfer-encoding",
    b"content-length",
    b"expect",
    b"te",
    b"upgrade",
    b"trailer",
}
APP = "quire"
FRONT = "front"
ENGINE = "engine"
READER = "reader"


class ReplicaRefused(Exception):
    """A replica does not accept the request."""


class AppResponse(Response):
    """Answers with an ASGI application, which gets the original request."""

    def __init__(self, app: Any):
        super().__init__()
        self.app = app

    async def __call__(self, scope, receive, send) -> None:
        await self.app({**scope, "state": {"connection": None}}, receive, send)


class Front:
    """The single process that all requests pass through."""

    def __init__(self, plan: DeploymentPlan, engine: Any, reader: Any = None):
        setup_logging(plan.log_json, plan.log_level)
        self.settings = plan.settings
        self.engine = engine
        self.reader = reader
        self.answers = engine.options(stream=True)
        self.guard = Guard(
            self.route, plan.settings, lambda: None, lambda scope, status, seconds: None
        )
        self.local_handlers: dict[str, Callable] = {
            "/health": self.health,
            "/ping": self.ping,
            "/load": self.load,
            "/metrics": self.metrics,
        }
        self.open = self.retried = self.resumed = 0

    async def __call__(self, request: Request) -> Response:
        return AppResponse(self.guard)

    async def route(self, scope, receive, send) -> None:
        handler = self.local_handlers.get(scope["path"]) if scope["method"] == "GET" else None
        try:
            if handler is not None:
                response = await handler()
            else:
                call = await self.read_request(scope, receive)
                response = await self.forward(call, send)
        except Exception as error:
            if isinstance(error, BackPressureError):
                error = QueueFull("queue", "is full (max_queued_requests); try again later")
            elif isinstance(error, (*LOST, DeploymentUnavailableError)):
                error = HttpError(
                    503, "no replica could answer", code="unavailable", headers={"Retry-After": "5"}
                )
            elif not isinstance(error, HttpError):
                log.exception("%s failed", scope["path"])
            response = error_response(scope["path"], error)
        if response is not None:
            await response(scope, receive, send)

    async def read_request(self, scope, receive) -> ForwardedRequest:
        """Read the whole request, which may have to be sent more than once."""
        chunks = []
        size = 0
        has_more = True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise HttpError(499, "the client has left")
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            has_more = message.get("more_body", False)
            if size > self.settings.max_body_bytes:
                raise too_large(self.settings)
        body = b"".join(chunks)
        headers = [
            (name, value)
            for name, value in scope["headers"]
            if name not in HOP_BY_HOP and name != b"x-request-id"
        ]
        headers.append((b"x-request-id", scope["state"]["request_id"].encode()))
        if body or scope["method"] == "POST":
            headers.append((b"content-length", b"%d" % len(body)))
        prefix = body_prefix(headers, body)
        return ForwardedRequest(
            scope["method"], scope["path"], scope["query_string"], headers, body, prefix
        )

    async def forward(self, call: ForwardedRequest, send: Callable) -> Response | None:
        """Answer a request from one replica, or from several that continue after a loss."""
        self.open += 1
        try:
            outgoing = ClientResponse(call, send)
            for tries_left in reversed(range(TRIES)):
                stream = self.answers.answer.remote(call)
                try:
                    async for message in stream:
                        await outgoing.take(message, last=not tries_left)
                    await outgoing.end()
                    return None
                except (*LOST, ReplicaRefused) as error:
                    log.warning(
                        "%s: a replica was lost: %s", call.path, str(error).splitlines()[0][:200]
                    )
                    if not tries_left or not outgoing.can_resume:
                        if outgoing.start is None:
                            raise
                        await outgoing.fail(
                            HttpError(503, "the replica that wrote this answer is gone")
                        )
                        return None
                    self.retried += 1
                    self.resumed += outgoing.start is not None
                finally:
                    stream.cancel()  # the client may have left
        finally:
            self.open -= 1

    async def ping(self) -> JsonResponse:
        return JsonResponse({})

    async def load(self) -> JsonResponse:
        return JsonResponse({"server_load": self.open})

    async def states(self) -> dict[str, dict[str, int]]:
        """Return the number of replicas by kind and state."""
        app = (await asyncio.to_thread(serve.status)).applications[APP]
        states_by_name = {
            name: app.deployments[name].replica_states
            for name in (ENGINE, READER)
            if name in app.deployments
        }
        return {
            name: {str(state): count for state, count in states.items()}
            for name, states in states_by_name.items()
        }

    async def health(self) -> JsonResponse:
        """Return 200 if a replica runs."""
        states = await self.states()
        well = states.get(ENGINE, {}).get("RUNNING", 0) > 0
        return JsonResponse(
            {"status": "ok" if well else "unavailable", "replicas": states}, 200 if well else 503
        )

    async def metrics(self) -> Response:
        """Return the metrics of all replicas, labelled by replica, and of the front."""
        broadcasts = [
            handle.broadcast("metrics")
            for handle in (self.engine, self.reader)
            if handle is not None
        ]
        results_by_deployment = [
            await broadcast.results_async(timeout_s=10, return_exceptions=True)
            for broadcast in broadcasts
        ]
        families = [
            pair
            for results in results_by_deployment
            for replica_families in results
            if isinstance(replica_families, list)
            for pair in replica_families
        ]
        states = [
            ({"deployment": name, "state": state}, count)
            for name, counts in (await self.states()).items()
            for state, count in counts.items()
        ]
        front_families = [
            Family("quire:replicas", "gauge", "Replicas by their state", states),
            Family(
                "quire:front_requests_open",
                "gauge",
                "Requests at replicas or before them",
                [({}, self.open)],
            ),
            Family(
                "quire:front_retries_total",
                "counter",
                "Requests sent to another replica",
                [({}, self.retried)],
            ),
            Family(
                "quire:front_resumed_total",
                "counter",
                "Of these, with an answer half told",
                [({}, self.resumed)],
            ),
        ]
        body, kind = expose(families + [({}, family) for family in front_families])
        return Response(body, media_type=kind)


class ClientResponse:
    """The response to a client, from one or several replicas."""

    def __init__(self, call: ForwardedRequest, send: Callable):
        self.call = call
        self.send = send
        self.held: ResponseStart | None = None  # sent with the first bytes of the body
        self.start: ResponseStart | None = None  # set once it is sent

    @property
    def can_resume(self) -> bool:
        """Whether another replica can take over now."""
        return self.start is None or bool(self.start.name)

    async def take(self, message: ResponseStart | ResponsePiece, last: bool) -> None:
        if isinstance(message, ResponseStart):
            if self.start is not None and (message.identity, message.status) != (
                self.start.identity,
                200,
            ):
                self.start = self.start._replace(name="")
                raise ReplicaRefused("what goes on with it would be of another model or version")
            if message.status == 503 and not last:
                raise ReplicaRefused("a replica takes no requests")
            self.held = message
            return
        await self.begin()
        self.call.journal.streamed += message.streamed
        self.call.journal.call_ids |= message.call_ids
        await self.send({"type": "http.response.body", "body": message.data, "more_body": True})

    async def begin(self) -> None:
        if self.start is None and self.held is not None:
            start = self.start = self.held
            journal = self.call.journal
            journal.name = start.name
            journal.created = start.created
            journal.seeds = list(start.seeds)
            headers = [
                (name, value)
                for name, value in start.headers
                if name.lower() not in HOP_BY_HOP - {b"content-length"}
            ]
            await self.send(
                {"type": "http.response.start", "status": start.status, "headers": headers}
            )

    async def end(self) -> None:
        await self.begin()
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: HttpError) -> None:
        """End a response that has been sent in part."""
        body = error_response(self.call.path, error).body
        data = b"event: error\ndata: %b\n\n" % body if self.start and self.start.name else b""
        await self.send({"type": "http.response.body", "body": data, "more_body": False})
