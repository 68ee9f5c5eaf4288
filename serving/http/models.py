"""The models of a server: loading them, waking them up, and putting one to sleep for another."""

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from ...model.config import ModelError
from ..api.lora import LoRARequest
from ..api.validation import shown
from ..async_llm import AsyncLLM
from ..build import on_host
from ..engine.engine import Engine
from ..engine.thread import EngineFailed
from .errors import HttpError

log = logging.getLogger("quire")

MIN_AWAKE_SECONDS = 5.0  # a model takes new requests for so long before it makes room for another
READY = "ready"
ASLEEP = "asleep"
UNLOADED = "unloaded"
MOVING = "loading"
FAILED = "failed"


GC_THRESHOLDS = (10_000, 20, 50)  # for gc.set_threshold: fewer collections than Python's defaults


def freeze_garbage_collector() -> None:
    """Exempt the objects that exist now from garbage collection: a full pass would take 0.1 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


@dataclass(eq=False)
class Model:
    """A model of the server: unloaded, asleep or awake.

    It stays awake while `users` is positive.
    """

    names: tuple[str, ...]  # answers use the first
    make: Callable[[], Engine]
    root: str = ""
    state: str = UNLOADED
    users: int = 0  # running requests
    waiters: int = 0  # requests that wait until it is awake
    last_used: float = 0.0  # when the last request ended
    woken_at: float = 0.0
    is_unserved: bool = False  # no request was served since it woke up
    loaded: AsyncLLM | None = None
    failure: str = ""
    failed_wakes: int = 0
    created: int = field(default_factory=lambda: int(time.time()))
    adapters: dict[str, LoRARequest] = field(default_factory=dict)  # by the model names in requests

    @property
    def llm(self) -> AsyncLLM:
        assert self.loaded is not None, "a model is used that was not asked for"
        return self.loaded

    @property
    def name(self) -> str:
        return self.names[0]

    def check_stall(self, max_seconds: float) -> None:
        """Fail all requests if a step takes more than `max_seconds`; the step cannot be ended."""
        thread = self.llm.thread
        if thread.stalled() > max_seconds and thread.awaited():
            log.error(
                "model %s: a step has taken more than %g seconds; its requests end",
                self.name,
                max_seconds,
            )
            thread.give_up(HttpError(503, "the engine does not answer", code="engine_stalled"))


class Models:
    """Wakes models up for requests, at most `max_awake` at once.

    The least recently used one is put to sleep.
    """

    def __init__(self, models: Sequence[Model], max_awake: int | None = None):
        self.models = list(models)
        self.max_awake = max_awake or len(models)
        self.changed = asyncio.Condition()
        self.started = False  # a model has been ready

    def find(self, name: str | None) -> Model:
        """The model with this name or with an adapter of this name; None: the first model."""
        for model in self.models:
            if name is None or name in model.names or name in model.adapters:
                return model
        raise self.unknown(name)

    def unknown(self, name: str | None) -> HttpError:
        model_names = ", ".join(model.name for model in self.models)
        return HttpError(
            404,
            f"model: there is no {shown(name)}; there is {model_names}",
            "model",
            "model_not_found",
        )

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[Model]:
        """Wake a model up, and keep it awake inside the `async with`."""
        model = self.find(name)
        model.waiters += 1
        try:
            await self.wait_until_awake(model)
        finally:
            model.waiters -= 1
        model.users += 1
        model.is_unserved = False
        try:
            yield model
        finally:
            model.users -= 1
            model.last_used = time.monotonic()
            async with self.changed:
                self.changed.notify_all()

    async def wait_until_awake(self, model: Model) -> None:
        """Load a model or wake it up as soon as there is room; raise HttpError if that fails."""
        failed_before = model.failed_wakes
        while model.state != READY or self.must_yield(model):
            if model.state == FAILED:
                # `failure` may contain paths
                reason = "cannot be loaded; the server's log says why"
                raise HttpError(503, f"model {model.name} {reason}", "model", "model_failed")
            if model.failed_wakes > failed_before:
                reason = (
                    "could not be woken up; the server's log says why. It sleeps, and the "
                    "next request tries again"
                )
                raise HttpError(
                    503,
                    f"model {model.name} {reason}",
                    "model",
                    "model_failed",
                    {"Retry-After": "5"},
                )
            if model.state in (MOVING, READY):
                await self.wait_for_change()
            elif (model_to_sleep := self.model_to_sleep()) is not None:
                await self.move(
                    model_to_sleep,
                    ASLEEP,
                    lambda model_to_sleep=model_to_sleep: self.put_to_sleep(model_to_sleep),
                )
            elif self.num_awake() < self.max_awake:
                await self.move(model, READY, lambda: self.wake(model))
            else:
                await self.wait_for_change()
        if model.llm.thread.failure is not None:
            raise EngineFailed(f"model {model.name}: the engine has stopped")

    def must_yield(self, model: Model) -> bool:
        """Whether a model takes no new requests because requests for others wait."""
        return (
            time.monotonic() - model.woken_at > MIN_AWAKE_SECONDS
            and self.num_awake() >= self.max_awake
            and any(
                waiting_model.waiters and waiting_model.state in (ASLEEP, UNLOADED)
                for waiting_model in self.models
            )
        )

    async def wait_for_change(self) -> None:
        async with self.changed:
            await self.changed.wait()

    def num_awake(self) -> int:
        return sum(model.state in (READY, MOVING) for model in self.models)

    def is_any_moving(self) -> bool:
        """Whether some model is being loaded, woken up or put to sleep."""
        return any(model.state == MOVING for model in self.models)

    def model_to_sleep(self) -> Model | None:
        """The idle model to put to sleep for another; None if none is idle, or if there is room."""
        idle = [
            model
            for model in self.models
            if model.state == READY
            and not model.users
            and not (model.is_unserved and model.waiters)
        ]
        return (
            min(idle, key=lambda model: model.last_used)
            if self.num_awake() >= self.max_awake and idle
            else None
        )

    async def move(self, model: Model, state: str, change: Callable[[], Any]) -> None:
        """Run `change`, then set `state`.

        It is not cancelled with the caller, since other requests wait for it.
        """
        model.state = MOVING

        async def run() -> None:
            try:
                await change()
                model.state = state
                model.woken_at = time.monotonic()
                model.is_unserved = True
                self.started = True
            except Exception as error:
                if state == READY and model.loaded is not None:
                    model.state = ASLEEP
                    model.failed_wakes += 1
                    log.exception("model %s: it could not be woken up", model.name)
                    return
                of_user = isinstance(error, ModelError)
                model.failure = str(error) if of_user else "the model cannot be loaded"
                model.state = FAILED
                # Else `load_first` raises it.
                if not (of_user and model is self.models[0] and not self.started):
                    log.error("model %s: %s", model.name, error, exc_info=not of_user)
            finally:
                async with self.changed:
                    self.changed.notify_all()

        await asyncio.shield(asyncio.create_task(run()))

    async def wake(self, model: Model) -> None:
        if model.loaded is None:
            model.loaded = AsyncLLM(engine=await asyncio.to_thread(model.make))
            freeze_garbage_collector()
        else:
            await model.loaded.wake_up()

    async def put_to_sleep(self, model: Model) -> None:
        """Sleep at level 1; on CPUs at level 2, since offloading to host memory frees nothing."""
        await model.llm.sleep(2 if on_host() else 1)

    def ready(self) -> list[Model]:
        """The models whose engines exist, awake or asleep."""
        return [model for model in self.models if model.loaded is not None]

    def close(self) -> None:
        for model in self.ready():
            model.llm.close()
