"""What an engine is like at a moment, for those who ask: metrics, the live page, the server."""

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..cache.page_pool import Group
from ..request.request import Request
from ..request.sequence import Sequence

if TYPE_CHECKING:
    from .engine import Engine

BLANK, CACHED, SHARED, OWNED = 0, 1, 2, 3  # OWNED + n: the page of one request, the n-th of those that run


class PageCounts(NamedTuple):
    """The pages of one cache group of one replica, but for the dummy."""

    replica: int
    window: int | None
    total: int
    blank: int
    cached: int  # nobody's, and kept for what they hold

    @property
    def used(self) -> int:
        return self.total - self.blank - self.cached


class ExpertUse(NamedTuple):
    """How evenly tokens fall on the experts; the skews by layer, of late, against the mean."""

    tokens: int  # that experts got, in all layers
    skew: dict[int, float]  # of the busiest expert
    device_skew: dict[int, float]  # of the busiest device
    moved: int  # places that got another expert


@dataclass(frozen=True)
class Snapshot:
    """Lengths and flags. Any thread may ask for them: nothing waits for the engine."""

    now: float
    asleep: bool
    weights_dropped: bool
    running: int  # sequences with a slot
    waiting: int  # sequences without one
    requests: int
    max_seqs: int
    max_tokens: int  # of a step
    max_len: int
    page_size: int
    pages: tuple[PageCounts, ...]
    pages_used: float  # the share in use, of the fullest group
    caches_prefixes: bool
    kv_dtype: str
    recompiles: int
    experts: ExpertUse | None


@dataclass(frozen=True)
class Occupancy:
    """Who has what. Only the engine's thread may ask, between two steps, and it is true until the next one."""

    running: dict[Request, list[Sequence]]  # with those of its sequences that have slots
    waiting: list[Request]  # the first in the queue of those that have none
    pages: list[np.ndarray]  # of each group, in the order of `Snapshot.pages`: who has each page but the dummy


def snapshot(engine: "Engine") -> Snapshot:
    pages, runner = engine.pages, engine.runner
    replicas = len(pages.tables)
    experts = runner.expert_loads
    return Snapshot(
        now=engine.clock(),
        asleep=engine.asleep,
        weights_dropped=runner.weights is None,
        running=len(engine.scheduler.running),
        waiting=len(engine.scheduler.waiting),
        requests=len(engine.requests),
        max_seqs=runner.limits.max_seqs * replicas,
        max_tokens=runner.limits.max_rows * replicas,
        max_len=engine.max_len,
        page_size=pages.page_size,
        pages=tuple(
            PageCounts(table.replica, group.window, group.num_pages - 1, len(group.blank), len(group.kept))
            for table in pages.tables
            for group in table.groups
        ),
        pages_used=pages.used(),
        caches_prefixes=pages.keeps_prefixes,
        kv_dtype=engine.config.kv_dtype,
        recompiles=max(0, runner.compiles.recompiles),
        experts=experts and ExpertUse(int(experts.rows_LE.sum()), experts.skew(), experts.device_skew(), experts.moved),
    )


def occupancy(engine: "Engine", listed: int) -> Occupancy:
    """With the first `listed` of the requests that wait."""
    running: dict[Request, list[Sequence]] = {}
    for seq in engine.scheduler.running:
        running.setdefault(seq.request, []).append(seq)
    waiting: dict[Request, None] = {}
    for seq in engine.scheduler.waiting:
        if seq.request not in running:
            waiting[seq.request] = None
            if len(waiting) == listed:
                break
    codes = {request: OWNED + index for index, request in enumerate(running)}
    pages = []
    for table in engine.pages.tables:
        seqs = [seq for seq in engine.scheduler.running if seq.pages and seq.replica == table.replica]
        for index, group in enumerate(table.groups):
            pages.append(owners_of(group, [(codes[seq.request], seq.pages[index]) for seq in seqs]))
    return Occupancy(running, list(waiting), pages)


def owners_of(group: Group, owned: list[tuple[int, list[int]]]) -> np.ndarray:
    """By page: BLANK, CACHED, SHARED, or the code of the request that has it."""
    found = np.full(group.num_pages, BLANK, np.int32)
    found[list(group.kept)] = CACHED
    pages = np.fromiter(chain.from_iterable(table for _, table in owned), np.int64)
    found[pages] = np.repeat([code for code, _ in owned], [len(table) for _, table in owned])
    found[np.fromiter(group.owners, np.int32, group.num_pages) > 1] = SHARED
    return found[1:]
