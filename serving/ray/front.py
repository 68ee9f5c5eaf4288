"""The front of the replicas: forwards each request to one, and to another when that one dies or fails on it."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from ray import serve
from ray.exceptions import ObjectLostError, RayActorError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from starlette.requests import Request
from starlette.responses import Response

from ..api.errors import QueueFull
from ..http.errors import HttpError, JsonResponse, error_response
from ..http.guard import Guard, too_large
from ..http.logs import setup_logging
from ..observe.metric_families import Family
from ..observe.prometheus import expose
from .affinity import of_body
from .message import ForwardedRequest, Headers, ResponsePiece, ResponseStart
from .replica import ReplicaFailed
from .scale import DeploymentPlan

log = logging.getLogger("quire")

TRIES = 3  # replicas for one request: one that crashes a replica must not reach all of them
LOST = (RayActorError, WorkerCrashedError, ObjectLostError, ReplicaUnavailableError, ReplicaFailed)
HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"expect", b"te", b"upgrade", b"trailer"}
APP, FRONT, ENGINE, READER = "quire", "front", "engine", "reader"


class ReplicaRefused(Exception):
    """A replica does not take the request."""


class AppResponse(Response):
    """Answers with an application, which sees the request as it came."""

    def __init__(self, app: Any):
        super().__init__()
        self.app = app

    async def __call__(self, scope, receive, send) -> None:
        await self.app({**scope, "state": {"connection": None}}, receive, send)


class Front:
    """One process; all requests go through it."""

    def __init__(self, plan: DeploymentPlan, engine: Any, reader: Any = None):
        setup_logging(plan.log_json, plan.log_level)
        self.settings, self.engine, self.reader = plan.settings, engine, reader
        self.answers = engine.options(stream=True)
        self.guard = Guard(self.route, plan.settings, lambda: None, lambda scope, status, seconds: None)
        self.own: dict[str, Callable] = {
            "/health": self.health, "/ping": self.ping, "/load": self.load, "/metrics": self.metrics,
        }  # fmt: skip
        self.open = self.retried = self.resumed = 0

    async def __call__(self, request: Request) -> Response:
        return AppResponse(self.guard)

    async def route(self, scope, receive, send) -> None:
        own = self.own.get(scope["path"]) if scope["method"] == "GET" else None
        try:
            if own is not None:
                response = await own()
            else:
                call = await self.call_of(scope, receive)
                response = await self.pass_on(call, send)
        except Exception as error:
            if isinstance(error, BackPressureError):
                error = QueueFull("queue", "is full (max_queued_requests); try again later")
            elif isinstance(error, (*LOST, DeploymentUnavailableError)):
                error = HttpError(503, "no replica could answer", code="unavailable", headers={"Retry-After": "5"})
            elif not isinstance(error, HttpError):
                log.exception("%s failed", scope["path"])
            response = error_response(scope["path"], error)
        if response is not None:
            await response(scope, receive, send)

    async def call_of(self, scope, receive) -> ForwardedRequest:
        """The whole request: it may have to be sent more than once."""
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise HttpError(499, "the client has left")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > self.settings.max_body_bytes:
                raise too_large(self.settings)
        body = b"".join(parts)
        headers = [(name, value) for name, value in scope["headers"] if name not in HOP and name != b"x-request-id"]
        headers.append((b"x-request-id", scope["state"]["request_id"].encode()))
        if body or scope["method"] == "POST":
            headers.append((b"content-length", b"%d" % len(body)))
        prefix = of_body(headers, body)
        return ForwardedRequest(scope["method"], scope["path"], scope["query_string"], headers, body, prefix)

    async def pass_on(self, call: ForwardedRequest, send: Callable) -> Response | None:
        """Answer a request by one replica, or by several that go on where one has been lost."""
        self.open += 1
        try:
            outgoing = ClientResponse(call, send)
            for left in reversed(range(TRIES)):
                stream = self.answers.answer.remote(call)
                try:
                    async for message in stream:
                        await outgoing.take(message, last=not left)
                    await outgoing.end()
                    return None
                except (*LOST, ReplicaRefused) as error:
                    log.warning("%s: a replica was lost: %s", call.path, str(error).splitlines()[0][:200])
                    if not left or not outgoing.goes_on:
                        if outgoing.start is None:
                            raise
                        await outgoing.fail(HttpError(503, "the replica that wrote this answer is gone"))
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
        """How many replicas of each kind are in which state."""
        app = (await asyncio.to_thread(serve.status)).applications[APP]
        found = {name: app.deployments[name].replica_states for name in (ENGINE, READER) if name in app.deployments}
        return {name: {str(state): count for state, count in states.items()} for name, states in found.items()}

    async def health(self) -> JsonResponse:
        """200 where a replica runs."""
        states = await self.states()
        well = states.get(ENGINE, {}).get("RUNNING", 0) > 0
        return JsonResponse({"status": "ok" if well else "unavailable", "replicas": states}, 200 if well else 503)

    async def metrics(self) -> Response:
        """The metrics of all replicas, labelled by replica, and the front's own."""
        every = [handle.broadcast("metrics") for handle in (self.engine, self.reader) if handle is not None]
        every_result = [await one.results_async(timeout_s=10, return_exceptions=True) for one in every]
        families = [pair for results in every_result for found in results if isinstance(found, list) for pair in found]
        states = [
            ({"deployment": name, "state": state}, count)
            for name, counts in (await self.states()).items()
            for state, count in counts.items()
        ]
        own = [
            Family("quire:replicas", "gauge", "Replicas by their state", states),
            Family("quire:front_requests_open", "gauge", "Requests at replicas or before them", [({}, self.open)]),
            Family("quire:front_retries_total", "counter", "Requests sent to another replica", [({}, self.retried)]),
            Family("quire:front_resumed_total", "counter", "Of these, with an answer half told", [({}, self.resumed)]),
        ]
        body, kind = expose(families + [({}, family) for family in own])
        return Response(body, media_type=kind)


class ClientResponse:
    """The one response that a client gets, whichever replicas write it."""

    def __init__(self, call: ForwardedRequest, send: Callable):
        self.call, self.send = call, send
        self.held: ResponseStart | None = None  # it is sent with the first bytes of the body
        self.start: ResponseStart | None = None  # how it began

    @property
    def goes_on(self) -> bool:
        """Whether another replica can take over now."""
        return self.start is None or bool(self.start.name)

    async def take(self, message: ResponseStart | ResponsePiece, last: bool) -> None:
        if isinstance(message, ResponseStart):
            if self.start is not None and (message.identity, message.status) != (self.start.identity, 200):
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
        if self.start is None:
            self.start, journal = self.held, self.call.journal
            journal.name, journal.created, journal.seeds = self.held.name, self.held.created, list(self.held.seeds)
            await self.send({"type": "http.response.start", "status": self.held.status, "headers": self.headers()})

    def headers(self) -> Headers:
        return [(name, value) for name, value in self.held.headers if name.lower() not in HOP - {b"content-length"}]

    async def end(self) -> None:
        await self.begin()
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: HttpError) -> None:
        """End a response of which the client has a part."""
        body = error_response(self.call.path, error).body
        data = b"event: error\ndata: %b\n\n" % body if self.start.name else b""
        await self.send({"type": "http.response.body", "body": data, "more_body": False})
