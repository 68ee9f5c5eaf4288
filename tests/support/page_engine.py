"""A fake engine that is always busy, for the page's fake server: requests arrive, fill pages, share
prefixes and end.
"""

import itertools
import math
import random
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

PAGE_SIZE = 16


@dataclass(eq=False)
class Run:
    """A running request. The chat advances requests of its own (`own`), time advances others."""

    number: int
    id: str
    prompt: int
    length: int
    cached: int
    own: bool = False
    computed: float = 0.0
    tokens: float = 0.0
    ended: bool = False
    pages: dict[str, list[int]] = field(default_factory=dict)

    @property
    def state(self) -> str:
        return "reading" if self.computed < self.prompt else "writing"


class Busy:
    """`frame()` makes the next data of /live."""

    def __init__(
        self, groups: dict[str, int], load: float = 0.6, max_running: int = 24, seed: int = 3
    ):
        self.groups = groups
        self.load = load
        self.max_running = max_running
        self.rng = random.Random(seed)
        self.free = {name: list(range(pages)) for name, pages in groups.items()}
        self.cached: dict[str, OrderedDict[int, None]] = {name: OrderedDict() for name in groups}
        self.shared = {
            name: [self.free[name].pop(0) for _ in range(min(24, pages // 20))]
            for name, pages in groups.items()
        }
        self.drafts = [0, 0, 0]
        self.runs: list[Run] = []
        self.waiting: list[Run] = []
        self.numbers = itertools.count(1)
        self.totals = dict.fromkeys(
            "requests prompt_tokens generation_tokens cached_tokens preemptions recompiles".split(),
            0,
        )
        self.last = time.monotonic()
        for _ in range(120):
            self.tick(0.15)
        self.steps: list[list[float]] = []

    def add(self, name: str, prompt: int) -> Run:
        run = Run(0, name, prompt, 10**6, 16, own=True)
        self.waiting.append(run)
        return run

    def tick(self, seconds: float) -> None:
        rng = self.rng
        tide = self.load * (0.75 + 0.45 * math.sin(time.monotonic() / 9))
        if rng.random() < seconds * 5 * tide and len(self.waiting) < 6:
            cached = PAGE_SIZE * rng.choice([0, 0, 4, 8, 24])
            self.waiting.append(
                Run(
                    0,
                    f"chatcmpl-{rng.getrandbits(48):x}",
                    cached + rng.randint(30, 900),
                    rng.randint(60, 700),
                    cached,
                )
            )
        while self.waiting and len(self.runs) < self.max_running:
            run = self.waiting.pop(0)
            run.number = next(self.numbers)
            run.computed = run.cached
            run.pages = {name: [] for name in self.groups}
            self.runs.append(run)
            self.totals["requests"] += 1
            self.totals["prompt_tokens"] += run.prompt
            self.totals["cached_tokens"] += run.cached
        for run in self.runs:
            if run.computed < run.prompt:
                run.computed = min(run.prompt, run.computed + seconds * 1500)
            elif not run.own:
                run.tokens += seconds * 55
                run.ended = run.tokens >= run.length
            self.totals["generation_tokens"] += round(seconds * 55) if run.state == "writing" else 0
            self.grow(run)
        for run in [run for run in self.runs if run.ended]:
            self.runs.remove(run)
            for name, pages in run.pages.items():
                keep = pages if rng.random() < 0.6 else []
                self.cached[name].update(dict.fromkeys(keep))
                self.free[name] = [
                    page for page in pages if page not in self.cached[name]
                ] + self.free[name]

    def grow(self, run: Run) -> None:
        for name, pages in run.pages.items():
            num_pages = math.ceil((run.computed - run.cached + run.tokens) / PAGE_SIZE)
            if name.startswith("window"):
                while len(pages) > 16:
                    self.free[name].append(pages.pop(0))
                num_pages = min(num_pages, 16)
            while len(pages) < num_pages:
                if not self.free[name]:
                    if not self.cached[name]:
                        break
                    self.free[name].append(self.cached[name].popitem(last=False)[0])
                pages.append(self.free[name].pop(0))

    def cells(self, name: str) -> list[int]:
        cells = [0] * self.groups[name]
        for page in self.cached[name]:
            cells[page] = -1
        for page in self.shared[name]:
            cells[page] = -2
        for run in self.runs:
            for page in run.pages[name]:
                cells[page] = run.number
        return cells

    def frame(self) -> dict[str, Any]:
        now = time.monotonic()
        passed = min(1.0, now - self.last)
        self.last = now
        reading = [run for run in self.runs if run.state == "reading"]
        writing = len(self.runs) - len(reading)
        self.tick(passed)
        steps = []
        for at in range(int(passed / 0.012)):
            if self.runs:
                drafts = 0 if reading else sum(self.rng.randint(0, 4) for _ in range(writing))
                accepted = round(drafts * self.rng.uniform(0.5, 0.9))
                self.drafts = [
                    self.drafts[0] + drafts // 3,
                    self.drafts[1] + drafts,
                    self.drafts[2] + accepted,
                ]
                rows = writing + drafts + (self.rng.randint(60, 400) if reading else 0)
                seconds = 0.006 + rows / 60000
                steps.append(
                    [
                        now - passed + at * 0.012,
                        min(512, rows),
                        writing,
                        len(self.runs),
                        seconds,
                        drafts,
                        accepted,
                    ]
                )
        groups = [
            {"name": name, "pages": pages, "each": 1, "cells": self.cells(name)}
            for name, pages in self.groups.items()
        ]
        full = max(
            1 - (group["cells"].count(0) + group["cells"].count(-1)) / group["pages"]
            for group in groups
        )
        jitter = 1 + 0.06 * math.sin(now * 1.7)
        running = [
            {
                "number": run.number,
                "id": run.id,
                "prompt": run.prompt,
                "cached": run.cached,
                "tokens": int(run.tokens),
                "computed": int(run.computed),
                "state": run.state,
            }
            for run in self.runs
        ]
        return {
            "t": now,
            "model": "quill",
            "state": "ready",
            "page_size": PAGE_SIZE,
            "limits": {"max_seqs": 32, "max_rows": 512, "max_len": 1024},
            "defaults": {},
            "groups": groups,
            "used": full,
            "running": running,
            "waiting": [{"id": run.id, "prompt": run.prompt} for run in self.waiting],
            "num_running": len(running),
            "num_waiting": len(self.waiting),
            "steps": steps,
            "totals": self.totals,
            "drafts": self.drafts,
            "rates": {
                "generation": 55 * writing * jitter,
                "prompt": 1500.0 * len(reading) * jitter,
            },
            "latency": {"ttft": [84.2 * jitter, 190.5, 341.9], "itl": [8.21 * jitter, 11.9, 18.3]}
            if self.runs
            else {"ttft": None, "itl": None},
        }
