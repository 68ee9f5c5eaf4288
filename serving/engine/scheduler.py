"""Schedules sequences into steps, with pages and slots; pure Python, without JAX or the model."""

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from ...model.config import FAR
from ..api.outputs import FinishReason
from ..cache.media_store import MediaStore
from ..cache.page_moves import PageMoves
from ..cache.page_table import PageTable
from ..device.step_shape import StepShape
from ..request.media import MediaItem, PromptMedia
from ..request.sequence import Sequence
from ..speculative.draft_planner import DraftPlanner
from .adapter_slots import AdapterSlots
from .waiting_queue import OUTPUT, WaitingQueue


# hundreds are made a step, and a frozen dataclass takes four times as long
class ScheduledSequence(NamedTuple):
    """What a step computes for one sequence: the tokens at positions start .. start + num_tokens,
    of which the last ones are its draft tokens.
    """

    seq: Sequence
    start: int
    num_tokens: int
    # After each of so many of the last tokens the step samples one: first the next token, then one
    # after each draft token.
    num_samples: int
    is_first_step: bool  # since the sequence got its slot
    scored_positions: tuple[int, ...] = ()  # positions whose next prompt token is scored
    draft_tokens: tuple[int, ...] = ()
    num_to_draft: int = 0  # draft tokens that the step makes for the next step
    # The step was scheduled as if all draft tokens of the previous step were accepted: the device
    # subtracts the rejected ones from `start`, and `draft_tokens` are placeholders.
    assumes_all_accepted: bool = False

    def resolved(self) -> "ScheduledSequence":
        """The true values of a step that assumed acceptance, once the previous one is processed."""
        seq = self.seq
        return self._replace(
            start=len(seq.tokens) - 1,
            draft_tokens=tuple(seq.draft.proposals[: len(self.draft_tokens)]),
            assumes_all_accepted=False,
        )

    @property
    def num_known(self) -> int:
        """Tokens of the sequence before and in this step, without draft tokens."""
        return self.start + self.num_tokens - len(self.draft_tokens)


@dataclass(frozen=True)
class StepPlan:
    """The sequences of one step and what each computes."""

    # of each replica; an empty one computes nothing
    parts: tuple[tuple[ScheduledSequence, ...], ...]
    # Of each replica, what its drafter has not followed and is to compute before.
    draft_prefills: tuple[tuple[ScheduledSequence, ...], ...] = ()
    steps: int = 1  # of a series: each sequence draws so many tokens, one after the other

    @cached_property
    def items(self) -> tuple[ScheduledSequence, ...]:
        return tuple(chain.from_iterable(self.parts))

    @property
    def num_tokens(self) -> int:
        return self.steps * sum(item.num_tokens for item in self.items)

    @property
    def decodes(self) -> bool:
        """Whether every sequence computes one token, or one and its draft tokens."""
        return all(item.num_tokens <= max(item.num_samples, 1) for item in self.items)

    @property
    def needs_host_sync(self) -> bool:
        """Whether the next step can only be scheduled once the host has this one's tokens."""
        return any(item.seq.draft.waits_for_host and item.num_samples for item in self.items)


POINT = 30.0  # seconds of waiting that make up for a point of priority


def queue_priority(priority: int, arrival: float) -> float:
    """The key by which waiting sequences are sorted, lowest first.

    A point of priority equals POINT seconds of waiting. All keys age alike, so the order of waiting
    sequences never changes.
    """
    return arrival + POINT * priority


class Scheduler:
    """One waiting queue for all data-parallel replicas, whose plans together make up a step."""

    def __init__(
        self,
        tables: Seq[PageTable],
        shape: StepShape,
        num_stages: int = 1,
        media_store: MediaStore | None = None,
    ):
        self.shape, self.waiting = shape, WaitingQueue(len(tables))
        self.media_store = media_store
        self.replicas = [
            ReplicaScheduler(table, shape, num_stages, self.waiting, media_store)
            for table in tables
        ]

    @property
    def running(self) -> list[Sequence]:
        return [seq for replica in self.replicas for seq in replica.running]

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or any(replica.running for replica in self.replicas)

    def add(self, *sequences: Sequence) -> None:
        """Queue the sequences of a request on one replica, since they share their prompt."""
        number = self.least_loaded_replica(sequences[0]) if len(self.replicas) > 1 else 0
        for seq in sequences:
            seq.replica = number
            self.waiting.enter(seq)

    def least_loaded_replica(self, seq: Sequence) -> int:
        """The replica with the fewest tokens left to compute; cached prompt tokens do not count."""
        tokens = list(self.waiting.tokens_for)
        for number, replica in enumerate(self.replicas):
            match = replica.table.match(seq)
            tokens[number] += (
                seq.num_tokens - len(match.path) * replica.table.page_size - match.num_partial
            )
        for running_seq in self.running:
            tokens[running_seq.replica] += (
                running_seq.num_tokens - running_seq.num_computed + OUTPUT
            )
        return tokens.index(min(tokens))

    def schedule(self, drafts: bool = False) -> StepPlan | None:
        """Plan the next step; None if nothing can be computed now. `drafts`: sequences may have
        draft tokens.
        """
        if len(self.replicas) > 1:
            self.rebalance_replicas()
        # it looks at every sequence
        decodes = drafts and all(replica.decodes for replica in self.replicas)
        items_by_replica = tuple([replica.schedule(decodes) for replica in self.replicas])
        if not any(items_by_replica):
            return None
        prefills = tuple([replica.draft_prefills for replica in self.replicas])
        return StepPlan(items_by_replica, prefills if any(prefills) else ())

    def fuse_steps(self, plan: StepPlan, max_steps: int) -> StepPlan:
        """Repeat a decode plan in up to `max_steps` steps of one launch, unless a sequence waits
        for a slot.
        """
        if max_steps < 2 or self.waiting:
            return plan
        steps = min(
            [max_steps, *(replica.max_fused_steps(plan.items) for replica in self.replicas)]
        )
        if steps < 2:
            return plan
        items = tuple([item._replace(num_samples=steps) for item in plan.items])
        for item in items:
            item.seq.num_computed += steps - 1
            item.seq.pending += steps - 1
            if self.waiting.shared:
                self.waiting.serve(item.seq, steps - 1)
        return StepPlan((items,), steps=steps)

    def take_moves(self) -> PageMoves:
        """Take the page copies of all replicas that must run before the next step."""
        moves = PageMoves()
        for replica in self.replicas:
            moves.add(replica.table.take_moves())
        return moves

    def take_adapters(self) -> list[tuple[int, Any]]:
        """Take the (slot, adapter) pairs that must be loaded before the next step."""
        return [load for replica in self.replicas for load in replica.adapters.take_loads()]

    def sequences_reading(self, salt: Hashable, item: MediaItem) -> list[Sequence]:
        """The running sequences that still have to read an item."""
        return [
            seq
            for seq in self.running
            if seq.media is not None
            and seq.cache.salt == salt
            and any(
                span.item.digest == item.digest for span in seq.media.between(seq.num_computed, FAR)
            )
        ]

    def forget_device(self) -> None:
        """Forget which adapters and media the device holds, since its state is new."""
        for replica in self.replicas:
            replica.adapters.forget()
        if self.media_store is not None:
            self.media_store.forget()

    def rebalance_replicas(self) -> None:
        """Move sequences that wait for a full replica to one with more free slots than waiting
        sequences.
        """
        num_waiting = self.waiting.count_for
        full = {
            number
            for number, replica in enumerate(self.replicas)
            if num_waiting[number] and replica.full
        }
        free = [
            0 if number in full else len(replica.free_slots) - num_waiting[number]
            for number, replica in enumerate(self.replicas)
        ]
        if not full or max(free) < 1:
            return
        for seq in self.waiting:
            if seq.replica in full and not seq.num_preemptions and seq.cache.load is None:
                self.waiting.send(seq, target := free.index(max(free)))
                free[target] -= 1
                if max(free) < 1:
                    return

    def roll_back(self, item: ScheduledSequence, num_accepted: int) -> None:
        """Uncount the rejected draft tokens: later steps overwrite their keys and values."""
        seq = item.seq
        if seq.slot >= 0:  # else it was preempted since, and nothing of it counts as computed
            seq.num_computed -= len(item.draft_tokens) - num_accepted
            seq.draft.num_prefilled = min(seq.draft.num_prefilled, seq.num_computed)

    def shorten(self, item: ScheduledSequence, num_steps: int) -> None:
        """Count only the fused steps that ran: the device skips the others once every sequence has
        stopped.
        """
        seq = item.seq
        seq.num_computed = min(seq.num_computed, item.start + num_steps)
        seq.draft.num_prefilled = min(seq.draft.num_prefilled, seq.num_computed)

    def preempt(self, seq: Sequence) -> None:
        self.replicas[seq.replica].preempt(seq)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence in whatever state it is; results of a step in flight are discarded."""
        if seq.finish_reason is not None:
            return
        seq.finish_reason = reason
        # fused steps under way may not run, and the last token has no keys and values then
        if seq.pending > 1:
            page_size = self.replicas[seq.replica].table.page_size
            # fused steps begin before the last token of a page
            indexed = seq.cache.num_indexed * page_size
            seq.num_computed = min(seq.num_computed, max(len(seq.tokens) - 1, indexed))
        if seq.slot >= 0:
            self.replicas[seq.replica].release(seq)
        else:
            self.waiting.remove(seq)
        self.waiting.leave(seq)

    def check(self) -> None:
        """Assert that pages and slots are accounted for."""
        for replica in self.replicas:
            replica.check()
        assert all(seq.slot < 0 and not seq.cache.pages for seq in self.waiting), (
            "a waiting sequence holds something"
        )


class ReplicaScheduler:
    """The slots, pages and running sequences of one replica.

    Waiting sequences are admitted in the order of the queue, and decodes come before prefills. When
    pages run out, the sequence with the highest rank is preempted. With several pipeline stages as
    many steps are in flight, over which decoding sequences are spread evenly, since a sequence's
    next step needs its sampled token.
    """

    def __init__(
        self,
        table: PageTable,
        shape: StepShape,
        num_stages: int,
        waiting: WaitingQueue,
        media_store: MediaStore | None = None,
    ):
        self.table = table
        self.media_store = media_store
        self.shape = shape
        self.num_stages = num_stages
        self.waiting = waiting
        self.running: list[Sequence] = []
        self.free_slots = list(range(shape.max_seqs - 1, -1, -1))
        self.adapters = AdapterSlots(shape.num_adapters)
        # who was not admitted, and the state it waits to change
        self.refused: tuple[Sequence, int, int] | None = None
        self.rows = self.samples = 0  # left in the step that is being planned
        self.drafts = DraftPlanner(table, shape.max_seqs, shape.needs_draft_prefill)
        self.draft_prefills: tuple[ScheduledSequence, ...] = ()  # before it

    @property
    def full(self) -> bool:
        return not self.free_slots or self.refused is not None

    @property
    def decodes(self) -> bool:
        """Whether all running sequences decode and none can be admitted, so that draft tokens fit."""
        has_waiting = self.free_slots and self.waiting.count_for[self.table.replica]
        return not has_waiting and all(seq.missing <= 1 for seq in self.running)

    def schedule(self, decodes: bool = False) -> tuple[ScheduledSequence, ...]:
        """Plan this replica's part of a step; if all replicas decode, every token may be sampled
        from.
        """
        self.rows = self.shape.max_tokens
        self.samples = self.shape.max_samples
        page_size = self.table.page_size
        if decodes:
            self.samples = self.rows
        items: dict[Sequence, ScheduledSequence] = {}
        may_draft = self.shape.max_drafts > 0
        unfinished = [(seq, missing) for seq in self.running if (missing := seq.missing)]
        # The decodes go first so that a long prompt never keeps them waiting; it gets the rows that
        # are left.
        decoding = [pair for pair in unfinished if pair[1] == 1]
        if self.num_stages > 1:
            del decoding[-(-len(self.running) // self.num_stages) :]
        if may_draft:
            self.drafts.begin_step(self.running, min(self.samples, self.rows) - len(decoding))
        if self.media_store is not None:
            self.media_store.begin_step()
        for seq, missing in decoding + [pair for pair in unfinished if pair[1] > 1]:
            if seq.slot < 0 or not self.rows:
                continue  # preempted for an earlier one
            start = seq.num_computed
            is_plain = (
                seq.prompt_scores is None
                and not (may_draft and seq.is_speculating)
                and (seq.media is None or start >= seq.media.stop)
            )
            if missing == 1 and start % page_size and self.samples and is_plain:
                # The row before it is in the same page: nothing is to be done, and hundreds do so
                # in every step.
                items[seq] = ScheduledSequence(seq, start, 1, 1, not seq.begun)
                self.rows = self.rows - 1
                self.samples = self.samples - 1
            elif item := self.take(seq, missing, items):
                items[seq] = item
        self.adapters.begin_look()
        while (
            self.free_slots
            and self.rows
            and (seq := self.waiting.first(self.ready))
            and self.admit(seq)
        ):
            self.waiting.remove(seq)
            if item := self.take(seq, seq.missing, items):
                items[seq] = item
        if may_draft:
            self.draft_prefills = tuple(
                ScheduledSequence(*prefill, 0, False)
                for prefill in self.drafts.end_step(items.values())
            )
        # they count as computed: every later step runs after this one on the device
        for seq, item in items.items():
            seq.num_computed += item.num_tokens
            seq.pending += item.num_samples
            seq.begun = True
        if self.waiting.shared:
            for item in items.values():
                self.waiting.serve(item.seq, item.num_tokens)
        return tuple(items.values())

    def max_fused_steps(self, items: Seq[ScheduledSequence]) -> int:
        """Number of decode steps until a sequence needs the host: for a page, a draft token, or its
        end.
        """
        if len(items) < len(self.running):
            return 1  # the others need the tokens of a step in flight
        page_size = max_steps = self.table.page_size
        for seq, start, num_tokens, num_samples, _, scored_positions, *_ in items:
            if (
                num_tokens != 1
                or num_samples != 1
                or scored_positions
                or seq.needs_host_sync
                or seq.bad_words
            ):
                return 1
            num_tokens_left = seq.max_tokens - (start + 1 - seq.num_prompt)
            max_steps = min(max_steps, num_tokens_left, page_size - start % page_size)
        return max_steps

    def ready(self, seq: Sequence) -> bool:
        """Whether a waiting sequence belongs to this replica, its adapter fits and its prefix is
        loaded.
        """
        return (
            seq.replica == self.table.replica
            and self.adapters.admits(seq)
            and self.table.prefetched(seq)
        )

    def admit(self, seq: Sequence) -> bool:
        """Give a slot to a waiting sequence, if pages for all of its tokens can be had."""
        if self.shape.whole_prompts and seq.num_tokens > self.rows:
            return False
        state = (
            seq,
            self.table.num_freed,
            sum(running_seq.missing > 1 for running_seq in self.running),
        )
        if seq.pending or state == self.refused:
            return False
        match = self.table.match(seq)
        if not self.table.admits(seq, match.path, self.running, self.shape.max_tokens):
            self.refused = state
            return False
        self.table.begin(seq, match)
        if not seq.num_preemptions:
            seq.cache.num_cached = min(seq.num_computed, seq.num_prompt)
        self.adapters.take(seq)
        seq.slot = self.free_slots.pop()
        seq.begun = False
        self.running.append(seq)
        return True

    def take(
        self, seq: Sequence, missing: int, items: dict[Sequence, ScheduledSequence]
    ) -> ScheduledSequence | None:
        """Schedule as many of a sequence's tokens as the step and the pages allow; others may be
        preempted.
        """
        start = seq.num_computed
        count = self.table.tokens_to_snapshot(seq, start, min(missing, self.rows))
        if seq.media is not None and self.media_store is not None:
            count = tokens_before_missing_media(self.media_store, seq, seq.media, start, count)
            if self.shape.sees_spans:
                count = whole_spans(seq.media, start, count)
        scores: tuple[int, ...] = ()
        if seq.prompt_scores is not None:
            positions = [
                p
                for p in range(start, min(start + count, seq.num_prompt - 1))
                if seq.prompt_scores[p] is None
            ]
            scores = tuple(positions[: self.samples])
            if len(scores) < len(positions):
                count = positions[len(scores)] - start
        draws = start + count == seq.num_tokens
        if draws and len(scores) == self.samples:
            draws = False
            count = count - 1
            if seq.media is not None and self.shape.sees_spans:
                count = whole_spans(seq.media, start, count)
        if count <= 0:
            return None
        self.table.insert(seq, seq.num_computed)  # before pages slide out of a window
        self.table.slide(seq)
        while not self.table.grow(seq, start + count):
            victim = next(
                (
                    running_seq
                    for running_seq in reversed(self.by_rank())
                    if running_seq not in items
                ),
                None,
            )
            if victim is None or victim is seq:
                return None  # nobody of a higher rank to take from: wait until somebody ends
            self.preempt(victim)
        self.table.keep_states(seq)
        self.drafts.add_tokens(seq, start, start + count)  # before its pages are shared
        self.table.insert(seq, start + count)
        self.samples -= len(scores) + draws
        assumes_all_accepted = seq.assumes_all_accepted
        drafts: tuple[int, ...] = ()
        num_to_draft = 0
        if draws and self.shape.max_drafts:
            max_drafts = min(self.samples, self.rows - count)
            drafts = self.drafts.take_drafts(seq, start + count, max_drafts)
            self.samples -= len(drafts)
            num_to_draft = seq.draft.num_requested
            if num_to_draft:
                self.drafts.reserve_pages(seq, start + count + len(drafts))
        self.rows -= count + len(drafts)
        return ScheduledSequence(
            seq,
            start,
            count + len(drafts),
            draws + len(drafts),
            not seq.begun,
            scores,
            drafts,
            num_to_draft,
            assumes_all_accepted,
        )

    def by_rank(self) -> list[Sequence]:
        return sorted((seq for seq in self.running if seq.slot >= 0), key=lambda seq: seq.rank)

    def preempt(self, seq: Sequence) -> None:
        """Release a running sequence and queue it again; its tokens are recomputed later."""
        self.release(seq)
        seq.num_computed, seq.cache.prefetched = 0, False
        seq.num_preemptions += 1
        seq.rank -= POINT  # so that nobody is preempted again and again
        self.waiting.add(seq)

    def release(self, seq: Sequence) -> None:
        """Free the slot and the pages of a sequence."""
        self.running.remove(seq)
        self.free_slots.append(seq.slot)
        self.adapters.give_back(seq)
        seq.slot = -1
        seq.draft.num_on_device = 0
        seq.draft.num_verifying = 0
        self.table.release(seq)

    def check(self) -> None:
        """Assert that pages and slots are accounted for."""
        self.table.check(self.running)
        self.adapters.check(self.running)
        slots = [seq.slot for seq in self.running] + self.free_slots
        assert sorted(slots) == list(range(self.shape.max_seqs)), "a slot is lost or has two owners"


def tokens_before_missing_media(
    store: MediaStore, seq: Sequence, media: PromptMedia, start: int, count: int
) -> int:
    """How many of `count` tokens can be computed now: those before the first item that is not
    encoded yet. All items among them are requested.
    """
    starts = [
        span.start
        for span in media.between(start, start + count)
        if not store.request(seq.cache.salt, span.item)
    ]
    return max(starts[0] - start, 0) if starts else count


def whole_spans(media: PromptMedia, start: int, count: int) -> int:
    """How many of `count` tokens to compute so that no span of an image is cut."""
    cut = next(
        (span for span in media.between(start, start + count) if span.stop > start + count), None
    )
    return count if cut is None else max(cut.start - start, 0)
