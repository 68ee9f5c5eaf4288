"""Those who wait to be served, and whose turn it is."""

import bisect
from collections import Counter
from collections.abc import Callable, Hashable, Iterator

from ..request.sequence import Sequence


class Line:
    """By rank among the requests of one party; among parties, the one that was given least goes first.

    What a party was given is counted in rows of steps. One that comes (back) starts level with the one that has had
    least of those who are there: what it left unused in the past does not let it push the others aside.
    """

    def __init__(self):
        self.waiting: dict[Hashable, list[Sequence]] = {}
        self.present: Counter[Hashable] = Counter()  # sequences that wait or run
        self.given: dict[Hashable, int] = {}

    def enter(self, seq: Sequence) -> None:
        """A sequence that is new."""
        if seq.party not in self.present:
            least = min((self.given[party] for party in self.present), default=0)
            if len(self.given) > 2 * len(self.present) + 16:  # of those who left, only who had more is remembered
                self.given = {p: rows for p, rows in self.given.items() if p in self.present or rows > least}
            self.given[seq.party] = max(self.given.get(seq.party, 0), least)
        self.present[seq.party] += 1
        self.add(seq)

    def add(self, seq: Sequence) -> None:
        """A sequence that is to wait."""
        bisect.insort(self.waiting.setdefault(seq.party, []), seq, key=lambda seq: seq.rank)

    def remove(self, seq: Sequence) -> None:
        """A sequence that waits no longer."""
        self.waiting[seq.party].remove(seq)
        if not self.waiting[seq.party]:
            del self.waiting[seq.party]

    def leave(self, seq: Sequence) -> None:
        """A sequence that is done."""
        self.present[seq.party] -= 1
        if not self.present[seq.party]:
            del self.present[seq.party]
            if not self.present:
                self.given.clear()

    @property
    def shared(self) -> bool:
        """Whether there is more than one party, so that it counts who is given what."""
        return len(self.present) > 1

    def give(self, seq: Sequence, rows: int) -> None:
        self.given[seq.party] += rows

    def first(self, ready: Callable[[Sequence], bool]) -> Sequence | None:
        """Whose turn it is, of those who are ready."""
        for party in sorted(self.waiting, key=lambda party: (self.given[party], self.waiting[party][0].rank)):
            for seq in self.waiting[party]:
                if ready(seq):
                    return seq
        return None

    def __iter__(self) -> Iterator[Sequence]:
        for line in self.waiting.values():
            yield from line

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))
