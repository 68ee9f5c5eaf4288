"""Health checks, metrics, the list of models, and the live view of the web page."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from ...observe import metrics
from ..answering import EVENTS, wait_for_disconnect
from ..errors import JsonResponse
from ..models import FAILED, READY, Model
from ..service import DRAINING, Service
from .openapi import document

# Memory, processor time and open files, where the system reports them.
PROCESS = CollectorRegistry()
ProcessCollector(registry=PROCESS)
FRAME_SECONDS = 0.15  # seconds between two looks at the engine


def model_state(service: Service, model: Model) -> str:
    """A model's state: also `stalled` or `failed`, in which it serves no requests, or `loading`."""
    if model.state != READY:
        return model.state
    thread = model.llm.thread
    if thread.failure is not None:
        return FAILED
    return "stalled" if thread.stalled() > service.settings.stall_seconds else READY


async def health(service: Service, request: Request) -> JsonResponse:
    """200 if requests can be served, also while the server is busy; else 503.

    A model that could not be loaded makes the server unhealthy only if no other model works, since
    a restart would not help.
    """
    states = {model.name: model_state(service, model) for model in service.models.models}
    is_any_broken = any(
        model.state == READY and states[model.name] != READY for model in service.models.models
    )
    is_healthy = (
        service.started
        and not service.draining
        and not is_any_broken
        and set(states.values()) != {FAILED}
    )
    status = DRAINING if service.draining else "ok" if is_healthy else "unavailable"
    return JsonResponse({"status": status, "models": states}, 200 if is_healthy else 503)


async def ping(service: Service, request: Request) -> JsonResponse:
    return JsonResponse({})


async def version(service: Service, request: Request) -> JsonResponse:
    return JsonResponse({"version": service.settings.version})


async def load(service: Service, request: Request) -> JsonResponse:
    return JsonResponse({"server_load": service.open})


async def models(service: Service, request: Request) -> JsonResponse:
    return JsonResponse(
        {
            "object": "list",
            "data": [card(service, model, name) for model, name in named_models(service)],
        }
    )


async def model(service: Service, request: Request) -> JsonResponse:
    model = service.models.find(request.path_params["name"])
    return JsonResponse(card(service, model, request.path_params["name"]))


def named_models(service: Service) -> list[tuple[Model, str]]:
    return [
        (model, name) for model in service.models.models for name in (*model.names, *model.adapters)
    ]


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
        "state": model_state(service, model),
    }


async def prometheus(service: Service, request: Request) -> Response:
    engines = {model.name: model.llm.metrics for model in service.models.ready()}
    body, kind = metrics.render(engines, service.http_metrics)
    return Response(body + generate_latest(PROCESS), media_type=kind)


async def openapi(service: Service, request: Request) -> JsonResponse:
    return JsonResponse(document(service.settings))


class LivePage:
    """A stream of snapshots of the engine for the web page, until the client disconnects."""

    def __init__(self, service: Service, model: Model, tenant: str | None):
        self.service = service
        self.model = model
        self.tenant = tenant

    async def __call__(self, scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*EVENTS]})
        disconnect_task = asyncio.create_task(wait_for_disconnect(receive))
        try:
            async for frame in self.frames():
                if disconnect_task.done():
                    return
                await send({"type": "http.response.body", "body": frame, "more_body": True})
                await asyncio.wait([disconnect_task], timeout=FRAME_SECONDS)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            disconnect_task.cancel()

    async def frames(self) -> AsyncIterator[bytes]:
        cursor = 0
        while not self.service.draining:
            frame: dict[str, Any] = {
                "model": self.model.name,
                "state": model_state(self.service, self.model),
            }
            if frame["state"] == READY:
                llm = self.model.llm

                def look(llm=llm, since=cursor) -> dict[str, Any]:
                    return llm.live.look(llm.engine, since, self.tenant) | llm.metrics.recent(
                        llm.engine.clock()
                    )

                frame = await llm.call(look) | frame
                cursor = frame.pop("cursor")
            yield b"data: %b\n\n" % msgspec.json.encode(frame)


async def live(service: Service, request: Request) -> LivePage:
    return LivePage(
        service, service.models.find(request.query_params.get("model")), service.key(request)
    )


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
