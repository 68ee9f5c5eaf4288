"""Paths for operators, served with --admin: sleep, pause, caches and experts."""

from collections.abc import Callable
from functools import partial

from starlette.requests import Request

from ...api.errors import RequestError
from ...api.validation import integer, parse_digits
from ..errors import JsonResponse
from ..models import ASLEEP, READY, Model
from ..service import Service


def requested_model(service: Service, request: Request) -> Model:
    """The model that the query names, or the first."""
    return service.models.find(request.query_params.get("model"))


async def reset_prefix_cache(service: Service, request: Request) -> JsonResponse:
    async with service.models.use(request.query_params.get("model")) as model:
        return JsonResponse({"reset": await model.llm.reset_prefix_cache()})


async def sleep(service: Service, request: Request) -> JsonResponse:
    """Put a model to sleep; its running requests wait until it wakes up."""
    model = requested_model(service, request)
    level = integer("level", parse_digits(request.query_params.get("level", "1")), 1, 2)
    if model.state == READY:
        await service.models.move(model, ASLEEP, lambda: model.llm.sleep(level))
    return JsonResponse({"is_sleeping": model.state == ASLEEP})


async def wake_up(service: Service, request: Request) -> JsonResponse:
    async with service.models.use(request.query_params.get("model")):
        return JsonResponse({"is_sleeping": False})


async def is_sleeping(service: Service, request: Request) -> JsonResponse:
    return JsonResponse({"is_sleeping": requested_model(service, request).state == ASLEEP})


async def set_paused(service: Service, request: Request, is_paused: bool) -> JsonResponse:
    """Pause or resume a model.

    While paused, it accepts requests, which wait; running ones keep their progress.
    """
    model = requested_model(service, request)
    if model.loaded is None:
        raise RequestError("model", f"{model.name} is not loaded")
    thread = model.llm.thread

    def change() -> None:
        thread.paused = is_paused

    await model.llm.call(change)
    return JsonResponse({"is_paused": is_paused})


async def expert_loads(service: Service, request: Request) -> JsonResponse:
    async with service.models.use(request.query_params.get("model")) as model:
        return JsonResponse({"layers": await model.llm.expert_loads()})


async def rebalance_experts(service: Service, request: Request) -> JsonResponse:
    async with service.models.use(request.query_params.get("model")) as model:
        return JsonResponse(await model.llm.rebalance_experts())


ROUTES: dict[tuple[str, str], Callable] = {
    ("POST", "/reset_prefix_cache"): reset_prefix_cache,
    ("POST", "/sleep"): sleep,
    ("POST", "/wake_up"): wake_up,
    ("GET", "/is_sleeping"): is_sleeping,
    ("POST", "/pause"): partial(set_paused, is_paused=True),
    ("POST", "/resume"): partial(set_paused, is_paused=False),
    ("GET", "/expert_loads"): expert_loads,
    ("POST", "/rebalance_experts"): rebalance_experts,
}
