"""From the scheduler's plans to the buffers that steps read."""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from ..device.batch import Batch, Layout, Size, choose, param_arrays, sizes
from ..request.sequence import Sequence
from .scheduler import Item, Limits, Plan


@dataclass(frozen=True)
class Decode:
    """A step of one row from each sequence: while they all go on, the next one differs by its position alone."""

    seqs: list[Sequence]
    size: Size
    slots: np.ndarray
    position: np.ndarray
    buffer: np.ndarray
    plain: bool  # see `quire.ops.sampling.sample`


class Batcher:
    """Remembers what each slot's sequence has told already, so that a step's arrays are written and not worked out."""

    def __init__(
        self,
        limits: Limits,
        num_groups: int,
        page_size: int,
        table_width: int,
        lanes: int = 1,
        replicas: int = 1,
    ):
        self.page_size, B = page_size, limits.max_seqs
        self.lanes = lanes  # steps under way; of a single one the next knows what it drew
        options = sizes(limits.max_seqs, limits.max_rows)  # the smallest first
        self.layouts = {size: Layout(size, num_groups, table_width, B, replicas) for size in options}
        self.tables = [np.zeros((B, table_width), np.int32) for _ in range(num_groups)]
        self.synced = [0] * B  # pages of each slot's sequence that are in its tables
        self.seeds = np.zeros((B, 2), np.uint32)
        self.tracked = np.zeros(B, bool)
        self.plain = np.zeros(B, bool)
        self.params = param_arrays(B)
        self.settings = self.params | {name: np.zeros(B, bool) for name in ("biased_R", "wants_logprobs_R")}
        self.lasts: deque[Decode] = deque()  # of each lane at most one; the first is whose turn it is
        self.draws_plainly = False  # the batch that was built last asks for nothing but plain draws

    def forget(self) -> None:
        """Nothing that was computed is kept: every sequence starts over."""
        self.lasts.clear()

    def assign(self, seq: Sequence, biased: bool) -> bool:
        """Give a slot to a sequence that is new in it, or starts over; whether its tokens are to be counted."""
        slot, p = seq.slot, seq.params
        self.lasts.clear()
        self.synced[slot], self.seeds[slot] = 0, seq.seed
        self.tracked[slot] = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        self.plain[slot] = p.top_k <= 0 and p.top_p >= 1 and not (self.tracked[slot] or biased or seq.scored)
        for name, values in self.params.items():
            values[slot] = getattr(p, name.removesuffix("_R"))
        self.settings["biased_R"][slot], self.settings["wants_logprobs_R"][slot] = biased, seq.scored
        return bool(self.tracked[slot])

    def build(self, plan: Plan) -> tuple[Size, np.ndarray]:
        """The arrays of a plan in one buffer, at the smallest size that holds it."""
        if (again := self.advance(plan.items)) is not None:
            return again
        size = choose(self.layouts, *plan.needs, plan.decodes)
        return size, self.fill(plan, size)

    def fill(self, plan: Plan, size: Size) -> np.ndarray:
        """The same at a given size."""
        items = plan.items
        _, _, num_samples = plan.needs
        buffer = self.layouts[size].padding.copy()
        b = self.layouts[size].views(buffer)
        slots = np.array([item.seq.slot for item in items])
        counts = np.array([item.num_rows for item in items])
        starts = np.array([item.start for item in items])
        ends = np.cumsum(counts)
        T, n = int(ends[-1]), len(items)
        for item in items:
            self.sync_tables(item.seq)

        b.starts_B1[1 : n + 1], b.starts_B1[n + 1 :] = ends, T
        owners = np.repeat(slots, counts)
        positions = np.arange(T) + np.repeat(starts - (ends - counts), counts)
        b.owners_T[:T], b.positions_T[:T] = owners, positions
        b.tokens_T[:T] = [token for item in items for token in tokens_of(item)]
        b.is_prompt_T[:T] = positions < np.repeat([item.seq.num_prompt for item in items], counts)
        b.tracked_T[:T] = self.tracked[owners]
        for table, batch_table in zip(self.tables, b.tables_GBM, strict=True):
            batch_table[:n] = table[slots]
        for write, places in zip(b.slots_GT, self.places(owners, positions), strict=True):
            write[:T] = places
        self.fill_samples(items, slots, ends - counts, num_samples, b)
        seqs = [item.seq for item in items]
        steady = plan.decodes and all(item.draws and not item.scores and is_steady(item) for item in items)
        self.draws_plainly = steady and bool(self.plain[slots].all())
        if len(self.lasts) == self.lanes:
            self.lasts.popleft()
        if steady:
            self.lasts.append(Decode(seqs, size, slots, positions, buffer, self.draws_plainly))
        return buffer

    def advance(self, items: Seq[Item]) -> tuple[Size, np.ndarray] | None:
        """The buffer of a step that is the last one of its lane a position further; None if it is another."""
        if not self.lasts or len(items) != len(self.lasts[0].seqs):
            return None
        last = self.lasts[0]
        for item, seq, before in zip(items, last.seqs, last.position.tolist(), strict=True):
            if item.seq is not seq or item.start != before + 1 or item.num_rows != 1 or not item.draws:
                return None
        buffer, at, n = last.buffer.copy(), self.layouts[last.size].offsets, len(items)
        positions, width = last.position + 1, self.tables[0].shape[1]
        buffer[at.tokens_T :][:n] = -1 - last.slots if self.lanes == 1 else [tokens_of(item)[0] for item in items]
        buffer[at.positions_T :][:n] = positions
        buffer[at.sampling.positions_R :][:n] = positions + 1
        for index, seq in enumerate(last.seqs):
            if self.sync_tables(seq):
                for table, first in zip(self.tables, at.tables_GBM, strict=True):
                    buffer[first + index * width :][:width] = table[seq.slot]
        for first, places in zip(at.slots_GT, self.places(last.slots, positions), strict=True):
            buffer[first:][:n] = places
        self.lasts.popleft()
        self.lasts.append(Decode(last.seqs, last.size, last.slots, positions, buffer, last.plain))
        self.draws_plainly = last.plain
        return last.size, buffer

    def places(self, owners, positions) -> list[np.ndarray]:
        """Where each row's key and value go, for each cache group."""
        page, offset = np.divmod(positions, self.page_size)
        return [table[owners, page] * self.page_size + offset for table in self.tables]

    def fill_samples(self, items: Iterable[Item], slots, offsets, R: int, b: Batch) -> None:
        """The rows whose logits are wanted, in the order of the items: prompt scores first, then the draw."""
        if not R:
            return
        s, row, owners = b.sampling, 0, np.zeros(R, np.int64)
        for item, slot, offset in zip(items, slots, offsets, strict=True):
            seq = item.seq
            for position in item.scores:
                b.sample_rows_R[row] = offset + position - item.start
                s.targets_R[row] = seq.tokens[position + 1]
                s.wants_logprobs_R[row] = seq.pool is None
                owners[row] = slot
                row += 1
            if item.draws:
                b.sample_rows_R[row] = offset + item.num_rows - 1
                b.store_R[row] = slot
                s.positions_R[row] = position = item.start + item.num_rows
                s.ban_stop_R[row] = position - seq.num_prompt < seq.params.min_tokens
                if seq.bad_words:
                    bans = banned(seq)
                    s.ban_RX[row, : len(bans)] = bans
                owners[row] = slot
                row += 1
        s.slots_R[:R], s.seeds_R2[:R] = owners, self.seeds[owners]
        for name, values in self.settings.items():
            if name == "wants_logprobs_R":
                s.wants_logprobs_R[:R] |= values[owners]
            else:
                getattr(s, name)[:R] = values[owners]

    def sync_tables(self, seq: Sequence) -> bool:
        """Copy the page numbers that are new since the last step; a table only grows while its sequence runs."""
        slot, known = seq.slot, self.synced[seq.slot]
        if not seq.pages or len(seq.pages[0]) == known:
            return False
        for table, pages in zip(self.tables, seq.pages, strict=True):
            table[slot, known : len(pages)] = pages[known:]
        self.synced[slot] = len(seq.pages[0])
        return True


def tokens_of(item: Item) -> list[int]:
    """The tokens of an item's rows; the one that only the device knows is named by its slot."""
    tokens = item.seq.tokens[item.start : item.start + item.num_rows]
    return tokens if len(tokens) == item.num_rows else [*tokens, -1 - item.seq.slot]


def is_steady(item: Item) -> bool:
    """Whether the item's next step differs from this one by its position alone."""
    written = item.start + 1 - item.seq.num_prompt  # tokens, with the one that this step draws
    return written >= max(1, item.seq.params.min_tokens) and not item.seq.bad_words


def banned(seq: Sequence) -> list[int]:
    """The last tokens of the bad words whose other tokens have just been generated."""
    longest = max(len(word) for word in seq.bad_words) - 1
    output = seq.tokens[max(seq.num_prompt, len(seq.tokens) - longest) :]
    return [
        word[-1]
        for word in seq.bad_words
        if len(word) > 1 and len(output) >= len(word) - 1 and tuple(output[1 - len(word) :]) == word[:-1]
    ]
