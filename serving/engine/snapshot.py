"""What an engine is like at a moment, for those who ask: metrics, the live page, the server."""

from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from ..cache.page_pool import PagePool
from ..request.request import Request
from ..request.sequence import Sequence

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


class DraftCounts(NamedTuple):
    """What was drafted for answers, and what of it they took over."""

    proposals: int  # steps and sequences with drafts
    drafts: int  # tokens
    accepted: tuple[int, ...]  # by position


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
    invariant: bool  # a request's bits do not depend on the rest of its batch
    drafts: DraftCounts | None  # where the engine drafts


@dataclass(frozen=True)
class Occupancy:
    """Who has what. Only the engine's thread may ask, between two steps, and it is true until the next one."""

    running: dict[Request, list[Sequence]]  # with those of its sequences that have slots
    waiting: list[Request]  # the first in the queue of those that have none
    pages: list[np.ndarray]  # of each group, in the order of `Snapshot.pages`: who has each page but the dummy


def owners_of(pool: PagePool, owned: list[tuple[int, list[int]]]) -> np.ndarray:
    """By page: BLANK, CACHED, SHARED, or the code of the request that has it."""
    found = np.full(pool.num_pages, BLANK, np.int32)
    found[list(pool.cached)] = CACHED
    pages = np.fromiter(chain.from_iterable(table for _, table in owned), np.int64)
    found[pages] = np.repeat([code for code, _ in owned], [len(table) for _, table in owned])
    found[np.fromiter(pool.owners, np.int32, pool.num_pages) > 1] = SHARED
    return found[1:]
