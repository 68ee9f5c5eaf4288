"""Builds the buffers that steps read from the scheduler's plans."""

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import jax
import numpy as np

from ..cache.media_store import MediaStore
from ..device.batch import STOPS, Batch, BatchLayout, param_arrays
from ..device.step_shape import Size, StepShape, choose, sizes
from ..request.sequence import Sequence
from .scheduler import ScheduledSequence, StepPlan


@dataclass(frozen=True)
class DecodeStep:
    """A replica's decode step on tokens that the device holds.

    While the same sequences decode, the next step differs only in its positions.
    """

    seqs: list[Sequence]
    shapes: list[tuple[int, bool]]  # of each: its rows, and whether it is ahead
    size: Size
    slots: np.ndarray
    firsts: np.ndarray  # of each sequence its first row
    of_T: np.ndarray  # each row's sequence,
    offsets_T: np.ndarray  # its place among that one's,
    places_T: np.ndarray
    num_pages: list[int]  # in each sequence's table
    buffer: np.ndarray
    plain: bool  # see `quire.ops.sampling.sample`


class BatchBuilder:
    """Caches the parameters and page tables of each slot, so that a step only copies arrays.

    A slot's place is its index among those of all replicas.
    """

    def __init__(
        self, shape: StepShape, num_stages: int = 1, media_store: MediaStore | None = None
    ):
        self.media_store = media_store
        self.shape, places = shape, shape.num_replicas * shape.max_seqs
        self.num_stages = num_stages  # as many steps are in flight at once
        options = sizes(shape, jax.default_backend())  # the smallest first
        self.layouts = {size: BatchLayout(shape.at(size)) for size in options}
        top = max(size.seqs for size in options)
        mixed = [size for size in options if size.rows > size.seqs == top]
        # sizes of steps in which a drafter computes what it is behind
        self.prefill_sizes = sorted({mixed[0], mixed[-1]})
        self.tables = [
            np.zeros((places, shape.table_width), np.int32) for _ in range(shape.num_groups)
        ]
        self.num_synced = [0] * places  # pages of each place's sequence that are in its tables
        self.seeds = np.zeros((places, 2), np.uint32)
        self.tracked = np.zeros(places, bool)
        self.plain = np.zeros(places, bool)
        self.adapters = np.full(places, shape.num_adapters, np.int32)
        self.of_head = np.zeros(places, bool)  # whether it adapts the head
        self.params = param_arrays(places)
        self.settings = self.params | {
            name: np.zeros(places, bool) for name in ("biased_R", "wants_logprobs_R")
        }
        # Of each replica the last steps under way that only decoded, the first one the next to go
        # on.
        self.decode_steps: list[deque[DecodeStep]] = [deque() for _ in range(shape.num_replicas)]
        self.draws_plainly = False  # the batch that was built last asks for nothing but plain draws

    def place(self, seq: Sequence) -> int:
        """The index of a sequence's slot among those of all replicas."""
        return seq.replica * self.shape.max_seqs + seq.slot

    def forget(self) -> None:
        """Drop the decode steps in flight: every sequence starts over."""
        for steps in self.decode_steps:
            steps.clear()

    def assign(self, seq: Sequence, biased: bool) -> bool:
        """Set up the slot of a sequence that is new or starts over; returns whether its tokens are
        counted.
        """
        place = self.place(seq)
        p = seq.params
        self.decode_steps[seq.replica].clear()
        self.num_synced[place], self.seeds[place] = 0, seq.seed
        if no_adapter := self.shape.num_adapters:
            self.adapters[place] = no_adapter if seq.adapter is None else seq.adapter_slot
            self.of_head[place] = seq.adapter is not None and seq.adapter.has_head
        for table in self.tables:
            # a step that drafts may write past what the sequence has pages for: into the dummy page
            table[place] = 0
        tracked = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        self.tracked[place] = tracked
        self.plain[place] = p.top_k <= 0 and p.top_p >= 1 and not (tracked or biased or seq.scored)
        for name, array in self.params.items():
            array[place] = getattr(p, name.removesuffix("_R"))
        self.settings["biased_R"][place], self.settings["wants_logprobs_R"][place] = (
            biased,
            seq.scored,
        )
        return tracked

    def build(self, plan: StepPlan) -> tuple[Size, np.ndarray]:
        """Write a plan into one buffer, at the smallest size that holds it."""
        continued = [
            self.continued(steps, items)
            for steps, items in zip(self.decode_steps, plan.parts, strict=True)
        ]
        items_by_replica = plan.parts
        rows, samples, decodes = zip(*map(needs_of, items_by_replica, continued), strict=True)
        size = choose(
            self.layouts, max(rows), max(map(len, items_by_replica)), max(samples), all(decodes)
        )
        buffer = np.empty_like(self.layouts[size].nothing)
        are_plain = []
        for steps, items, last, replica_buffer in zip(
            self.decode_steps,
            items_by_replica,
            continued,
            buffer.reshape(len(items_by_replica), -1),
            strict=True,
        ):
            if not items:
                replica_buffer[:] = self.layouts[size].padding
            elif last is not None and last.size == size:
                are_plain.append(self.advance(steps, items, replica_buffer))
            else:
                are_plain.append(self.fill(steps, items, size, replica_buffer))
        # all replicas as often, since they wait for each other where they share experts
        if self.shape.max_drafts:
            at = self.layouts[size].offsets
            replica_buffers = buffer.reshape(len(items_by_replica), -1)
            replica_buffers[:, at.num_drafts_1], replica_buffers[:, at.prefills_1] = drafting(
                plan.items
            )
        self.draws_plainly = all(are_plain)
        return size, buffer

    def can_extend(self, plan: StepPlan) -> bool:
        """Whether a step continues the one in flight, at the smallest size, on a single replica."""
        (items,) = plan.parts
        (steps,) = self.decode_steps
        if not steps or steps[0].size != next(iter(self.layouts)):
            return False
        if any(item.is_first_step for item in items):  # `assign` will drop the steps
            return False
        return self.continued(steps, items) is not None and len(steps[0].of_T) == len(items)

    def build_fused(self, plan: StepPlan, max_steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Build the buffers of up to `most` fused steps, and the stop tokens of each sequence.

        The device checks `STOPS` stop tokens; the host finds the others in the results.
        """
        (items,) = plan.parts
        (steps,) = self.decode_steps
        size = steps[0].size
        buffers = np.empty((max_steps, len(self.layouts[size].padding)), np.int32)
        stops_BE = np.full((size.seqs, STOPS), -1, np.int32)
        for number in range(plan.steps):
            self.advance(
                steps, [item._replace(start=item.start + number) for item in items], buffers[number]
            )
        buffers[plan.steps :] = buffers[0]
        for row, item in enumerate(items):
            stops = sorted(item.seq.stop_ids)[:STOPS]
            stops_BE[row, : len(stops)] = stops
        return buffers, stops_BE

    def has_no_drafts(self, size: Size, buffer: np.ndarray) -> bool:
        """Whether a decode step neither verifies nor makes draft tokens."""
        at = self.layouts[size].offsets
        replica_buffers = buffer.reshape(len(self.decode_steps), -1)
        draft_fields = (
            replica_buffers[:, (at.num_drafts_1, at.prefills_1)],
            replica_buffers[:, at.ahead_T : at.ahead_T + size.rows],
        )
        return not any(fields.any() for fields in draft_fields)

    def build_draft_prefill(
        self, items_by_replica: Seq[Seq[ScheduledSequence]]
    ) -> tuple[Size, np.ndarray]:
        """Build a batch that only the draft model computes."""
        rows = max(sum(item.num_tokens for item in items) for items in items_by_replica)
        size = choose(self.prefill_sizes, rows, max(map(len, items_by_replica)), 0, False)
        buffer = self.layouts[size].nothing.copy()
        for items, replica_buffer in zip(
            items_by_replica, buffer.reshape(len(items_by_replica), -1), strict=True
        ):
            if items:
                # the draft model reads tokens alone
                self.fill(deque(), items, size, replica_buffer, reads_media=False)
        return size, buffer

    def continued(
        self, steps: deque[DecodeStep], items: Seq[ScheduledSequence]
    ) -> DecodeStep | None:
        """The step in flight that this one continues, with the same sequences and numbers of
        tokens; or None.
        """
        if not steps or len(items) != len(steps[0].seqs):
            return None
        last = steps[0]
        for item, seq, (count, assumes_all_accepted) in zip(
            items, last.seqs, last.shapes, strict=True
        ):
            if (
                item.seq is not seq
                or item.num_tokens != count
                or item.num_samples != count
                or item.assumes_all_accepted != assumes_all_accepted
            ):
                return None
        return last

    def advance(
        self, steps: deque[DecodeStep], items: Seq[ScheduledSequence], buffer: np.ndarray
    ) -> bool:
        """Write a step that continues the first of `steps`; returns whether it samples without
        top-k, top-p, penalties and log-probabilities.
        """
        last = steps.popleft()
        at = self.layouts[last.size].offsets
        T = len(last.of_T)
        positions = np.array([item.start for item in items])[last.of_T] + last.offsets_T
        tokens = -1 - last.slots if self.num_stages == 1 else [tokens_of(item)[0] for item in items]
        buffer[:] = last.buffer
        buffer[at.tokens_T + last.firsts] = tokens
        buffer[at.positions_T :][:T] = positions
        buffer[at.sampling.positions_R :][:T] = positions + 1
        num_pages = [seq.cache.num_pages for seq in last.seqs]
        for index, (count, last_count) in enumerate(zip(num_pages, last.num_pages, strict=True)):
            if count != last_count:
                place = self.sync_tables(last.seqs[index])
                for table, first in zip(self.tables, at.tables_GBM, strict=True):
                    buffer[first + index * table.shape[1] :][: table.shape[1]] = table[place]
        for first, kv_slots in zip(
            at.slots_GT, self.kv_slots(last.places_T, positions), strict=True
        ):
            buffer[first:][:T] = kv_slots
        steps.append(replace(last, num_pages=num_pages, buffer=buffer))
        return last.plain

    def fill(
        self,
        steps: deque[DecodeStep],
        items: Seq[ScheduledSequence],
        size: Size,
        buffer: np.ndarray,
        reads_media: bool = True,
    ) -> bool:
        """Write a step of any kind; the result is that of `advance`."""
        buffer[:] = self.layouts[size].padding
        b = self.layouts[size].views(buffer)
        seqs = [item.seq for item in items]
        slots = np.array([seq.slot for seq in seqs])
        places = slots + seqs[0].replica * self.shape.max_seqs
        counts = np.array([item.num_tokens for item in items])
        starts = np.array([item.start for item in items])
        row_ends = np.cumsum(counts)
        T = int(row_ends[-1])
        n = len(items)
        for seq in seqs:
            self.sync_tables(seq)

        b.second_B[:n] = [seq.second for seq in seqs]
        if self.shape.max_drafts:
            b.following_B[:n] = [following(item) for item in items]
        b.starts_B1[1 : n + 1], b.starts_B1[n + 1 :] = row_ends, T
        places_T = np.repeat(places, counts)
        positions = np.arange(T) + np.repeat(starts - (row_ends - counts), counts)
        b.owners_T[:T], b.positions_T[:T] = np.repeat(slots, counts), positions
        b.tokens_T[:T] = [token for item in items for token in tokens_of(item)]
        b.is_prompt_T[:T] = positions < np.repeat([seq.num_prompt for seq in seqs], counts)
        b.tracked_T[:T] = self.tracked[places_T]
        if self.media_store is not None and reads_media:
            fill_media(self.media_store, items, row_ends - counts, b)
        if b.adapters_T is not None:
            b.adapters_T[:T] = self.adapters[places_T]
        for item, end in (
            zip(items, row_ends.tolist(), strict=True) if self.shape.max_drafts else ()
        ):
            if item.draft_tokens:  # the step counts those that are accepted
                b.tracked_T[end - len(item.draft_tokens) : end] = False
            b.ahead_T[end - item.num_tokens : end] = item.assumes_all_accepted
        for table, batch_table in zip(self.tables, b.tables_GBM, strict=True):
            batch_table[:n] = table[places]
        for batch_slots, kv_slots in zip(
            b.slots_GT, self.kv_slots(places_T, positions), strict=True
        ):
            batch_slots[:T] = kv_slots
        self.fill_samples(items, slots, places, row_ends - counts, b)
        draws = all(is_steady(item) for item in items)
        is_plain = draws and bool(self.plain[places].all())
        # else the next drafts are others
        steady = draws and all(item.assumes_all_accepted or not item.draft_tokens for item in items)
        if len(steps) == self.num_stages:
            steps.popleft()
        if steady:
            num_pages = [seq.cache.num_pages for seq in seqs]
            shapes = [(i.num_tokens, i.assumes_all_accepted) for i in items]
            of_T = np.repeat(np.arange(n), counts)
            firsts = row_ends - counts
            offsets_T = np.arange(T) - firsts[of_T]
            steps.append(
                DecodeStep(
                    seqs,
                    shapes,
                    size,
                    slots,
                    firsts,
                    of_T,
                    offsets_T,
                    places_T,
                    num_pages,
                    buffer,
                    is_plain,
                )
            )
        return is_plain

    def busy(self, layout: BatchLayout, num_drafts: int) -> np.ndarray:
        """A batch at full size for measurements: every token is sampled from, all at the start of
        page 0.
        """
        buffer = layout.nothing.copy()
        for replica_buffer in buffer.reshape(self.shape.num_replicas, -1):
            b = layout.views(replica_buffer)
            size = layout.shape.size
            b.starts_B1[:] = np.arange(size.seqs + 1) * size.rows // size.seqs
            b.positions_T[:] = np.arange(size.rows) - np.repeat(
                b.starts_B1[:-1], np.diff(b.starts_B1)
            )
            b.owners_T[:] = np.repeat(np.arange(size.seqs), np.diff(b.starts_B1))
            b.sample_rows_R[:] = np.minimum(np.arange(size.samples), size.rows - 1)
            b.store_R[b.starts_B1[1:] - 1] = np.arange(size.seqs)  # who draws nothing has no drafts
            b.num_drafts_1[:], b.prefills_1[:] = num_drafts, num_drafts > 0
        return buffer

    def kv_slots(self, places, positions) -> list[np.ndarray]:
        """The KV slot that each token is written to, by cache group."""
        page, offset = np.divmod(positions, self.shape.page_size)
        return [table[places, page] * self.shape.page_size + offset for table in self.tables]

    def fill_samples(
        self,
        items: Seq[ScheduledSequence],
        slots: np.ndarray,
        places: np.ndarray,
        offsets: np.ndarray,
        b: Batch,
    ) -> None:
        """Write the inputs of sampling in the order of the plan: scored prompt tokens, then sampled
        ones.
        """
        counts = [len(item.scored_positions) + item.num_samples for item in items]
        s = b.sampling
        row = 0
        R = sum(counts)
        if not R:
            return
        for item, slot, offset in zip(items, slots, offsets, strict=True):
            seq = item.seq
            for position in item.scored_positions:
                b.sample_rows_R[row] = offset + position - item.start
                s.targets_R[row] = seq.tokens[position + 1]
                s.wants_logprobs_R[row] = seq.pool is None
                row += 1
            for depth in range(item.num_samples):
                position = item.num_known + depth
                drafts = item.draft_tokens
                b.sample_rows_R[row] = offset + position - item.start - 1
                b.store_R[row], b.depths_R[row] = slot, depth
                s.positions_R[row] = position
                s.ban_stop_R[row] = position - seq.num_prompt < seq.params.min_tokens
                if depth < len(drafts):
                    b.drafts_R[row] = drafts[depth]
                if depth and seq.constraint is not None:
                    s.bias_rows_R[row] = depth
                if depth:
                    s.drafted_RJ[row, :depth] = drafts[:depth]
                if seq.bad_words:
                    bans = banned(seq, drafts[:depth])
                    s.ban_RX[row, : len(bans)] = bans
                row += 1
        places_R = np.repeat(places, counts)
        if b.adapters_R is not None:
            b.adapters_R[:R] = np.where(
                self.of_head[places_R], self.adapters[places_R], self.shape.num_adapters
            )
        s.slots_R[:R], s.seeds_R2[:R] = np.repeat(slots, counts), self.seeds[places_R]
        for name, values in self.settings.items():
            if name == "wants_logprobs_R":
                s.wants_logprobs_R[:R] |= values[places_R]
            else:
                getattr(s, name)[:R] = values[places_R]

    def sync_tables(self, seq: Sequence) -> int:
        """Copy a sequence's new page numbers into its page tables; returns its place.

        A table only grows while its sequence runs.
        """
        place = self.place(seq)
        num_synced = self.num_synced[place]
        for table, pages in zip(self.tables, seq.cache.pages, strict=True):
            table[place, num_synced : len(pages)] = pages[num_synced:]
        self.num_synced[place] = seq.cache.num_pages
        return place


def fill_media(
    store: MediaStore, items: Seq[ScheduledSequence], first_rows: np.ndarray, b: Batch
) -> None:
    """Write the rows of the media store and the axes' positions of the sequences with media."""
    for item, row in zip(items, first_rows.tolist(), strict=True):
        media = item.seq.media
        if media is None:
            continue
        stop = item.start + item.num_tokens
        if b.shifts_AT is not None:
            b.shifts_AT[:, row : row + item.num_tokens] = media.shifts(item.start, stop)
        for span in media.between(item.start, stop):
            first = max(span.start, item.start)
            last = min(span.stop, stop)
            store_rows = store.rows(
                item.seq.cache.salt,
                span.item,
                span.first_row + first - span.start,
                span.first_row + last - span.start,
            )
            rows = slice(row + first - item.start, row + last - item.start)
            b.media_T[rows] = store_rows
            if b.span_ahead_T is not None:
                b.span_ahead_T[rows] = span.stop - 1 - np.arange(first, last)


def needs_of(items: Seq[ScheduledSequence], continued: DecodeStep | None) -> tuple[int, int, bool]:
    """(tokens, tokens whose logits are computed, whether each sequence has one token)."""
    if continued is not None:
        rows = len(continued.of_T)
        return rows, rows, rows == len(items)
    counts = [item.num_tokens for item in items]
    return (
        sum(counts),
        sum(len(item.scored_positions) + item.num_samples for item in items),
        counts.count(1) == len(items),
    )


def drafting(items: Seq[ScheduledSequence]) -> tuple[int, bool]:
    """(draft tokens that the step makes for each sequence, whether the draft model computes its
    tokens).
    """
    return max([item.num_to_draft for item in items]), any(
        item.seq.draft.num_requested for item in items
    )


def tokens_of(item: ScheduledSequence) -> list[int]:
    """The tokens that a sequence computes, with placeholders for those that only the device knows."""
    num_known = item.num_tokens - len(item.draft_tokens)
    tokens = item.seq.tokens[item.start : item.start + num_known]
    if len(tokens) < num_known:
        tokens.append(-1 - item.seq.slot)
    return [*tokens, *item.draft_tokens] if item.draft_tokens else tokens


def following(item: ScheduledSequence) -> int:
    """The token after the sequence's last scheduled one, for the drafter; 0 if it is not sampled
    yet.
    """
    end = item.start + item.num_tokens
    return item.seq.tokens[end] if not item.num_samples and end < len(item.seq.tokens) else 0


def is_steady(item: ScheduledSequence) -> bool:
    """Whether the sequence's next decode step may differ from this one only in its position."""
    if item.num_tokens != item.num_samples or item.scored_positions or item.seq.bad_words:
        return False
    # with the token that it draws
    return item.start + 1 - item.seq.num_prompt >= max(1, item.seq.params.min_tokens)


def banned(seq: Sequence, drafts: Seq[int] = ()) -> list[int]:
    """Last tokens of the bad words whose other tokens precede, assuming that all drafts are
    accepted.
    """
    longest = max(len(word) for word in seq.bad_words) - 1
    output = [*seq.tokens[max(seq.num_prompt, len(seq.tokens) - longest) :], *drafts]
    return [
        word[-1]
        for word in seq.bad_words
        if len(word) > 1
        and len(output) >= len(word) - 1
        and tuple(output[1 - len(word) :]) == word[:-1]
    ]
