"""Replicas that step together: each has slots and pages of its own, and all of them one queue and one buffer a step."""

from itertools import groupby

import numpy as np

from ..cache.page_moves import Moves
from ..cache.page_pool import Group
from ..cache.page_table import PageTable
from ..device.batch import Size, choose
from ..request.sequence import Sequence
from .batch_builder import Batcher
from .scheduler import Limits, Plan, Scheduler
from .waiting_queue import Line

STAYS = 128  # rows that a sequence counts for beside those that it lacks: it will write


class Tables:
    """The page tables of all replicas, as the engine sees one."""

    def __init__(self, tables: list[PageTable]):
        self.tables = tables
        self.page_size, self.keeps_prefixes = tables[0].page_size, tables[0].keeps_prefixes

    @property
    def groups(self) -> list[Group]:
        """Those of the first replica, then those of the next."""
        return [group for table in self.tables for group in table.groups]

    def fits(self, num_tokens: int, chunk: int) -> bool:
        return self.tables[0].fits(num_tokens, chunk)

    def used(self) -> float:
        """The share of pages in use, of the fullest replica."""
        return max(table.used() for table in self.tables)

    def take_moves(self) -> Moves:
        found = Moves()
        for moves in (table.take_moves() for table in self.tables):
            found.out += moves.out
            found.within += moves.within
            found.back |= moves.back
        return found

    def disown(self, seq: Sequence) -> None:
        self.tables[seq.replica].disown(seq)

    def lose(self) -> None:
        for table in self.tables:
            table.lose()

    def forget(self) -> None:
        for table in self.tables:
            table.forget()

    def wait(self, seconds: float) -> None:
        for table in self.tables:
            table.wait(seconds / len(self.tables))


class SharedLine(Line):
    """One line before all replicas; it knows how much waits for each."""

    def __init__(self, replicas: int):
        super().__init__()
        self.rows: dict[Sequence, int] = {}  # that each was taken to need
        self.rows_for, self.count_for = [0] * replicas, [0] * replicas

    def add(self, seq: Sequence) -> None:
        super().add(seq)
        self.rows[seq] = seq.num_tokens + STAYS
        self.count(seq, 1)

    def remove(self, seq: Sequence) -> None:
        super().remove(seq)
        self.count(seq, -1)
        del self.rows[seq]

    def count(self, seq: Sequence, sign: int) -> None:
        self.count_for[seq.replica] += sign
        self.rows_for[seq.replica] += sign * self.rows[seq]

    def send(self, seq: Sequence, replica: int) -> None:
        """Let it wait for another replica."""
        self.count(seq, -1)
        seq.replica, seq.fetch = replica, None
        self.count(seq, 1)


class Replicas:
    """A scheduler each, behind one queue; the steps that they plan are one step of the device."""

    def __init__(self, pages: Tables, limits: Limits, lanes: int = 1):
        self.waiting = SharedLine(len(pages.tables))
        self.each = [Scheduler(table, limits, lanes, self.waiting) for table in pages.tables]

    @property
    def running(self) -> list[Sequence]:
        return [seq for one in self.each for seq in one.running]

    @property
    def busy(self) -> bool:
        return any(one.busy for one in self.each)

    def add(self, *sequences: Sequence) -> None:
        """Those of a request begin alike, and so go to the same replica."""
        replica = self.best(sequences[0])
        for seq in sequences:
            seq.replica = replica
            self.waiting.enter(seq)

    def best(self, seq: Sequence) -> int:
        """Where it is done first, as far as rows tell: with what is there of its beginning, and least before it."""
        rows = [
            wait + seq.num_tokens - self.known(one, seq)
            for one, wait in zip(self.each, self.waiting.rows_for, strict=True)
        ]
        for other in self.running:
            rows[other.replica] += other.num_tokens - other.num_computed + STAYS
        return int(np.argmin(rows))

    def known(self, one: Scheduler, seq: Sequence) -> int:
        found = one.pages.match(seq)
        return len(found.path) * one.pages.page_size + found.rows

    def schedule(self) -> Plan | None:
        self.level()
        plans = [plan for one in self.each if (plan := one.schedule()) is not None]
        return Plan(tuple(item for plan in plans for item in plan.items)) if plans else None

    def level(self) -> None:
        """Let those who wait for a full replica go to one that has slots for which nobody waits."""
        waits = self.waiting.count_for
        full = {n for n, one in enumerate(self.each) if waits[n] and (not one.free_slots or one.stuck is not None)}
        free = [len(one.free_slots) - count for one, count in zip(self.each, waits, strict=True)]
        if not full or max(free) < 1:
            return
        for seq in self.waiting:
            if seq.replica in full and not seq.num_preemptions and seq.fetch in (None, True):
                self.waiting.send(seq, target := int(np.argmax(free)))
                free[target] -= 1
                if max(free) < 1:
                    return

    def preempt(self, seq: Sequence) -> None:
        self.each[seq.replica].preempt(seq)

    def finish(self, seq: Sequence, reason: str) -> None:
        self.each[seq.replica].finish(seq, reason)

    def check(self) -> None:
        for one in self.each:
            one.check()


def scheduler_of(pages: PageTable | Tables, limits: Limits, lanes: int) -> Scheduler | Replicas:
    """Who plans the steps of those whose pages these are."""
    return Scheduler(pages, limits, lanes) if isinstance(pages, PageTable) else Replicas(pages, limits, lanes)


class Batchers:
    """The batchers of all replicas: their batches have the same size, and go to the device in one buffer."""

    def __init__(self, each: list[Batcher]):
        self.each, self.layouts = each, each[0].layouts
        self.draws_plainly = False

    def forget(self) -> None:
        for one in self.each:
            one.forget()

    def assign(self, seq: Sequence, biased: bool) -> bool:
        return self.each[seq.replica].assign(seq, biased)

    def build(self, plan: Plan) -> tuple[Size, np.ndarray]:
        plans = {number: Plan(tuple(items)) for number, items in groupby(plan.items, lambda item: item.seq.replica)}
        most = map(max, zip(*(own.needs for own in plans.values()), strict=True))
        size = choose(self.layouts, *most, plan.decodes)
        buffers = [self.layouts[size].padding] * len(self.each)
        for number, own in plans.items():
            again = self.each[number].advance(own.items)
            buffers[number] = again[1] if again and again[0] == size else self.each[number].fill(own, size)
        self.draws_plainly = all(self.each[number].draws_plainly for number in plans)
        return size, np.concatenate(buffers)


def batcher_of(replicas: int, *sizes, lanes: int) -> Batcher | Batchers:
    """What makes the buffers of so many replicas."""
    each = [Batcher(*sizes, lanes=lanes, replicas=replicas) for _ in range(replicas)]
    return Batchers(each) if replicas > 1 else each[0]
