"""What the engine does when: a file that ui.perfetto.dev and chrome://tracing show."""

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..engine.step_record import Observer, StepRecord
from ..request.request import Request

log = logging.getLogger("quire")

HOST, DEVICE = 1, 2  # the rows of the picture


class Trace(Observer):
    """Events are written as they come, so that what a killed process has written can be read too.

        host      [schedule][launch n+1][collect n .....][update]
        device     step n ..............................][ step n+1 ....

    A step on the device begins when it was launched and the one before it was done, and ends when its results were
    there for the host: where the host comes late, that is late too.
    """

    def __init__(self, path: Path):
        self.number = 0  # of the next step whose results come
        self.file = open(path, "w", buffering=1)  # noqa: SIM115 - open as long as the engine is
        self.broken = False
        self.put("[\n")
        for row, name in ((HOST, "host"), (DEVICE, "device")):
            self.write("thread_name", "M", tid=row, args={"name": name})

    def observe(self, record: StepRecord) -> None:
        if (step := record.launched) is not None:
            self.span("schedule", HOST, step.began, step.scheduled)
            self.span("launch", HOST, step.scheduled, step.launched)
        if (result := record.result) is not None:
            self.span("collect", HOST, result.began, result.collected)
            plan = result.plan
            facts = {"sequences": len(plan.items), "rows": plan.num_rows, "decodes": plan.decodes, "steps": plan.steps}
            if verified := [output for output in result.outputs if output.item.drafts]:
                facts["drafts"] = sum(output.item.num_drafts for output in verified)
                facts["accepted"] = sum(output.num_accepted for output in verified)
            self.span(f"step {self.number}", DEVICE, result.device_began, result.collected, **facts)
            self.number += 1
            self.span("update", HOST, result.collected, record.ended)
        for name, value in (("running", record.running), ("waiting", record.waiting)):
            self.write(name, "C", ts=micro(record.ended), args={name: value})
        for request in record.changed:
            if request.finished:
                self.request(request, record.ended)

    def request(self, request: Request, ended: float) -> None:
        """How long it waited, its prompt was read, and its answer was written."""
        starts = [request.arrival, request.first_scheduled, request.first_token]
        ends = [request.first_scheduled, request.first_token, request.last_token]
        for name, start, end in zip(("wait", "read", "write"), starts, ends, strict=True):
            if start is not None:
                own: dict[str, Any] = {"cat": "request", "id": request.request_id}
                self.write(name, "b", ts=micro(start), **own, args=request.facts())
                self.write(name, "e", ts=micro(ended if end is None else end), **own)

    def close(self) -> None:
        self.put("{}]\n")
        with suppress(OSError):  # that it cannot be written has been logged
            self.file.close()

    def span(self, name: str, row: int, start: float, end: float, **facts: Any) -> None:
        self.write(name, "X", tid=row, ts=micro(start), dur=micro(end) - micro(start), args=facts)

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
