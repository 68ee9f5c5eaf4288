"""The events of an answer in the background: readers come, go and come again, and it goes on without them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from ..observe.metrics import HttpMetrics
from .answering import ALIVE, EVENTS, QUIET, until_gone
from .connection import Connection


class Recording:
    """The events so far. One event loop uses it."""

    def __init__(self):
        self.events: list[bytes] = []
        self.size = 0  # bytes
        self.over = False
        self.news = asyncio.Event()

    def add(self, data: bytes) -> None:
        self.events += [event + b"\n\n" for event in data.split(b"\n\n") if event and data != ALIVE]
        self.size += len(data)
        self.wake()

    def end(self) -> None:
        self.over = True
        self.wake()

    def wake(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    async def read(self, start: int) -> AsyncIterator[bytes]:
        """The events from this one on until the last; a comment where there was none for long."""
        while True:
            if found := self.events[start:]:
                start += len(found)
                yield b"".join(found)
            elif self.over:
                return
            else:
                try:
                    await asyncio.wait_for(self.news.wait(), QUIET)
                except TimeoutError:
                    yield ALIVE


class Replay:
    """A response of server-sent events that were recorded, or are being recorded."""

    def __init__(self, recording: Recording, start: int, metrics: HttpMetrics):
        self.recording, self.start, self.metrics = recording, start, metrics

    async def __call__(self, scope, receive, send) -> None:
        self.metrics.streams += 1
        copying = asyncio.create_task(self.copy(scope["state"]["connection"], send))
        gone = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait((copying, gone), return_when=asyncio.FIRST_COMPLETED)
            if not copying.done():
                scope["state"]["facts"]["ended"] = "client left"
                copying.cancel()
            with suppress(asyncio.CancelledError):
                await copying
        finally:
            copying.cancel()
            gone.cancel()
            self.metrics.streams -= 1

    async def copy(self, connection: Connection, send: Callable) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*EVENTS]})
        async for data in self.recording.read(self.start):
            await connection.write(data)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
