"""Who is served when: pure Python over sequences and pages; it knows neither JAX nor the model."""

from dataclasses import dataclass
from typing import NamedTuple

from ..cache.page_table import PageTable
from ..cache.prefetch import ready
from ..request.sequence import Sequence
from .waiting_queue import Line


class Item(NamedTuple):  # hundreds are made a step, and a frozen dataclass takes four times as long
    """The rows that one sequence brings to a step: positions start .. start + count."""

    seq: Sequence
    start: int
    num_rows: int
    draws: bool  # the last row draws the next token
    begins: bool  # the first since the sequence got its slot
    scores: tuple[int, ...] = ()  # rows (positions) whose next prompt token is scored


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: what every sequence that takes part computes."""

    items: tuple[Item, ...]

    @property
    def num_rows(self) -> int:
        return sum(item.num_rows for item in self.items)

    @property
    def needs(self) -> tuple[int, int, int]:
        """Rows, sequences, and rows whose logits are wanted."""
        return self.num_rows, len(self.items), sum(len(item.scores) + item.draws for item in self.items)

    @property
    def decodes(self) -> bool:
        """Every sequence brings a single row."""
        return all(item.num_rows == 1 for item in self.items)


@dataclass(frozen=True, slots=True)
class Limits:
    """What fits into one step."""

    max_seqs: int
    max_rows: int
    max_samples: int  # rows of a step whose logits are computed


POINT = 30.0  # seconds of waiting that make up for a point of priority


def rank_of(priority: int, arrival: float) -> float:
    """A request's place in the queue: a better priority is worth having come so much earlier.

    As all grow older alike, the order among those who wait never changes, and ageing costs nothing.
    """
    return arrival + POINT * priority


class Scheduler:
    """The first in line goes first; decodes before prompts; the highest rank gives way when pages run out.

    Where `lanes` steps are under way at a time, those who write one share them evenly: what a step draws is known
    before their next.
    """

    def __init__(self, pages: PageTable, limits: Limits, lanes: int = 1, waiting: Line | None = None):
        self.pages, self.limits, self.lanes = pages, limits, lanes
        self.waiting = Line() if waiting is None else waiting
        self.running: list[Sequence] = []
        self.free_slots = list(range(limits.max_seqs - 1, -1, -1))
        self.stuck: tuple | None = None  # what kept the first in the queue out, as long as it does

    def add(self, *sequences: Sequence) -> None:
        for seq in sequences:
            self.waiting.enter(seq)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> Plan | None:
        """The next step, or None if there is nothing to compute now."""
        self.rows, self.samples = self.limits.max_rows, self.limits.max_samples
        items: dict[Sequence, Item] = {}
        behind = [(seq, missing) for seq in self.running if (missing := seq.missing)]
        # The decodes go first so that a long prompt never keeps them waiting; it gets the rows that are left.
        writing = [one for one in behind if one[1] == 1]
        if self.lanes > 1:
            del writing[-(-len(self.running) // self.lanes) :]
        for seq, missing in writing + [one for one in behind if one[1] > 1]:
            if seq.slot < 0 or not self.rows:
                continue  # gave way to an earlier one
            start = seq.num_computed
            if missing == 1 and start % self.pages.page_size and self.samples and seq.prompt_scores is None:
                # The row before it is in the same page: nothing is to be done, and hundreds do so in every step.
                items[seq] = Item(seq, start, 1, True, not seq.begun)
                self.rows, self.samples = self.rows - 1, self.samples - 1
            elif item := self.take(seq, missing, items):
                items[seq] = item
        while self.free_slots and self.rows and (seq := self.waiting.first(self.ready)) and self.admit(seq):
            self.waiting.remove(seq)
            if item := self.take(seq, seq.missing, items):
                items[seq] = item
        for seq, item in items.items():  # they count as computed: every later step runs after this one on the device
            seq.num_computed += item.num_rows
            seq.pending += item.draws
            seq.begun = True
        if self.waiting.shared:
            for item in items.values():
                self.waiting.give(item.seq, item.num_rows)
        return Plan(tuple(items.values())) if items else None

    def ready(self, seq: Sequence) -> bool:
        """Whether it is to be served here, and does not wait for the disk."""
        return seq.replica == self.pages.replica and ready(self.pages, seq)

    def admit(self, seq: Sequence) -> bool:
        """Give a slot to a sequence that can catch up: one that cannot would hold pages and not finish."""
        waits_for = (seq, self.pages.left, sum(other.missing > 1 for other in self.running))
        if seq.pending or waits_for == self.stuck:
            return False
        found = self.pages.match(seq)
        if not self.pages.admits(seq, found.path, self.running, self.limits.max_rows):
            self.stuck = waits_for
            return False
        self.pages.adopt(seq, found)
        if not seq.num_preemptions:
            seq.num_cached = min(seq.num_computed, seq.num_prompt)
        seq.slot, seq.begun = self.free_slots.pop(), False
        self.running.append(seq)
        return True

    def take(self, seq: Sequence, missing: int, items: dict[Sequence, Item]) -> Item | None:
        """Rows for one sequence, as many as the step and the pages allow; others may have to give way."""
        start = seq.num_computed
        count = min(missing, self.rows)
        scores: tuple[int, ...] = ()
        if seq.prompt_scores is not None:
            wanted = [p for p in range(start, min(start + count, seq.num_prompt - 1)) if seq.prompt_scores[p] is None]
            scores = tuple(wanted[: self.samples])
            if len(scores) < len(wanted):
                count = wanted[len(scores)] - start
        draws = start + count == seq.num_tokens
        if draws and len(scores) == self.samples:
            draws, count = False, count - 1
        if count <= 0:
            return None
        self.pages.enter(seq, seq.num_computed)  # before pages slide out of a window
        self.pages.slide(seq)
        while not self.pages.grow(seq, start + count):
            victim = next((other for other in reversed(self.by_rank()) if other not in items), None)
            if victim is None or victim is seq:
                return None  # nobody later to take from: wait until somebody ends
            self.preempt(victim)
        self.pages.enter(seq, start + count)
        self.rows -= count
        self.samples -= len(scores) + draws
        return Item(seq, start, count, draws, not seq.begun, scores)

    def by_rank(self) -> list[Sequence]:
        return sorted((seq for seq in self.running if seq.slot >= 0), key=lambda seq: seq.rank)

    def preempt(self, seq: Sequence) -> None:
        """Take everything back; the tokens so far are computed again later."""
        self.leave(seq)
        seq.num_computed, seq.fetch = 0, None
        seq.num_preemptions += 1
        seq.rank -= POINT  # so that nobody gives way again and again
        self.waiting.add(seq)

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence, wherever it is; rows already under way for it are computed in vain."""
        if seq.finish_reason is not None:
            return
        seq.finish_reason = reason
        if seq.slot >= 0:
            self.leave(seq)
        else:
            self.waiting.remove(seq)
        self.waiting.leave(seq)

    def leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.free_slots.append(seq.slot)
        seq.slot = -1
        self.pages.release(seq)

    def check(self) -> None:
        """Prove that pages and slots add up."""
        self.pages.check(self.running)
        slots = [seq.slot for seq in self.running] + self.free_slots
        assert sorted(slots) == list(range(self.limits.max_seqs)), "a slot is lost or has two owners"
        assert all(seq.slot < 0 and not seq.pages for seq in self.waiting), "a waiting sequence holds something"
