"""What the engine does when: a file that ui.perfetto.dev and chrome://tracing show."""

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..engine.scheduler import StepPlan
from ..request.request import Request

log = logging.getLogger("quire")

HOST, DEVICE = 1, 2


class NoTrace:
    """Where nobody wants to know."""

    def begin(self) -> None:
        """A turn of the engine's loop begins."""

    def lap(self, name: str) -> None:
        """This is what was done since the last lap."""

    def launched(self, plan: StepPlan) -> None:
        """A step is on its way to the device."""

    def collected(self) -> None:
        """The results of the step launched longest ago are there."""

    def end(self, requests: Iterable[Request], **counts: float) -> None:
        """The turn is over; requests that it ended are among these."""

    def failed(self) -> None:
        """The steps under way give no results."""

    def close(self) -> None:
        """Nothing more comes."""


class Trace(NoTrace):
    """Events are written as they come, so that what a killed process has written can be read too.

        host      [schedule][launch n+1][collect n .....][update]
        device     step n ..............................][ step n+1 ....

    A step on the device begins when it was launched and the one before it was done, and ends when its results were
    there for the host: where the host comes late, that is late too.
    """

    def __init__(self, path: Path, clock: Callable[[], float]):
        self.clock, self.number, self.at, self.free = clock, 0, 0.0, 0.0
        self.flying: deque[tuple[int, StepPlan, float]] = deque()
        self.file = open(path, "w", buffering=1)  # noqa: SIM115 - open as long as the engine is
        self.broken = False
        self.put("[\n")
        for lane, name in ((HOST, "host"), (DEVICE, "device")):
            self.write("thread_name", "M", tid=lane, args={"name": name})

    def begin(self) -> None:
        self.at = self.clock()

    def lap(self, name: str) -> None:
        now = self.clock()
        self.span(name, HOST, self.at, now)
        self.at = now

    def launched(self, plan: StepPlan) -> None:
        self.lap("launch")
        self.flying.append((self.number, plan, self.at))
        self.number += 1

    def collected(self) -> None:
        self.lap("collect")
        number, plan, launched = self.flying.popleft()
        facts = {"sequences": len(plan.items), "rows": plan.num_rows, "decodes": plan.decodes}
        self.span(f"step {number}", DEVICE, max(launched, self.free), self.at, **facts)
        self.free = self.at

    def end(self, requests: Iterable[Request], **counts: float) -> None:
        self.lap("update")
        for name, value in counts.items():
            self.write(name, "C", ts=micro(self.at), args={name: value})
        for request in requests:
            if request.finished:
                self.request(request)

    def request(self, request: Request) -> None:
        """How long it waited, was read and was written."""
        starts = [request.arrival, request.first_scheduled, request.first_token]
        ends = [request.first_scheduled, request.first_token, request.last_token]
        for name, start, end in zip(("wait", "read", "write"), starts, ends, strict=True):
            if start is not None:
                own: dict[str, Any] = {"cat": "request", "id": request.request_id}
                self.write(name, "b", ts=micro(start), **own, args=request.facts())
                self.write(name, "e", ts=micro(self.at if end is None else end), **own)

    def failed(self) -> None:
        self.flying.clear()

    def close(self) -> None:
        self.put("{}]\n")
        with suppress(OSError):  # what it could not write is told already
            self.file.close()

    def span(self, name: str, lane: int, start: float, end: float, **facts: Any) -> None:
        self.write(name, "X", tid=lane, ts=micro(start), dur=micro(end) - micro(start), args=facts)

    def write(self, name: str, phase: str, **fields: Any) -> None:
        self.put(json.dumps({"name": name, "ph": phase, "pid": 1, **fields}, separators=(",", ":")) + ",\n")

    def put(self, line: str) -> None:
        """Requests go on when the trace cannot."""
        if self.broken:
            return
        try:
            self.file.write(line)
        except OSError as error:
            self.broken = True
            log.warning("the trace %s ends here: %s", self.file.name, error.strerror)


def micro(seconds: float) -> int:
    return round(seconds * 1e6)
