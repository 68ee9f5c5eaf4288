"""Distributions and rates that cost a step next to nothing."""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Buckets(NamedTuple):
    """A histogram at one moment."""

    bounds: tuple[float, ...]
    counts: list[int]  # one a bucket, and at the end those above every bound
    sum: float

    @property
    def total(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[float, int]]:
        """(bound, how many are at or below it); the last bound is infinite."""
        total, found = 0, []
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            total += count
            found.append((bound, total))
        return found


class Histogram:
    """One thread observes and any thread may read: counts never go back, and the total is the sum of the buckets."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def read(self) -> Buckets:
        return Buckets(self.bounds, list(self.counts), self.sum)  # list() copies in one go


class Recent:
    """Durations of about the last minute, each to within a hundredth, in twelve slots of five seconds."""

    SLOT, SLOTS, LEAST = 5.0, 12, 1e-6
    FINENESS = 50  # keys a factor of e: neighbours differ by two hundredths

    def __init__(self):
        self.slots: deque[tuple[int, dict[int, int]]] = deque(maxlen=self.SLOTS)

    def observe(self, now: float, value: float, times: int = 1) -> None:
        slot = int(now // self.SLOT)
        if not self.slots or self.slots[-1][0] != slot:
            self.slots.append((slot, {}))
        counts = self.slots[-1][1]
        key = round(math.log(max(value, self.LEAST)) * self.FINENESS)
        counts[key] = counts.get(key, 0) + times

    def quantiles(self, now: float, shares: Sequence[float]) -> list[float] | None:
        """The values that these shares of all are at or below; None where there is nothing."""
        counts: dict[int, int] = {}
        for slot, some in self.slots:
            if slot > now // self.SLOT - self.SLOTS:
                for key, count in some.items():
                    counts[key] = counts.get(key, 0) + count
        total, at, below, found = sum(counts.values()), 0, 0, []
        keys = sorted(counts)
        if not keys:
            return None
        for share in sorted(shares):
            while below + counts[keys[at]] < share * total:
                below, at = below + counts[keys[at]], at + 1
            found.append(math.exp(keys[at] / self.FINENESS))
        return found


class Rate:
    """How many came in the last second, whenever somebody asks."""

    def __init__(self):
        self.total = 0
        self.totals = deque([(-1.0, 0)], maxlen=16)  # (time, the total then), ten a second
        self.last = -1.0  # when the latest came

    def add(self, began: float, now: float, count: int) -> None:
        """So many have come, and the work on them began then."""
        if began - self.totals[-1][0] >= 0.1:  # it was idle
            self.totals.append((began, self.total))
        self.total, self.last = self.total + count, now
        if now - self.totals[-1][0] >= 0.1:
            self.totals.append((now, self.total))

    def last_second(self, now: float) -> float:
        points = [*self.totals, (self.last, self.total)]
        return self.total - float(np.interp(now - 1, *zip(*points, strict=True)))


def one_two_five(low: float, high: float) -> tuple[float, ...]:
    """1, 2, 5, 10 and so on, times `low` (a power of ten), up to `high`."""
    start = round(math.log10(low))
    decades = range(start, math.floor(math.log10(high)) + 1)
    return tuple(bound for ten in decades for step in (1, 2, 5) if (bound := float(f"{step}e{ten}")) <= high)
