"""What the engine looks like now: its pages, its requests and its last steps, for somebody who watches."""

import heapq
from collections import deque
from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

import numpy as np

from ..cache.page_pool import PagePool
from ..cache.page_table import PageTable
from ..engine.engine import Engine
from ..request.request import Request
from ..request.sequence import Sequence
from .histogram import Recent
from .metrics import Metrics
from .trace import NoTrace

STEPS = 512  # that are kept
PATIENCE = 10.0  # seconds without a look after which nobody watches any more
CELLS = 2048  # of a group
LISTED = 64  # requests of a kind
SHARES = (0.5, 0.9, 0.99)
ALIVE = np.iinfo(np.int32).max  # more than any number


class Live(NoTrace):
    """Hears of every step by way of the metrics, which must hear of it first.

    Latencies and rates are kept at any time, steps only while somebody looks.
    """

    def __init__(self, metrics: Metrics):
        self.metrics = metrics
        self.steps: deque[tuple[float, int, int, int, float]] = deque(maxlen=STEPS)
        self.count = 0  # steps that were kept, ever
        self.watched_until = 0.0
        self.written = self.read = 0  # tokens, and rows of sequences that caught up, ever
        self.totals = deque([(-1.0, 0, 0)], maxlen=16)  # (time, tokens written, rows read), ten a second
        self.firsts, self.gaps = Recent(), Recent()
        self.numbers: dict[Request, int] = {}
        self.spare: list[int] = []  # numbers to be had again, a heap

    def end(self, requests: Iterable[Request], **counts: float) -> None:
        step = self.metrics.step
        if step is None:
            return
        now = step.at
        for value, times in step.gaps:
            self.gaps.observe(now, value, times)
        for value in step.firsts:
            self.firsts.observe(now, value)
        begun = now - step.seconds
        if begun - self.totals[-1][0] >= 0.1:  # it was idle
            self.totals.append((begun, self.written, self.read))
        self.written, self.read = self.metrics.counts["generation_tokens_total"], self.read + step.rows - step.decodes
        if now - self.totals[-1][0] >= 0.1:
            self.totals.append((now, self.written, self.read))
        if now < self.watched_until:
            self.steps.append((now, step.rows, step.decodes, step.sequences, step.seconds))
            self.count += 1
        elif self.watched_until:
            self.watched_until = 0.0
            self.steps.clear()
            self.numbers.clear()
            self.spare.clear()

    def snapshot(self, engine: Engine, since: int = 0) -> dict[str, Any]:
        """Everything, in the engine's thread between two steps; `since` is the cursor of the look before."""
        now = engine.clock()
        self.watched_until = now + PATIENCE
        self.number(engine)
        counts, limits, waiting = self.metrics.counts, engine.runner.limits, waiting_requests(engine)
        running, tables = running_requests(engine), engine.tables
        new = min(max(0, self.count - since), len(self.steps))
        return {
            "t": now,
            "page_size": tables[0].page_size,
            "limits": {
                "max_seqs": limits.max_seqs * len(tables),
                "max_rows": limits.max_rows * len(tables),
                "max_len": engine.max_len,
            },
            "groups": [self.group(engine, table, index) for table in tables for index in range(len(table.pools))],
            "used": max(table.used() for table in tables),
            "running": [self.row(request, seqs) for request, seqs in islice(running.items(), LISTED)],
            "waiting": [{"id": request.request_id, "prompt": request.sequences[0].num_prompt} for request in waiting],
            "num_running": len(running),
            "num_waiting": len(engine.requests) - len(running),
            "steps": [list(step) for step in islice(self.steps, len(self.steps) - new, None)],
            "cursor": self.count,
            "totals": {
                "requests": sum(self.metrics.ends.values()),
                "prompt_tokens": counts["prompt_tokens_total"],
                "generation_tokens": counts["generation_tokens_total"],
                "cached_tokens": counts["prompt_tokens_cached_total"],
                "preemptions": counts["num_preemptions_total"],
                "recompiles": max(0, engine.runner.compiles.recompiles),
            },
            "rates": self.rates(now),
            "latency": {"ttft": milliseconds(self.firsts, now), "itl": milliseconds(self.gaps, now)},
        }

    def number(self, engine: Engine) -> None:
        """Small numbers for the requests that run, each its own until it ends."""
        for request in [request for request in self.numbers if request.finished]:
            heapq.heappush(self.spare, self.numbers.pop(request))
        for seq in engine.scheduler.running:
            request = engine.request_of[seq]
            if request not in self.numbers:
                self.numbers[request] = heapq.heappop(self.spare) if self.spare else len(self.numbers) + 1

    def group(self, engine: Engine, table: PageTable, index: int) -> dict[str, Any]:
        """Who has which page: 0 nobody, -1 it is cached, -2 several sequences, otherwise the number of a request.

        A cell of several pages shows the one with most life in it.
        """
        pool = table.pools[index]
        running = [seq for seq in engine.scheduler.running if seq.cache.pages and seq.replica == table.replica]
        life = liveliness(pool, [(self.numbers[engine.request_of[seq]], seq.cache.pages[index]) for seq in running])
        each = max(1, -(-len(life) // CELLS))
        life = np.pad(life, (0, -len(life) % each)).reshape(-1, each).max(axis=1)
        cells = np.select([life == 0, life == 1, life == ALIVE], [0, -1, -2], life - 1)
        name = "full" if pool.window is None else f"window {pool.window}"
        if len(engine.tables) > 1:
            name = f"replica {table.replica}, {name}"
        return {"name": name, "pages": pool.num_pages - 1, "each": each, "cells": cells.tolist()}

    def row(self, request: Request, seqs: list[Sequence]) -> dict[str, Any]:
        """A request that runs, without a word of what it says."""
        first = request.sequences[0]
        reads = all(seq.num_computed < seq.num_prompt or seq.missing > 1 for seq in seqs)
        return {
            "number": self.numbers[request],
            "id": request.request_id,
            "prompt": first.num_prompt,
            "cached": first.cache.num_cached,
            "computed": max(seq.num_computed for seq in seqs),
            "tokens": sum(seq.num_output for seq in request.sequences),
            "state": "reading" if reads else "writing",
        }

    def rates(self, now: float) -> dict[str, float]:
        """Tokens of the last second."""
        times, written, read = zip(*self.totals, strict=True)
        return {
            "generation": self.written - float(np.interp(now - 1, times, written)),
            "prompt": self.read - float(np.interp(now - 1, times, read)),
        }


def liveliness(pool: PagePool, owned: list[tuple[int, list[int]]]) -> np.ndarray:
    """Of every page but the dummy: 0 blank, 1 cached, 1 + the number of the request that has it, ALIVE for several."""
    life = np.zeros(pool.num_pages, np.int32)
    life[list(pool.cached)] = 1
    pages = np.fromiter(chain.from_iterable(table for _, table in owned), np.int64)
    life[pages] = np.repeat([number + 1 for number, _ in owned], [len(table) for _, table in owned])
    life[np.fromiter(pool.owners, np.int32, pool.num_pages) > 1] = ALIVE
    return life[1:]


def running_requests(engine: Engine) -> dict[Request, list[Sequence]]:
    """Those of which a sequence has a place, and these sequences."""
    found: dict[Request, list[Sequence]] = {}
    for seq in engine.scheduler.running:
        found.setdefault(engine.request_of[seq], []).append(seq)
    return found


def waiting_requests(engine: Engine) -> list[Request]:
    """The first of those that have no place."""
    found: dict[Request, None] = {}
    running = {engine.request_of[seq] for seq in engine.scheduler.running}
    for seq in engine.scheduler.waiting:
        request = engine.request_of[seq]
        if request not in running:
            found[request] = None
            if len(found) == LISTED:
                break
    return list(found)


def milliseconds(recent: Recent, now: float) -> list[float] | None:
    found = recent.quantiles(now, SHARES)
    return None if found is None else [round(value * 1e3, 3) for value in found]
