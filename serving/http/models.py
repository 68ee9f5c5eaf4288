"""The models of a server: which are loaded, which are awake, and which is put to sleep for another."""

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

TURN = 5.0  # seconds for which a model takes new requests before it is put to sleep for one that others wait for
READY, ASLEEP, UNLOADED, MOVING, FAILED = "ready", "asleep", "unloaded", "loading", "failed"


YOUNG = (10_000, 20, 50)  # objects before the collector looks, and how much rarer it looks at older ones


def settle() -> None:
    """Exempt what is there now from garbage collection: a full pass stops everything for a tenth of a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*YOUNG)


@dataclass(eq=False)
class Model:
    """A model of the server: unloaded, asleep or awake; `users` keep it awake."""

    names: tuple[str, ...]  # the first is what answers call it
    make: Callable[[], Engine]
    root: str = ""
    state: str = UNLOADED
    users: int = 0  # requests that it serves
    waiters: int = 0  # requests that wait until it is awake
    used: float = 0.0  # when the last of them was done
    woken: float = 0.0
    fresh: bool = False  # it has served nobody since it woke up
    loaded: AsyncLLM | None = None
    why: str = ""
    failed_wakes: int = 0  # attempts to wake it up that failed
    created: int = field(default_factory=lambda: int(time.time()))
    adapters: dict[str, LoRARequest] = field(default_factory=dict)  # by the names that requests give

    @property
    def llm(self) -> AsyncLLM:
        assert self.loaded is not None, "a model is used that was not asked for"
        return self.loaded

    @property
    def name(self) -> str:
        return self.names[0]

    def check_stall(self, most: float) -> None:
        """A step that hangs for more than `most` seconds cannot be ended, but nobody has to wait for it."""
        thread = self.llm.thread
        if thread.stalled() > most and thread.awaited():
            log.error("model %s: a step has taken more than %g seconds; its requests end", self.name, most)
            thread.give_up(HttpError(503, "the engine does not answer", code="engine_stalled"))


class Models:
    """Hands out models that are awake, at most `most` at once: the least recently used is put to sleep first."""

    def __init__(self, models: Sequence[Model], most: int | None = None):
        self.models, self.most = list(models), most or len(models)
        self.changed = asyncio.Condition()
        self.started = False  # a model has been ready

    def find(self, name: str | None) -> Model:
        """By any of its names; without one, the first."""
        for model in self.models:
            if name is None or name in model.names or name in model.adapters:
                return model
        raise self.unknown(name)

    def unknown(self, name: str | None) -> HttpError:
        known = ", ".join(model.name for model in self.models)
        return HttpError(404, f"model: there is no {shown(name)}; there is {known}", "model", "model_not_found")

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[Model]:
        """A model that is awake until this is left."""
        model = self.find(name)
        model.waiters += 1
        try:
            await self.awake(model)
        finally:
            model.waiters -= 1
        model.users, model.fresh = model.users + 1, False
        try:
            yield model
        finally:
            model.users -= 1
            model.used = time.monotonic()
            async with self.changed:
                self.changed.notify_all()

    async def awake(self, model: Model) -> None:
        """Load it or wake it up, when there is room; who waits for an attempt that fails is told so."""
        failed_before = model.failed_wakes
        while model.state != READY or self.owes(model):
            if model.state == FAILED:
                why = "cannot be loaded; the server's log says why"  # what it says names files
                raise HttpError(503, f"model {model.name} {why}", "model", "model_failed")
            if model.failed_wakes > failed_before:
                why = "could not be woken up; the server's log says why. It sleeps, and the next request tries again"
                raise HttpError(503, f"model {model.name} {why}", "model", "model_failed", {"Retry-After": "5"})
            if model.state in (MOVING, READY):
                await self.change()
            elif (victim := self.victim()) is not None:
                await self.move(victim, ASLEEP, lambda victim=victim: self.to_sleep(victim))
            elif self.num_awake() < self.most:
                await self.move(model, READY, lambda: self.wake(model))
            else:
                await self.change()
        if model.llm.thread.failure is not None:
            raise EngineFailed(f"model {model.name}: the engine has stopped")

    def owes(self, model: Model) -> bool:
        """Whether it has had its turn, and others wait for theirs."""
        return (
            time.monotonic() - model.woken > TURN
            and self.num_awake() >= self.most
            and any(other.waiters and other.state in (ASLEEP, UNLOADED) for other in self.models)
        )

    async def change(self) -> None:
        async with self.changed:
            await self.changed.wait()

    def num_awake(self) -> int:
        return sum(model.state in (READY, MOVING) for model in self.models)

    def moving(self) -> bool:
        """Whether a model is being loaded, woken up or put to sleep."""
        return any(model.state == MOVING for model in self.models)

    def victim(self) -> Model | None:
        """Who is to sleep so that another can wake up."""
        idle = [
            model
            for model in self.models
            if model.state == READY and not model.users and not (model.fresh and model.waiters)
        ]
        return min(idle, key=lambda model: model.used) if self.num_awake() >= self.most and idle else None

    async def move(self, model: Model, to: str, job: Callable[[], Any]) -> None:
        """The change itself goes on when its caller has gone: others may wait for it."""
        model.state = MOVING

        async def run() -> None:
            try:
                await job()
                model.state, model.woken, model.fresh = to, time.monotonic(), True
                self.started = True
            except Exception as error:
                if to == READY and model.loaded is not None:
                    model.state = ASLEEP
                    model.failed_wakes += 1
                    log.exception("model %s: it could not be woken up", model.name)
                    return
                of_user = isinstance(error, ModelError)
                model.state, model.why = FAILED, str(error) if of_user else "the model cannot be loaded"
                if not (of_user and model is self.models[0] and not self.started):  # else `load_first` raises it
                    log.error("model %s: %s", model.name, error, exc_info=not of_user)
            finally:
                async with self.changed:
                    self.changed.notify_all()

        await asyncio.shield(asyncio.create_task(run()))

    async def wake(self, model: Model) -> None:
        if model.loaded is None:
            model.loaded = AsyncLLM(engine=await asyncio.to_thread(model.make))
            settle()
        else:
            await model.loaded.wake_up()

    async def to_sleep(self, model: Model) -> None:
        """On a CPU the weights are dropped: in the host's memory they are already."""
        await model.llm.sleep(2 if on_host() else 1)

    def ready(self) -> list[Model]:
        """Those whose engines exist."""
        return [model for model in self.models if model.loaded is not None]

    def close(self) -> None:
        for model in self.ready():
            model.llm.close()
