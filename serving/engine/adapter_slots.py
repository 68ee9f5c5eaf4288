"""Which adapter is in which slot of the device's stacks, and who waits for a slot."""

from collections import Counter
from typing import Any

from ..request.sequence import Sequence

PATIENCE = 16  # sequences with adapters that may overtake one that waits for a slot


class AdapterSlots:
    """An adapter keeps its slot while a sequence that uses it runs; then the least recently used
    gives way.

    A sequence whose adapter finds no slot lets others pass, whose adapters have one. When PATIENCE
    have passed, no sequence with another adapter begins until it has: those that run end, and leave
    it a slot.
    """

    def __init__(self, count: int):
        self.slots: dict[str, int] = {}  # by the adapter's key, the least recently used first
        self.free = list(range(count - 1, -1, -1))
        self.users: Counter[str] = Counter()  # running sequences
        self.loads: list[tuple[int, Any]] = []  # (slot, adapter): to be copied before the next step
        # who waits for a slot, and how many have overtaken it
        self.passed: dict[Sequence, int] = {}

    def begin_look(self) -> None:
        """The queue is looked through again: forget those that wait no more."""
        if self.passed:
            self.passed = {
                seq: n
                for seq, n in self.passed.items()
                if seq.finish_reason is None and seq.slot < 0
            }

    def admits(self, seq: Sequence) -> bool:
        """Whether a waiting sequence may begin, as far as its adapter goes."""
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
        """A sequence begins: its adapter has a slot from now on."""
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
        """The slot of the adapter that nobody has used for longest."""
        key = next(key for key in self.slots if not self.users[key])
        return self.slots.pop(key)

    def give_back(self, seq: Sequence) -> None:
        """A sequence does not run any more; its adapter stays until another needs the slot."""
        if seq.adapter is not None:
            self.users[seq.adapter.key] -= 1
            self.slots[seq.adapter.key] = self.slots.pop(seq.adapter.key)  # used last

    def take_loads(self) -> list[tuple[int, Any]]:
        loads, self.loads = self.loads, []
        return loads

    def forget(self) -> None:
        """The device holds no adapters any more, and nobody runs."""
        assert not any(self.users.values()), "adapters are forgotten that running sequences use"
        self.free += self.slots.values()
        self.slots = {}
        self.loads = []

    def check(self, running: list[Sequence]) -> None:
        """Prove that every slot is free or one adapter's, and that those who run have theirs."""
        used = Counter(seq.adapter.key for seq in running if seq.adapter is not None)
        assert +self.users == used, "an adapter's users are miscounted"
        for seq in running:
            assert seq.adapter is None or self.slots[seq.adapter.key] == seq.adapter_slot, (
                "an adapter has moved"
            )
