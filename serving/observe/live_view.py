"""What the live page shows of an engine: its pages, its requests and its last steps."""

import heapq
from collections import deque
from itertools import islice
from typing import Any

import numpy as np

from ..engine.engine import Engine
from ..engine.snapshot import BLANK, CACHED, SHARED, Occupancy, PageCounts, take_occupancy, take_snapshot
from ..engine.step_record import Observer, StepRecord
from ..request.request import Request
from ..request.sequence import Sequence

STEPS = 512  # that are kept
PATIENCE = 10.0  # seconds without a look after which nobody watches any more
CELLS = 2048  # of a group
LISTED = 64  # requests of a kind
MOST = np.iinfo(np.int32).max  # more than any number


class LiveView(Observer):
    """Steps are kept only while somebody looks."""

    def __init__(self):
        self.steps: deque[tuple[float, int, int, int, float, int, int]] = deque(maxlen=STEPS)
        self.count = 0  # steps that were kept, ever
        self.watched_until = 0.0
        self.numbers: dict[Request, int] = {}
        self.spare: list[int] = []  # numbers to be had again, a heap

    def observe(self, record: StepRecord) -> None:
        if not self.watched_until or (result := record.result) is None:
            return
        now, plan = result.collected, result.plan
        if now < self.watched_until:
            known = [item.num_rows - len(item.drafts) for item in plan.items]
            count, began, rows = plan.steps, result.device_began, plan.num_rows // plan.steps
            drafts, seconds = rows - sum(known), (now - began) / count
            accepted = sum(output.num_accepted for output in result.outputs) if drafts else 0
            for number in range(1, count + 1):
                ended = began + number * seconds
                self.steps.append((ended, rows, known.count(1), len(known), seconds, drafts, accepted))
            self.count += count
        else:
            self.watched_until = 0.0
            self.steps.clear()
            self.numbers.clear()
            self.spare.clear()

    def look(self, engine: Engine, since: int = 0, tenant: str | None = None) -> dict[str, Any]:
        """Everything, in the engine's thread between two steps; `since` is the cursor of the look before.

        Requests of other tenants than `tenant` have no id.
        """
        now, has = take_snapshot(engine), take_occupancy(engine, LISTED)
        self.watched_until = now.now + PATIENCE
        self.number(has)
        new = min(max(0, self.count - since), len(self.steps))
        several = any(group.replica > 0 for group in now.pages)
        return {
            "t": now.now,
            "page_size": now.page_size,
            "limits": {"max_seqs": now.max_seqs, "max_rows": now.max_tokens, "max_len": now.max_len},
            "defaults": dict(engine.chat_defaults),
            "groups": [
                self.group(counts, owners, has, several) for counts, owners in zip(now.pages, has.pages, strict=True)
            ],
            "used": now.pages_used,
            "drafts": now.drafts and (now.drafts.proposals, now.drafts.drafts, sum(now.drafts.accepted)),
            "running": [self.row(request, seqs, tenant) for request, seqs in islice(has.running.items(), LISTED)],
            "waiting": [
                {"id": own_id(request, tenant), "prompt": request.sequences[0].num_prompt} for request in has.waiting
            ],
            "num_running": len(has.running),
            "num_waiting": now.requests - len(has.running),
            "steps": [list(step) for step in islice(self.steps, len(self.steps) - new, None)],
            "cursor": self.count,
        }

    def number(self, has: Occupancy) -> None:
        """Small numbers for the requests that run, each its own until it ends."""
        for request in [request for request in self.numbers if request.finished]:
            heapq.heappush(self.spare, self.numbers.pop(request))
        for request in has.running:
            if request not in self.numbers:
                self.numbers[request] = heapq.heappop(self.spare) if self.spare else len(self.numbers) + 1

    def group(self, counts: PageCounts, owners: np.ndarray, has: Occupancy, several: bool) -> dict[str, Any]:
        """Who has which page: 0 nobody, -1 it is cached, -2 several sequences, otherwise the number of a request.

        A cell of several pages shows one of several sequences before one of a request, and that before the others.
        """
        urgency = np.array([0, 0, 0, *(self.numbers[request] + 1 for request in has.running)], np.int32)
        urgency[[BLANK, CACHED, SHARED]] = 0, 1, MOST
        each = max(1, -(-len(owners) // CELLS))
        cells = np.pad(urgency[owners], (0, -len(owners) % each)).reshape(-1, each).max(axis=1)
        cells = np.select([cells == 0, cells == 1, cells == MOST], [0, -1, -2], cells - 1)
        name = "full" if counts.window is None else f"window {counts.window}"
        if several:
            name = f"replica {counts.replica}, {name}"
        return {"name": name, "pages": counts.total, "each": each, "cells": cells.tolist()}

    def row(self, request: Request, seqs: list[Sequence], tenant: str | None) -> dict[str, Any]:
        """A request that runs, without a word of what it says."""
        first = request.sequences[0]
        reads = all(seq.num_computed < seq.num_prompt or seq.missing > 1 for seq in seqs)
        return {
            "number": self.numbers[request],
            "id": own_id(request, tenant),
            "prompt": first.num_prompt,
            "cached": first.cache.num_cached,
            "computed": max(seq.num_computed for seq in seqs),
            "tokens": sum(seq.num_output for seq in request.sequences),
            "state": "reading" if reads else "writing",
        }


def own_id(request: Request, tenant: str | None) -> str:
    """The id of a request as its tenant knows it; others learn nothing."""
    return request.request_id.removeprefix(f"{tenant}/") if request.sequences[0].tenant == tenant else ""
