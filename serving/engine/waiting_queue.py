"""The queue of waiting sequences, with fair shares among tenants."""

import bisect
from collections import Counter
from collections.abc import Callable, Hashable, Iterator

from ..request.sequence import Sequence

OUTPUT = 128  # tokens that a sequence counts for beside those that it lacks: it will generate some


class WaitingQueue:
    """Sorted by rank within a tenant; the tenant that was served least is next.

    Service is counted in scheduled tokens. A tenant that arrives, or returns, starts at the minimum
    of those present, so that idling earns no credit. The queue also counts how much waits for each
    replica.
    """

    def __init__(self, replicas: int = 1):
        self.waiting: dict[Hashable, list[Sequence]] = {}  # by tenant
        self.present: Counter[Hashable] = Counter()  # sequences that wait or run, by tenant
        self.served: dict[Hashable, int] = {}  # tokens, by tenant
        self.tokens: dict[Sequence, int] = {}  # that each is expected to need
        self.tokens_for = [0] * replicas
        self.count_for = [0] * replicas

    def enter(self, seq: Sequence) -> None:
        """Add a new sequence."""
        if seq.tenant not in self.present:
            least = min((self.served[tenant] for tenant in self.present), default=0)
            # of those who left, only who had more is remembered
            if len(self.served) > 2 * len(self.present) + 16:
                self.served = {
                    t: served
                    for t, served in self.served.items()
                    if t in self.present or served > least
                }
            self.served[seq.tenant] = max(self.served.get(seq.tenant, 0), least)
        self.present[seq.tenant] += 1
        self.add(seq)

    def add(self, seq: Sequence) -> None:
        """Add a sequence that is new or was preempted."""
        bisect.insort(self.waiting.setdefault(seq.tenant, []), seq, key=lambda seq: seq.rank)
        self.tokens[seq] = seq.num_tokens + OUTPUT
        self.count(seq, 1)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that was admitted or ended."""
        self.waiting[seq.tenant].remove(seq)
        if not self.waiting[seq.tenant]:
            del self.waiting[seq.tenant]
        self.count(seq, -1)
        del self.tokens[seq]

    def count(self, seq: Sequence, sign: int) -> None:
        self.count_for[seq.replica] += sign
        self.tokens_for[seq.replica] += sign * self.tokens[seq]

    def send(self, seq: Sequence, replica: int) -> None:
        """Move a sequence to another replica."""
        self.count(seq, -1)
        seq.replica, seq.cache.prefetched = replica, False
        self.count(seq, 1)

    def leave(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        self.present[seq.tenant] -= 1
        if not self.present[seq.tenant]:
            del self.present[seq.tenant]
            if not self.present:
                self.served.clear()

    @property
    def shared(self) -> bool:
        """Whether there is more than one tenant."""
        return len(self.present) > 1

    def serve(self, seq: Sequence, tokens: int) -> None:
        """Count tokens that were scheduled for a sequence's tenant."""
        self.served[seq.tenant] += tokens

    def first(self, ready: Callable[[Sequence], bool]) -> Sequence | None:
        """The next of the sequences that are ready."""
        for tenant in sorted(
            self.waiting, key=lambda tenant: (self.served[tenant], self.waiting[tenant][0].rank)
        ):
            for seq in self.waiting[tenant]:
                if ready(seq):
                    return seq
        return None

    def __iter__(self) -> Iterator[Sequence]:
        for sequences in self.waiting.values():
            yield from sequences

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))
