"""Several processes, one engine: the first leads, the others repeat its calls, and all end together."""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from ...model.config import ModelError
from .connection import Changes, ConnectionLost, HostConnection, frame

log = logging.getLogger("quire")

BEAT = 1.0  # seconds between two heartbeats
SILENCE = 10.0  # seconds after which a process counts as dead
GRACE = 1.0  # seconds for requests to hear that they failed
EXIT = 75  # "try again later" of sysexits.h: what has started the processes is to start them again


class HostLost(RuntimeError):
    """A process of the engine is gone, so the engine has ended."""


class WatchedConnection:
    """Queues the messages that come; if none comes for SILENCE seconds the connection is lost."""

    def __init__(self, connection: HostConnection, name: str, lost: Callable[[str], None]):
        self.connection, self.name, self.lost = connection, name, lost
        self.inbox: queue.SimpleQueue[tuple[str, list[Any]]] = queue.SimpleQueue()
        for job in (self.listen, self.beat):
            threading.Thread(target=job, name=f"quire-{job.__name__}", daemon=True).start()

    def listen(self) -> None:
        try:
            while True:
                kind, values = self.connection.receive(SILENCE)
                if kind == "failed":
                    raise ConnectionLost(f"it failed: {values[0]}")
                if kind != "beat":
                    self.inbox.put((kind, values))
        except ConnectionLost as error:
            self.lost(f"{self.name} is gone: {error}")

    def beat(self) -> None:
        try:
            while True:
                time.sleep(BEAT)
                self.connection.send("beat")
        except ConnectionLost:
            pass  # who listens hears of it


class Leader:
    """The first process: it sends each call that it makes on the devices to the others, before it makes it."""

    def __init__(self, connections: dict[int, HostConnection]):
        self.over = threading.Lock()  # taken once
        self.noticed = threading.Event()  # a process is gone, and callers are told
        self.on_loss: list[Callable[[Exception], None]] = []
        self.changes, self.sent_last = Changes(), 0  # bytes to each of them
        self.links: list[WatchedConnection] = []  # a loss may be heard of before all are there
        for index, connection in sorted(connections.items()):
            self.links.append(WatchedConnection(connection, f"process {index} at {connection.peer}", self.end))

    def send(self, kind: str, *values: Any) -> None:
        """Let the other processes make this call."""
        data = frame(kind, *values)
        self.sent_last = len(data)
        for link in self.links:
            link.connection.send_frame(data)

    def step(self, size: tuple[int, ...], plain: bool, buffer: np.ndarray) -> None:
        """The same for a step: only what differs from the last buffer is sent."""
        self.send("step", size, plain, *self.changes.of(size, buffer))

    def least(self, budget: int, device: str) -> int:
        """The smallest cache budget of all processes."""
        for link in self.links:
            kind, values = link.inbox.get()
            assert kind == "room", kind
            if values[1] != device:
                raise ModelError(f"{link.name} computes on {values[1]}, and process 0 on {device}; they must be alike")
            budget = min(budget, values[0])
        self.send("room", budget)
        return budget

    def fail(self, why: str) -> None:
        """A call failed here. If the reason is a lost process, that is what is reported."""
        if not self.noticed.wait(GRACE):
            self.end(why)

    def end(self, why: str) -> None:
        """End the engine in all processes: tell those who wait, and leave whatever the device does."""
        if not self.over.acquire(blocking=False):
            return
        self.noticed.set()
        log.critical("%s; the engine ends, and its processes must be started again together", why)
        for tell in self.on_loss:
            tell(HostLost(why))
        self.tell("failed", why)
        threading.Thread(target=leave, args=(GRACE,), daemon=True).start()

    def abandon(self, why: str) -> None:
        """Starting failed, and the caller reports it: let the others end."""
        if self.over.acquire(blocking=False):
            self.tell("failed", why)

    def close(self) -> None:
        """Let the others end in good order."""
        if self.over.acquire(blocking=False):
            self.tell("end")

    def tell(self, kind: str, *values: Any) -> None:
        """Send to all that are still there."""
        for link in self.links:
            with suppress(ConnectionLost):
                link.connection.send(kind, *values)


class Follower:
    """The side of the other processes."""

    def __init__(self, connection: HostConnection):
        self.over = False
        self.link = WatchedConnection(connection, f"process 0 at {connection.peer}", self.end)

    def least(self, budget: int, device: str) -> int:
        """The smallest cache budget of all processes."""
        self.link.connection.send("room", budget, device)
        kind, values = self.link.inbox.get()
        assert kind == "room", kind
        return values[0]

    def end(self, why: str) -> None:
        """The leader is gone: end this process, whatever its device does."""
        if not self.over:
            log.critical("%s; this process ends", why)
            leave(0)

    def abandon(self, why: str) -> None:
        """Starting failed here, and the caller reports it: tell the leader."""
        self.over = True
        with suppress(ConnectionLost):
            self.link.connection.send("failed", why)


def leave(after: float) -> None:
    """End a process whose device may never answer."""
    time.sleep(after)
    logging.shutdown()
    os._exit(EXIT)
