"""Timeline of the engine as a file for ui.perfetto.dev and chrome://tracing."""

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..engine.step_record import Observer, StepRecord
from ..request.request import Request

log = logging.getLogger("quire")

HOST = 1  # rows of the timeline
DEVICE = 2


class Trace(Observer):
    """Writes events as they happen, so that the file of a killed process is readable too.

        host      [schedule][launch n+1][collect n .....][update]
        device     step n ..............................][ step n+1 ....

    A step on the device starts when it is launched and the previous step has ended, and ends when
    the host has its results, so a late host makes steps appear longer.
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
            facts = {
                "sequences": len(plan.items),
                "rows": plan.num_tokens,
                "decodes": plan.decodes,
                "steps": plan.steps,
            }
            if verified := [output for output in result.outputs if output.item.draft_tokens]:
                facts["drafts"] = sum(len(output.item.draft_tokens) for output in verified)
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
        """Write how long a request waited, its prompt was computed, and its answer was
        generated.
        """
        start_times = [request.arrival, request.first_scheduled, request.first_token]
        end_times = [request.first_scheduled, request.first_token, request.last_token]
        for name, start, end in zip(("wait", "read", "write"), start_times, end_times, strict=True):
            if start is not None:
                fields: dict[str, Any] = {"cat": "request", "id": request.request_id}
                self.write(name, "b", ts=micro(start), **fields, args=request.facts())
                self.write(name, "e", ts=micro(ended if end is None else end), **fields)

    def close(self) -> None:
        self.put("{}]\n")
        with suppress(OSError):  # the error has been logged already
            self.file.close()

    def span(self, name: str, row: int, start: float, end: float, **facts: Any) -> None:
        self.write(name, "X", tid=row, ts=micro(start), dur=micro(end) - micro(start), args=facts)

    def write(self, name: str, phase: str, **fields: Any) -> None:
        self.put(
            json.dumps({"name": name, "ph": phase, "pid": 1, **fields}, separators=(",", ":"))
            + ",\n"
        )

    def put(self, line: str) -> None:
        """Write a line; after an error, disable the trace instead of failing requests."""
        if self.broken:
            return
        try:
            self.file.write(line)
        except OSError as error:
            self.broken = True
            log.warning("the trace %s ends here: %s", self.file.name, error.strerror)


def micro(seconds: float) -> int:
    return round(seconds * 1e6)
