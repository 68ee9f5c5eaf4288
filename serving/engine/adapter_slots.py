"""Assigns adapters to the slots of the device's adapter stacks."""

from collections import Counter
from typing import Any

from ..request.sequence import Sequence

PATIENCE = 16  # sequences with adapters that may overtake one that waits for a slot


class AdapterSlots:
    """A least-recently-used cache of adapters; one in use is never evicted.

    A sequence whose adapter has no slot is passed by sequences whose adapters have one. After
    PATIENCE of them, no sequence with another adapter is admitted until it was.
    """

    def __init__(self, count: int):
        self.slots: dict[str, int] = {}  # by the adapter's key, the least recently used first
        self.free = list(range(count - 1, -1, -1))
        self.users: Counter[str] = Counter()  # running sequences
        self.loads: list[tuple[int, Any]] = []  # (slot, adapter): to be copied before the next step
        # who waits for a slot, and how many have overtaken it
        self.passed: dict[Sequence, int] = {}

    def begin_look(self) -> None:
        """Forget passed sequences that no longer wait, before the queue is searched again."""
        if self.passed:
            self.passed = {
                seq: n
                for seq, n in self.passed.items()
                if seq.finish_reason is None and seq.slot < 0
            }

    def admits(self, seq: Sequence) -> bool:
        """Whether the adapter of a waiting sequence has a slot or can get one."""
        if seq.adapter is None:
            return True
        first = next((seq for seq, count in self.passed.items() if count >= PATIENCE), None)
        if first is not None and first.adapter.key != seq.adapter.key:
            return False
        if (
            seq.adapter.key in self.slots
            or self.free
            or any(not self.users[key] for key in self.slots)
        ):
            return True
        self.passed.setdefault(seq, 0)
        return False

    def take(self, seq: Sequence) -> None:
        """Give the adapter of an admitted sequence a slot."""
        if seq.adapter is None:
            return
        key = seq.adapter.key
        self.passed.pop(seq, None)
        for passed_seq in self.passed:
            self.passed[passed_seq] += passed_seq.rank < seq.rank
        slot = self.slots.pop(key, None)
        if slot is None:
            slot = self.free.pop() if self.free else self.evict()
            self.loads.append((slot, seq.adapter))
        self.slots[key] = seq.adapter_slot = slot
        self.users[key] += 1

    def evict(self) -> int:
        """Free the slot of the least recently used idle adapter."""
        key = next(key for key in self.slots if not self.users[key])
        return self.slots.pop(key)

    def give_back(self, seq: Sequence) -> None:
        """Release the adapter of a sequence; it stays loaded until its slot is needed."""
        if seq.adapter is not None:
            self.users[seq.adapter.key] -= 1
            self.slots[seq.adapter.key] = self.slots.pop(seq.adapter.key)  # used last

    def take_loads(self) -> list[tuple[int, Any]]:
        loads, self.loads = self.loads, []
        return loads

    def forget(self) -> None:
        """Forget all adapters, since the device state is new."""
        assert not any(self.users.values()), "adapters are forgotten that running sequences use"
        self.free += self.slots.values()
        self.slots = {}
        self.loads = []

    def check(self, running: list[Sequence]) -> None:
        """Assert that each slot is free or has one adapter, and that running sequences have theirs."""
        used = Counter(seq.adapter.key for seq in running if seq.adapter is not None)
        assert +self.users == used, "an adapter's users are miscounted"
        for seq in running:
            assert seq.adapter is None or self.slots[seq.adapter.key] == seq.adapter_slot, (
                "an adapter has moved"
            )
