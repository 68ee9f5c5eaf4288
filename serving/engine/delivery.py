"""Passes updates from the engine's thread to readers in event loops, in batches."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..request.request import Request

# seconds between two deliveries, for each reader: what they cost together stays a small share of a
# core
EACH = 0.0015
PACE = 0.1  # seconds at most
SLICE = 8  # readers woken before the loop may do something else


class Inbox:
    """The unread updates of a reader; used in its event loop only."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.items: list[Any] = []
        self.filled = asyncio.Event()
        self.heard = False  # something came since the last reminder
        # of the next reminder, while somebody wants any
        self.timer: asyncio.TimerHandle | None = None

    def put(self, item: Any) -> None:
        self.items.append(item)
        self.heard = True
        self.filled.set()

    @contextmanager
    def reminded(self, pause: float) -> Iterator[None]:
        """In this context `take` returns an empty list after `pause` seconds without an update."""
        self.timer = self.loop.call_later(pause, self.remind, pause)
        try:
            yield
        finally:
            self.timer.cancel()

    def remind(self, pause: float) -> None:
        if not self.heard:
            self.filled.set()
        self.heard = False
        self.timer = self.loop.call_later(pause, self.remind, pause)

    async def take(self) -> list[Any]:
        """Wait for updates and return them all; empty as a reminder."""
        await self.filled.wait()
        self.filled.clear()
        items, self.items = self.items, []
        return items


class Listener:
    """A reader of one request."""

    def __init__(
        self, inbox: Inbox, index: int, read: Callable[[Request], Any], at_end: bool = False
    ):
        self.inbox = inbox
        self.index = index
        self.read = read
        self.at_end = at_end
        self.begun = False


class Outbox:
    """Collects requests with updates, and flushes the updates of all of them together."""

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self.listeners: dict[str, Listener] = {}
        self.news: dict[str, Request] = {}
        # those with news whose answer begins or ends: they do not wait
        self.urgent: set[str] = set()
        self.sent = -PACE
        self.on_the_way: dict[asyncio.AbstractEventLoop, deque[tuple[Inbox, Any]]] = {}

    def note(self, requests: Iterable[Request]) -> None:
        for request in requests:
            listener = self.listeners.get(request.request_id)
            if listener is not None and (request.finished or not listener.at_end):
                name = request.request_id
                self.news[name] = request
                if request.finished or not listener.begun:
                    listener.begun = True
                    self.urgent.add(name)

    def deliver_due(self) -> None:
        """Flush the updates if the last batch has been read and its interval is over; otherwise
        only urgent ones.
        """
        if self.news and not self.delivering():
            if self.clock() - self.sent >= min(EACH * len(self.listeners), PACE):
                self.send()
            elif self.urgent:
                self.hand_over({name: self.news.pop(name) for name in self.urgent})

    def delivering(self) -> bool:
        """Whether an event loop has not yet processed all that it was sent."""
        for loop in [loop for loop in self.on_the_way if loop.is_closed()]:
            del self.on_the_way[loop]
        return any(self.on_the_way.values())

    def send(self) -> None:
        """Send all updates."""
        self.sent = self.clock()
        news, self.news = self.news, {}
        self.hand_over(news)

    def hand_over(self, news: dict[str, Request]) -> None:
        self.urgent.clear()
        loops: set[asyncio.AbstractEventLoop] = set()
        for name, request in news.items():
            listener = (
                self.listeners.pop(name, None) if request.finished else self.listeners.get(name)
            )
            if listener is not None:
                loop = listener.inbox.loop
                item = (listener.index, listener.read(request))
                self.on_the_way.setdefault(loop, deque()).append((listener.inbox, item))
                loops.add(loop)
        for loop in loops:
            with suppress(RuntimeError):  # the loop is closed, and its readers with it
                loop.call_soon_threadsafe(self.deliver, loop)

    def deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the readers' loop: fill their inboxes in the order in which items were handed over."""
        queue = self.on_the_way[loop]
        for _ in range(min(len(queue), SLICE)):
            inbox, item = queue.popleft()
            inbox.put(item)
        if queue:
            loop.call_soon(self.deliver, loop)

    def give_up(self, error: Exception) -> None:
        """Tell every reader that nothing more comes; from any thread, since the engine's may hang."""
        listeners = list(self.listeners.values())
        self.listeners.clear()
        for listener in listeners:
            with suppress(RuntimeError):
                listener.inbox.loop.call_soon_threadsafe(listener.inbox.put, error)
