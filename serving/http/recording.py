"""Recorded events of background answers, which clients may read repeatedly."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from ..observe.metrics import HttpMetrics
from .answering import EVENTS, KEEPALIVE_EVENT, KEEPALIVE_SECONDS, wait_for_disconnect
from .connection import Connection


class Recording:
    """The events of one answer so far. Only one event loop uses it."""

    def __init__(self):
        self.events: list[bytes] = []
        self.size = 0  # bytes
        self.is_finished = False
        self.changed = asyncio.Event()

    def add(self, data: bytes) -> None:
        self.events += [
            event + b"\n\n" for event in data.split(b"\n\n") if event and data != KEEPALIVE_EVENT
        ]
        self.size += len(data)
        self.wake()

    def end(self) -> None:
        self.is_finished = True
        self.wake()

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def read(self, start: int) -> AsyncIterator[bytes]:
        """Yield the events from number `start` on, and keepalive comments while there are none."""
        while True:
            if new_events := self.events[start:]:
                start += len(new_events)
                yield b"".join(new_events)
            elif self.is_finished:
                return
            else:
                try:
                    await asyncio.wait_for(self.changed.wait(), KEEPALIVE_SECONDS)
                except TimeoutError:
                    yield KEEPALIVE_EVENT


class Replay:
    """A response of server-sent events from a recording, which may still grow."""

    def __init__(self, recording: Recording, start: int, metrics: HttpMetrics):
        self.recording = recording
        self.start = start
        self.metrics = metrics

    async def __call__(self, scope, receive, send) -> None:
        self.metrics.streams += 1
        copy_task = asyncio.create_task(self.copy(scope["state"]["connection"], send))
        disconnect_task = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait((copy_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
            if not copy_task.done():
                scope["state"]["facts"]["ended"] = "client left"
                copy_task.cancel()
            with suppress(asyncio.CancelledError):
                await copy_task
        finally:
            copy_task.cancel()
            disconnect_task.cancel()
            self.metrics.streams -= 1

    async def copy(self, connection: Connection, send: Callable) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*EVENTS]})
        async for data in self.recording.read(self.start):
            await connection.write(data)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
