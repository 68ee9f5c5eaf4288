"""Watches the event loop and the engines."""

import asyncio
import logging
from collections.abc import Callable

from .errors import HttpError
from .models import Model
from .service import Service

log = logging.getLogger("quire")


async def heartbeat(service: Service, beat: Callable[[float], None], pause: float = 0.05) -> None:
    """Watches the event loop and the engines: how late a timer is, and whether a step never ends."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + pause
        await asyncio.sleep(pause)
        beat(loop.time() - due)
        for model in service.models.ready():
            check_stall(model, service.settings.stall_seconds)


def check_stall(model: Model, most: float) -> None:
    """A step that hangs cannot be ended, but nobody has to wait for it."""
    thread = model.llm.thread
    if thread.stalled() > most and thread.awaited():
        log.error("model %s: a step has taken more than %g seconds; its requests end", model.name, most)
        thread.give_up(HttpError(503, "the engine does not answer", code="engine_stalled"))
