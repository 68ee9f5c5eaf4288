"""Requests that must end by a given time."""

import heapq
import itertools
from collections.abc import Iterator

from ..request.request import Request


class Deadlines:
    """A heap of deadlines; entries of finished requests are removed now and then."""

    def __init__(self):
        self.heap: list[tuple[float, int, Request]] = []
        self.count = itertools.count()  # tells entries of the same time apart

    def add(self, deadline: float, request: Request, open_requests: int) -> None:
        if len(self.heap) > 2 * open_requests + 16:  # most are of requests that ended in time
            self.heap = [entry for entry in self.heap if not entry[2].finished]
            heapq.heapify(self.heap)
        heapq.heappush(self.heap, (deadline, next(self.count), request))

    def seconds_left(self, now: float) -> float | None:
        """Seconds until the earliest deadline, at least 0; None without one."""
        return max(0.0, self.heap[0][0] - now) if self.heap else None

    def due(self, now: float) -> Iterator[Request]:
        """Yield the unfinished requests whose deadline has passed."""
        while self.heap and self.heap[0][0] <= now:
            request = heapq.heappop(self.heap)[2]
            if not request.finished:
                yield request
