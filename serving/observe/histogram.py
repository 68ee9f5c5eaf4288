"""Histograms, quantiles and rates that cost a step almost nothing."""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Buckets(NamedTuple):
    """A histogram at a moment."""

    bounds: tuple[float, ...]
    counts: list[int]  # one per bucket, and the count above all bounds last
    sum: float

    @property
    def total(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[float, int]]:
        """Return (bound, number of values up to it) pairs; the last bound is infinite."""
        total = 0
        cumulative_counts = []
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            total += count
            cumulative_counts.append((bound, total))
        return cumulative_counts


class Histogram:
    """A histogram. One thread observes and any thread may read; the total is the sum of the
    buckets.
    """

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def read(self) -> Buckets:
        return Buckets(self.bounds, list(self.counts), self.sum)  # list() copies atomically


class RecentDurations:
    """Durations of about the last minute, with an error of one percent, in twelve slots of 5 s."""

    SLOT = 5.0
    SLOTS = 12
    MIN_VALUE = 1e-6
    KEYS_PER_E = 50  # keys per factor of e: neighbours differ by two percent

    def __init__(self):
        self.slots: deque[tuple[int, dict[int, int]]] = deque(maxlen=self.SLOTS)

    def observe(self, now: float, value: float, times: int = 1) -> None:
        slot = int(now // self.SLOT)
        if not self.slots or self.slots[-1][0] != slot:
            self.slots.append((slot, {}))
        counts = self.slots[-1][1]
        key = round(math.log(max(value, self.MIN_VALUE)) * self.KEYS_PER_E)
        counts[key] = counts.get(key, 0) + times

    def quantiles(self, now: float, shares: Sequence[float]) -> list[float] | None:
        """Return the values below which these shares of all values lie; None without values."""
        counts: dict[int, int] = {}
        for slot, slot_counts in self.slots:
            if slot > now // self.SLOT - self.SLOTS:
                for key, count in slot_counts.items():
                    counts[key] = counts.get(key, 0) + count
        total = sum(counts.values())
        index = 0
        num_below = 0
        quantiles = []
        keys = sorted(counts)
        if not keys:
            return None
        for share in sorted(shares):
            while num_below + counts[keys[index]] < share * total:
                num_below = num_below + counts[keys[index]]
                index = index + 1
            quantiles.append(math.exp(keys[index] / self.KEYS_PER_E))
        return quantiles


class Rate:
    """Number of events in the last second."""

    def __init__(self):
        self.total = 0
        self.totals = deque([(-1.0, 0)], maxlen=16)  # (time, total at that time), ten per second
        self.last = -1.0  # time of the latest event

    def add(self, began: float, now: float, count: int) -> None:
        """Count events; the work on them started at `began`."""
        if began - self.totals[-1][0] >= 0.1:  # it was idle
            self.totals.append((began, self.total))
        self.total = self.total + count
        self.last = now
        if now - self.totals[-1][0] >= 0.1:
            self.totals.append((now, self.total))

    def last_second(self, now: float) -> float:
        points = [*self.totals, (self.last, self.total)]
        times, totals = zip(*points, strict=True)
        return self.total - float(np.interp(now - 1, times, totals))


def one_two_five(low: float, high: float) -> tuple[float, ...]:
    """Return 1, 2, 5, 10 and so on, times `low` (a power of ten), up to `high`."""
    start = round(math.log10(low))
    decades = range(start, math.floor(math.log10(high)) + 1)
    return tuple(
        bound for ten in decades for step in (1, 2, 5) if (bound := float(f"{step}e{ten}")) <= high
    )
