"""The processes of one engine: the leader, followers that repeat its calls, and their common
end.
"""

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
from .connection import BufferDeltas, ConnectionLost, HostConnection, frame

log = logging.getLogger("quire")

BEAT = 1.0  # seconds between heartbeats
SILENCE = 10.0  # seconds without a message after which a process counts as dead
GRACE = 1.0  # seconds for requests to receive their errors
EXIT = 75  # EX_TEMPFAIL of sysexits.h: the supervisor should restart the processes


class HostLost(RuntimeError):
    """A process of the engine is gone, so the engine has ended."""


class WatchedConnection:
    """Queues incoming messages; the connection is lost if none arrives for SILENCE seconds."""

    def __init__(self, connection: HostConnection, name: str, lost: Callable[[str], None]):
        self.connection = connection
        self.name = name
        self.lost = lost
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
            pass  # the listening thread reports it


class Leader:
    """Process 0, which sends each device call to the other processes before making it."""

    def __init__(self, connections: dict[int, HostConnection]):
        self.end_lock = threading.Lock()  # acquired once, by the first cause of the end
        self.is_loss_reported = threading.Event()  # a process is gone, and callers have been told
        self.on_loss: list[Callable[[Exception], None]] = []
        self.changes = BufferDeltas()  # of step buffers, the same for all processes
        self.sent_last = 0
        self.links: list[WatchedConnection] = []  # a loss may be reported before all links exist
        for index, connection in sorted(connections.items()):
            self.links.append(
                WatchedConnection(connection, f"process {index} at {connection.peer}", self.end)
            )

    def send(self, kind: str, *values: Any) -> None:
        """Send a call for the other processes to repeat."""
        data = frame(kind, *values)
        self.sent_last = len(data)
        for link in self.links:
            link.connection.send_frame(data)

    def step(self, size: tuple[int, ...], is_plain: bool, buffer: np.ndarray) -> None:
        """Send a step, as the difference to the last buffer."""
        self.send("step", size, is_plain, *self.changes.encode(size, buffer))

    def agree_on_budget(self, budget: int, device: str) -> int:
        """Return the smallest cache budget of all processes, and send it to them."""
        for link in self.links:
            kind, values = link.inbox.get()
            assert kind == "room", kind
            if values[1] != device:
                raise ModelError(
                    f"{link.name} computes on {values[1]}, and process 0 on {device}; they "
                    "must be alike"
                )
            budget = min(budget, values[0])
        self.send("room", budget)
        return budget

    def fail(self, reason: str) -> None:
        """Report a failed call. If a lost process caused it, that is reported instead."""
        if not self.is_loss_reported.wait(GRACE):
            self.end(reason)

    def end(self, reason: str) -> None:
        """End the engine in all processes: report to callers, and exit whatever the device does."""
        if not self.end_lock.acquire(blocking=False):
            return
        self.is_loss_reported.set()
        log.critical(
            "%s; the engine ends, and its processes must be started again together", reason
        )
        for report in self.on_loss:
            report(HostLost(reason))
        self.broadcast("failed", reason)
        threading.Thread(target=exit_process, args=(GRACE,), daemon=True).start()

    def abandon(self, reason: str) -> None:
        """Let the others end after a failed start, which the caller reports."""
        if self.end_lock.acquire(blocking=False):
            self.broadcast("failed", reason)

    def close(self) -> None:
        """Let the others end normally."""
        if self.end_lock.acquire(blocking=False):
            self.broadcast("end")

    def broadcast(self, kind: str, *values: Any) -> None:
        """Send to all processes that still exist."""
        for link in self.links:
            with suppress(ConnectionLost):
                link.connection.send(kind, *values)


class Follower:
    """The leader's counterpart in the other processes."""

    def __init__(self, connection: HostConnection):
        self.has_ended = False
        self.link = WatchedConnection(connection, f"process 0 at {connection.peer}", self.end)

    def agree_on_budget(self, budget: int, device: str) -> int:
        """Return the smallest cache budget of all processes."""
        self.link.connection.send("room", budget, device)
        kind, values = self.link.inbox.get()
        assert kind == "room", kind
        return values[0]

    def end(self, reason: str) -> None:
        """End this process because the leader is gone, whatever the device does."""
        if not self.has_ended:
            log.critical("%s; this process ends", reason)
            exit_process(0)

    def abandon(self, reason: str) -> None:
        """Tell the leader of a failed start, which the caller reports."""
        self.has_ended = True
        with suppress(ConnectionLost):
            self.link.connection.send("failed", reason)


def exit_process(delay: float) -> None:
    """End a process whose device may never answer, after `delay` seconds."""
    time.sleep(delay)
    logging.shutdown()
    os._exit(EXIT)
