"""Brings what the engine's thread has for its readers into their event loops, much at a time."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..request.request import Request

EACH = 0.0015  # seconds between two deliveries, for each reader: what they cost together stays a small share of a core
PACE = 0.1  # seconds at most
SLICE = 8  # readers woken between two looks of the loop at everything else


class Inbox:
    """What a reader has not taken yet. Used in its event loop only."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.items: list[Any] = []
        self.filled = asyncio.Event()
        self.heard = False  # something came since the last reminder

    def put(self, item: Any) -> None:
        self.items.append(item)
        self.heard = True
        self.filled.set()

    @contextmanager
    def reminded(self, pause: float) -> Iterator[None]:
        """Who takes gets an empty list when nothing has come for a while."""
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
        """Everything that is there, as soon as there is something; or nothing, as a reminder."""
        await self.filled.wait()
        self.filled.clear()
        items, self.items = self.items, []
        return items


class Listener:
    """Who wants to know of a request: what is read of it and where it goes."""

    def __init__(self, inbox: Inbox, index: int, read: Callable[[Request], Any], at_end: bool = False):
        self.inbox, self.index, self.read, self.at_end = inbox, index, read, at_end
        self.begun = False


class Outbox:
    """The engine's thread notes which requests have news, and now and then sends it all."""

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self.listeners: dict[str, Listener] = {}
        self.news: dict[str, Request] = {}
        self.urgent: set[str] = set()  # of those with news, who begin or end: these do not wait
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
        """Hand over what there is, when the last delivery is over and time has passed; before that what is urgent."""
        if self.news and not self.delivering():
            if self.clock() - self.sent >= min(EACH * len(self.listeners), PACE):
                self.send()
            elif self.urgent:
                self.hand_over({name: self.news.pop(name) for name in self.urgent})

    def delivering(self) -> bool:
        """Whether a loop has not yet given its readers all it was handed."""
        for loop in [loop for loop in self.on_the_way if loop.is_closed()]:
            del self.on_the_way[loop]
        return any(self.on_the_way.values())

    def send(self) -> None:
        """Hand over everything."""
        self.sent = self.clock()
        news, self.news = self.news, {}
        self.hand_over(news)

    def hand_over(self, news: dict[str, Request]) -> None:
        self.urgent.clear()
        loops: set[asyncio.AbstractEventLoop] = set()
        for name, request in news.items():
            listener = self.listeners.pop(name, None) if request.finished else self.listeners.get(name)
            if listener is not None:
                loop, item = listener.inbox.loop, (listener.index, listener.read(request))
                self.on_the_way.setdefault(loop, deque()).append((listener.inbox, item))
                loops.add(loop)
        for loop in loops:
            with suppress(RuntimeError):  # the loop is closed, and its readers with it
                loop.call_soon_threadsafe(self.deliver, loop)

    def deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the readers' loop, in the order of handing over also where one delivery overtakes another."""
        queue = self.on_the_way[loop]
        for _ in range(min(len(queue), SLICE)):
            inbox, item = queue.popleft()
            inbox.put(item)
        if queue:
            loop.call_soon(self.deliver, loop)

    def give_up(self, error: Exception) -> None:
        """Tell every reader that nothing more comes. From any thread: the engine's may hang."""
        listeners = list(self.listeners.values())
        self.listeners.clear()
        for listener in listeners:
            with suppress(RuntimeError):
                listener.inbox.loop.call_soon_threadsafe(listener.inbox.put, error)
