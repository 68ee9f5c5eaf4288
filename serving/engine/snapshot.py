"""Snapshots of an engine's state for metrics, the live page and the server."""

from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from ..cache.page_pool import PagePool
from ..request.request import Request
from ..request.sequence import Sequence
from .engine import Engine

BLANK = 0  # OWNED + n: the page of one request, the n-th of those that run
CACHED = 1
SHARED = 2
OWNED = 3


class PageCounts(NamedTuple):
    """Page counts of one cache group of a replica, without the dummy page."""

    replica: int
    window: int | None
    total: int
    free_pages: int
    cached: int  # nobody's, and kept for what they hold

    @property
    def used(self) -> int:
        return self.total - self.free_pages - self.cached


class ExpertUse(NamedTuple):
    """How evenly tokens are distributed over experts; recent skew by layer, as a ratio to the mean."""

    tokens: int  # that experts got, in all layers
    skew: dict[int, float]  # of the busiest expert
    device_skew: dict[int, float]  # of the busiest device
    moved: int  # places that got another expert


class DraftCounts(NamedTuple):
    """Verified and accepted draft tokens since the start."""

    proposals: int  # steps and sequences with drafts
    drafts: int  # tokens
    accepted: tuple[int, ...]  # by position


@dataclass(frozen=True)
class Snapshot:
    """Queue lengths, page counts and flags of an engine."""

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
    invariant: bool  # a request's bits do not depend on the rest of its batch
    drafts: DraftCounts | None  # where the engine drafts
    images_encoded: int | None  # where the model reads images


@dataclass(frozen=True)
class Occupancy:
    """The requests that have slots and pages; valid until the next step."""

    running: dict[Request, list[Sequence]]  # with those of its sequences that have slots
    waiting: list[Request]  # the first in the queue of those that have none
    # of each group, in the order of `Snapshot.pages`: who has each page but the dummy
    pages: list[np.ndarray]


def owners_of(pool: PagePool, owned: list[tuple[int, list[int]]]) -> np.ndarray:
    """The owner of each page: BLANK, CACHED, SHARED, or the code of a request."""
    owner_codes = np.full(pool.num_pages, BLANK, np.int32)
    owner_codes[list(pool.cached)] = CACHED
    pages = np.fromiter(chain.from_iterable(table for _, table in owned), np.int64)
    owner_codes[pages] = np.repeat([code for code, _ in owned], [len(table) for _, table in owned])
    owner_codes[np.fromiter(pool.ref_counts, np.int32, pool.num_pages) > 1] = SHARED
    return owner_codes[1:]


def take_snapshot(engine: Engine) -> Snapshot:
    """Take a snapshot, from any thread and without waiting for the engine."""
    tables, runner, experts = engine.tables, engine.runner, engine.runner.expert_loads
    counts = None if engine.speculator is None else engine.speculator.counts
    pages = (
        PageCounts(
            table.replica, pool.window, pool.num_pages - 1, len(pool.free_pages), len(pool.cached)
        )
        for table in tables
        for pool in table.pools
    )
    return Snapshot(
        now=engine.clock(),
        asleep=engine.lifecycle.is_asleep,
        weights_dropped=runner.weights is None,
        running=len(engine.scheduler.running),
        waiting=len(engine.scheduler.waiting),
        requests=len(engine.requests),
        max_seqs=runner.shape.max_seqs * len(tables),
        max_tokens=runner.shape.max_tokens * len(tables),
        max_len=engine.max_len,
        page_size=tables[0].page_size,
        pages=tuple(pages),
        pages_used=max(table.used() for table in tables),
        caches_prefixes=tables[0].keeps_prefixes,
        kv_dtype=engine.config.kv_dtype,
        recompiles=max(0, runner.compiles.recompiles),
        invariant=not runner.pipeline.variance,
        images_encoded=runner.media_store and runner.media_store.num_encoded,
        drafts=counts and DraftCounts(counts.proposals, counts.drafts, tuple(counts.accepted)),
        experts=experts
        and ExpertUse(
            int(experts.rows_LE.sum()), experts.skew(), experts.device_skew(), experts.moved
        ),
    )


def take_occupancy(engine: Engine, listed: int) -> Occupancy:
    """Slots and pages by request, and the first `listed` waiting requests; in the engine's thread
    only.
    """
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
    for table in engine.tables:
        seqs = [
            seq
            for seq in engine.scheduler.running
            if seq.cache.pages and seq.replica == table.replica
        ]
        for index, pool in enumerate(table.pools):
            pages.append(
                owners_of(pool, [(codes[seq.request], seq.cache.pages[index]) for seq in seqs])
            )
    return Occupancy(running, list(waiting), pages)
