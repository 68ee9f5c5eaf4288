"""Data of the live page: an engine's pages, requests and recent steps."""

import heapq
from collections import deque
from itertools import islice
from typing import Any

import numpy as np

from ..engine.engine import Engine
from ..engine.snapshot import (
    BLANK,
    CACHED,
    SHARED,
    Occupancy,
    PageCounts,
    take_occupancy,
    take_snapshot,
)
from ..engine.step_record import Observer, StepRecord
from ..request.request import Request
from ..request.sequence import Sequence

STEPS = 512  # number of steps that are kept
PATIENCE = 10.0  # seconds after a look during which steps are recorded
CELLS = 2048  # cells per cache group
MAX_LISTED = 64  # running and waiting requests that are listed
INT32_MAX = np.iinfo(np.int32).max


class LiveView(Observer):
    """Records steps while somebody looks at the page."""

    def __init__(self):
        self.steps: deque[tuple[float, int, int, int, float, int, int]] = deque(maxlen=STEPS)
        self.count = 0  # steps ever recorded
        self.watched_until = 0.0
        self.numbers: dict[Request, int] = {}
        self.spare: list[int] = []  # heap of numbers to be reused

    def observe(self, record: StepRecord) -> None:
        if not self.watched_until or (result := record.result) is None:
            return
        now = result.collected
        plan = result.plan
        if now < self.watched_until:
            known = [item.num_tokens - len(item.draft_tokens) for item in plan.items]
            count = plan.steps
            began = result.device_began
            rows = plan.num_tokens // plan.steps
            drafts = rows - sum(known)
            seconds = (now - began) / count
            accepted = sum(output.num_accepted for output in result.outputs) if drafts else 0
            for number in range(1, count + 1):
                ended = began + number * seconds
                self.steps.append(
                    (ended, rows, known.count(1), len(known), seconds, drafts, accepted)
                )
            self.count += count
        else:
            self.watched_until = 0.0
            self.steps.clear()
            self.numbers.clear()
            self.spare.clear()

    def look(self, engine: Engine, since: int = 0, tenant: str | None = None) -> dict[str, Any]:
        """Return everything; called in the engine's thread between two steps.

        Args:
            since: The cursor that the previous look returned.
            tenant: Only requests of this tenant are shown with their ids.
        """
        now = take_snapshot(engine)
        has = take_occupancy(engine, MAX_LISTED)
        self.watched_until = now.now + PATIENCE
        self.assign_numbers(has)
        new = min(max(0, self.count - since), len(self.steps))
        has_replicas = any(group.replica > 0 for group in now.pages)
        return {
            "t": now.now,
            "page_size": now.page_size,
            "limits": {
                "max_seqs": now.max_seqs,
                "max_rows": now.max_tokens,
                "max_len": now.max_len,
                "max_images": 0 if engine.media_reader is None else engine.media_reader.max_images,
            },
            "defaults": dict(engine.chat_defaults),
            "groups": [
                self.group_cells(counts, owners, has, has_replicas)
                for counts, owners in zip(now.pages, has.pages, strict=True)
            ],
            "used": now.pages_used,
            "drafts": now.drafts
            and (now.drafts.proposals, now.drafts.drafts, sum(now.drafts.accepted)),
            "running": [
                self.request_row(request, seqs, tenant)
                for request, seqs in islice(has.running.items(), MAX_LISTED)
            ],
            "waiting": [
                {"id": visible_id(request, tenant), "prompt": request.sequences[0].num_prompt}
                for request in has.waiting
            ],
            "num_running": len(has.running),
            "num_waiting": now.requests - len(has.running),
            "steps": [list(step) for step in islice(self.steps, len(self.steps) - new, None)],
            "cursor": self.count,
        }

    def assign_numbers(self, has: Occupancy) -> None:
        """Assign small numbers to the running requests, each unique until the request ends."""
        for request in [request for request in self.numbers if request.finished]:
            heapq.heappush(self.spare, self.numbers.pop(request))
        for request in has.running:
            if request not in self.numbers:
                self.numbers[request] = (
                    heapq.heappop(self.spare) if self.spare else len(self.numbers) + 1
                )

    def group_cells(
        self, counts: PageCounts, owners: np.ndarray, has: Occupancy, has_replicas: bool
    ) -> dict[str, Any]:
        """Return the state of each cell: 0 free, -1 cached, -2 shared, else a request's number.

        A cell of several pages shows shared pages before those of one request, and these before
        others.
        """
        urgency = np.array(
            [0, 0, 0, *(self.numbers[request] + 1 for request in has.running)], np.int32
        )
        urgency[[BLANK, CACHED, SHARED]] = 0, 1, INT32_MAX
        pages_per_cell = max(1, -(-len(owners) // CELLS))
        cells = (
            np.pad(urgency[owners], (0, -len(owners) % pages_per_cell))
            .reshape(-1, pages_per_cell)
            .max(axis=1)
        )
        cells = np.select([cells == 0, cells == 1, cells == INT32_MAX], [0, -1, -2], cells - 1)
        name = "full" if counts.window is None else f"window {counts.window}"
        if has_replicas:
            name = f"replica {counts.replica}, {name}"
        return {
            "name": name,
            "pages": counts.total,
            "each": pages_per_cell,
            "cells": cells.tolist(),
        }

    def request_row(
        self, request: Request, seqs: list[Sequence], tenant: str | None
    ) -> dict[str, Any]:
        """Return a row for a running request, without any of its text."""
        first = request.sequences[0]
        is_prefilling = all(seq.num_computed < seq.num_prompt or seq.missing > 1 for seq in seqs)
        return {
            "number": self.numbers[request],
            "id": visible_id(request, tenant),
            "prompt": first.num_prompt,
            "cached": first.cache.num_cached,
            "computed": max(seq.num_computed for seq in seqs),
            "tokens": sum(seq.num_output for seq in request.sequences),
            "state": "reading" if is_prefilling else "writing",
        }


def visible_id(request: Request, tenant: str | None) -> str:
    """Return a request's id as its tenant knows it, or nothing for other tenants."""
    return (
        request.request_id.removeprefix(f"{tenant}/")
        if request.sequences[0].tenant == tenant
        else ""
    )
