"""What a server says of itself: to load balancers, to Prometheus, to clients that ask for models, and to the page."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from ...observe import metrics
from ..answering import EVENTS, until_gone
from ..errors import JsonResponse
from ..models import FAILED, READY, Model
from ..service import DRAINING, Service
from .openapi import document

PROCESS = CollectorRegistry()  # memory, processor time and open files, where the system tells
ProcessCollector(registry=PROCESS)
PERIOD = 0.15  # seconds between two looks at the engine


def state_of(service: Service, model: Model) -> str:
    """`stalled` and `failed` say that it serves nobody; `loading` that it soon will."""
    if model.state != READY:
        return model.state
    thread = model.llm.thread
    if thread.failure is not None:
        return FAILED
    return "stalled" if thread.stalled() > service.settings.stall_seconds else READY


async def health(service: Service, request: Request) -> JsonResponse:
    """200 where requests can be served; being busy is no reason against it.

    A model that could not be loaded is no reason either, for starting again would not help, unless it was the last.
    """
    states = {model.name: state_of(service, model) for model in service.models.models}
    broken = any(model.state == READY and states[model.name] != READY for model in service.models.models)
    well = service.started and not service.draining and not broken and set(states.values()) != {FAILED}
    status = DRAINING if service.draining else "ok" if well else "unavailable"
    return JsonResponse({"status": status, "models": states}, 200 if well else 503)


async def ping(service: Service, request: Request) -> JsonResponse:
    return JsonResponse({})


async def version(service: Service, request: Request) -> JsonResponse:
    return JsonResponse({"version": service.settings.version})


async def load(service: Service, request: Request) -> JsonResponse:
    return JsonResponse({"server_load": service.open})


async def models(service: Service, request: Request) -> JsonResponse:
    return JsonResponse({"object": "list", "data": [card(service, model, name) for model, name in named(service)]})


async def model(service: Service, request: Request) -> JsonResponse:
    found = service.models.find(request.path_params["name"])
    return JsonResponse(card(service, found, request.path_params["name"]))


def named(service: Service) -> list[tuple[Model, str]]:
    return [(model, name) for model in service.models.models for name in (*model.names, *model.adapters)]


def card(service: Service, model: Model, name: str) -> dict[str, Any]:
    engine = None if model.loaded is None else model.llm.engine
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "quire",
        "root": name if name in model.adapters else model.name,
        "parent": model.name if name in model.adapters else None,
        "max_model_len": None if engine is None else engine.max_len,
        "default_sampling_params": None if engine is None else dict(engine.defaults),
        "state": state_of(service, model),
    }


async def prometheus(service: Service, request: Request) -> Response:
    engines = {model.name: model.llm.metrics for model in service.models.ready()}
    body, kind = metrics.render(engines, service.http_metrics)
    return Response(body + generate_latest(PROCESS), media_type=kind)


async def openapi(service: Service, request: Request) -> JsonResponse:
    return JsonResponse(document(service.settings))


class LivePage:
    """What the page draws: looks at the engine, a few a second, as long as somebody watches."""

    def __init__(self, service: Service, model: Model, tenant: str | None):
        self.service, self.model, self.tenant = service, model, tenant

    async def __call__(self, scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*EVENTS]})
        gone = asyncio.create_task(until_gone(receive))
        try:
            async for frame in self.frames():
                if gone.done():
                    return
                await send({"type": "http.response.body", "body": frame, "more_body": True})
                await asyncio.wait([gone], timeout=PERIOD)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()

    async def frames(self) -> AsyncIterator[bytes]:
        cursor = 0
        while not self.service.draining:
            frame: dict[str, Any] = {"model": self.model.name, "state": state_of(self.service, self.model)}
            if frame["state"] == READY:
                llm = self.model.llm

                def look(llm=llm, since=cursor) -> dict[str, Any]:
                    return llm.live.look(llm.engine, since, self.tenant) | llm.metrics.recent(llm.engine.clock())

                frame = await llm.call(look) | frame
                cursor = frame.pop("cursor")
            yield b"data: %b\n\n" % msgspec.json.encode(frame)


async def live(service: Service, request: Request) -> LivePage:
    return LivePage(service, service.models.find(request.query_params.get("model")), service.key(request))


ROUTES: dict[tuple[str, str], Callable] = {
    ("GET", "/health"): health,
    ("GET", "/ping"): ping,
    ("GET", "/version"): version,
    ("GET", "/load"): load,
    ("GET", "/v1/models"): models,
    ("GET", "/v1/models/{name:path}"): model,
    ("GET", "/metrics"): prometheus,
    ("GET", "/live"): live,
    ("GET", "/openapi.json"): openapi,
}
