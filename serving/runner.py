"""Between the scheduler's plans and the device: builds batches, launches steps, reads tokens back."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..model.config import ModelConfig
from ..ops.sampling import Sampled
from . import batch as batches
from .compiles import CompileCounter
from .scheduler import Item, Limits, Plan
from .sequence import Sequence
from .step import empty_state, reset_slot, step

SETTINGS = {  # what a slot remembers of its request's sampling parameters, and what padding rows have
    "temperature_R": (np.float32, 0),
    "top_k_R": (np.int32, 0),
    "top_p_R": (np.float32, 1),
    "min_p_R": (np.float32, 0),
    "repetition_R": (np.float32, 1),
    "presence_R": (np.float32, 0),
    "frequency_R": (np.float32, 0),
    "biased_R": (np.bool_, False),
    "wants_logprobs_R": (np.bool_, False),
}


@dataclass(frozen=True)
class Launched:
    """A step under way: its results are futures until they are collected."""

    plan: Plan
    sampled: Sampled


@dataclass(frozen=True)
class Drawn:
    """What a step gave one of its items, as numpy rows: scores of prompt tokens first, then the token drawn."""

    item: Item
    rows: range
    sampled: Sampled

    @property
    def ok(self) -> bool:
        return bool(all(self.sampled.ok_R[row] for row in self.rows))

    @property
    def token(self) -> int:
        return int(self.sampled.tokens_R[self.rows[-1]])

    def score(self, row: int) -> tuple[int, float, int, np.ndarray, np.ndarray]:
        """(token, log-probability, rank, best ids, their log-probabilities) of one of the rows."""
        s = self.sampled
        token, logprob, rank = int(s.tokens_R[row]), float(s.logprobs_R[row]), int(s.ranks_R[row])
        return token, logprob, rank, s.top_ids_RK[row], s.top_logprobs_RK[row]


class Runner:
    """Owns the weights, the device state and the compiled steps."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Any,
        limits: Limits,
        num_pages: tuple[int, ...],
        page_size: int,
        max_len: int,
    ):
        self.config, self.weights, self.limits = config, weights, limits
        self.num_pages, self.page_size = num_pages, page_size
        self.table_width = -(-max_len // page_size)
        self.sizes = batches.sizes(limits.max_seqs, limits.max_rows)
        self.compiled: dict[batches.Size, Any] = {}
        self.compiles = CompileCounter()
        B = limits.max_seqs
        self.tables = [np.zeros((B, self.table_width), np.int32) for _ in num_pages]
        self.synced = np.zeros(B, np.int64)
        self.seeds = np.zeros((B, 2), np.uint32)
        self.tracked = np.zeros(B, bool)
        self.settings = {name: np.full(B, off, dtype) for name, (dtype, off) in SETTINGS.items()}
        self.reset()

    def reset(self) -> None:
        """A fresh device state: nothing that was computed is kept."""
        self.owner: list[Sequence | None] = [None] * self.limits.max_seqs
        self.state = empty_state(self.config, self.num_pages, self.page_size, self.limits.max_seqs)

    def warm_up(self, progress: Callable[[batches.Size], None] = lambda size: None) -> None:
        """Compile every size, or read it from the compile cache; nothing is compiled after this."""
        with ThreadPoolExecutor() as threads:  # XLA compiles outside of Python's lock: sizes side by side
            futures = {}
            for size in self.sizes:
                lowered = step.lower(self.weights, self.state, self.empty_batch(size), self.config)
                futures[size] = threads.submit(lowered.compile)
            for size, future in futures.items():
                progress(size)
                self.compiled[size] = future.result()
        V = self.config.vocab_size
        slots = reset_slot(self.state.slots, np.int32(0), np.zeros(V, np.float32), np.zeros(V, bool))
        self.state = self.state.replace(slots=slots)
        jax.block_until_ready(slots)
        self.compiles.mark()

    def empty_batch(self, size: batches.Size) -> batches.Batch:
        return batches.empty(size, len(self.num_pages), self.table_width, self.limits.max_seqs)

    def launch(self, plan: Plan) -> Launched:
        """Send a step to the device and return at once."""
        for item in plan.items:
            if not item.start or self.owner[item.seq.slot] is not item.seq:
                self.assign(item.seq)  # new in this slot, or starting over
        size, batch = self.build(plan)
        sampled, self.state = self.compiled[size](self.weights, self.state, batch)
        return Launched(plan, sampled)

    def collect(self, launched: Launched) -> list[Drawn]:
        """Wait for a step and hand out its results."""
        sampled = jax.device_get(launched.sampled)
        drawn, row = [], 0
        for item in launched.plan.items:
            count = len(item.scores) + item.draws
            if count:
                drawn.append(Drawn(item, range(row, row + count), sampled))
            row += count
        return drawn

    def assign(self, seq: Sequence) -> None:
        """Give a slot to a sequence: its sampling parameters, and a clean row on the device where it needs one."""
        slot, p = seq.slot, seq.params
        self.owner[slot], self.synced[slot], self.seeds[slot] = seq, 0, seq.seed
        bias = bias_of(seq, self.config.vocab_size)
        self.tracked[slot] = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        values = (
            p.temperature, p.top_k, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty,
            p.frequency_penalty, bias is not None, p.logprobs is not None,
        )  # fmt: skip
        for array, value in zip(self.settings.values(), values, strict=True):
            array[slot] = value
        if bias is None and not self.tracked[slot] and not p.min_tokens:
            return
        V = self.config.vocab_size
        stop = np.zeros(V, bool)
        stop[[token for token in seq.stop_ids if token < V]] = True
        zeros = np.zeros(V, np.float32)
        slots = reset_slot(self.state.slots, np.int32(slot), zeros if bias is None else bias, stop)
        self.state = self.state.replace(slots=slots)

    def build(self, plan: Plan) -> tuple[batches.Size, batches.Batch]:
        """The arrays of a plan, at the smallest size that holds it."""
        items, S = plan.items, self.page_size
        num_samples = sum(len(item.scores) + item.draws for item in items)
        size = batches.choose(self.sizes, plan.num_rows, len(items), num_samples, plan.decodes)
        b = self.empty_batch(size)
        slots = np.array([item.seq.slot for item in items])
        counts = np.array([item.count for item in items])
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
        for table, batch_table, write in zip(self.tables, b.tables_GBM, b.slots_GT, strict=True):
            batch_table[:n] = table[slots]
            write[:T] = table[owners, positions // S] * S + positions % S

        self.fill_samples(items, slots, ends - counts, num_samples, b)
        return size, b

    def fill_samples(self, items: Iterable[Item], slots, offsets, R: int, b: batches.Batch) -> None:
        """The rows whose logits are wanted, in the order of the items: prompt scores first, then the draw."""
        if not R:
            return
        s, row, owners = b.sampling, 0, np.zeros(R, np.int64)
        for item, slot, offset in zip(items, slots, offsets, strict=True):
            seq = item.seq
            for position in item.scores:
                b.sample_rows_R[row] = offset + position - item.start
                s.targets_R[row] = seq.tokens[position + 1]
                s.wants_logprobs_R[row] = True
                owners[row] = slot
                row += 1
            if item.draws:
                b.sample_rows_R[row] = offset + item.count - 1
                b.store_R[row] = slot
                s.positions_R[row] = position = item.start + item.count
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

    def sync_tables(self, seq: Sequence) -> None:
        """Copy the page numbers that are new since the last step; a table only grows while its sequence runs."""
        slot, known = seq.slot, int(self.synced[seq.slot])
        if not seq.pages or len(seq.pages[0]) == known:
            return
        for table, pages in zip(self.tables, seq.pages, strict=True):
            table[slot, known : len(pages)] = pages[known:]
        self.synced[slot] = len(seq.pages[0])


def tokens_of(item: Item) -> list[int]:
    """The tokens of an item's rows; the one that only the device knows is named by its slot."""
    tokens = item.seq.tokens[item.start : item.start + item.count]
    return tokens if len(tokens) == item.count else [*tokens, -1 - item.seq.slot]


def bias_of(seq: Sequence, vocab: int) -> np.ndarray | None:
    """What is added to the logits of every token, or None if nothing is."""
    p = seq.params
    single = [word[0] for word in seq.bad_words if len(word) == 1]
    if not p.logit_bias and p.allowed_token_ids is None and not single:
        return None
    bias = np.zeros(vocab, np.float32)
    if p.allowed_token_ids is not None:
        bias[:] = -np.inf
        bias[list(p.allowed_token_ids)] = 0
    for token, value in (p.logit_bias or {}).items():
        bias[token] += value
    bias[single] = -np.inf
    return bias


def banned(seq: Sequence) -> list[int]:
    """The last tokens of the bad words whose other tokens have just been generated."""
    longest = max(len(word) for word in seq.bad_words) - 1
    output = seq.tokens[max(seq.num_prompt, len(seq.tokens) - longest) :]
    return [
        word[-1]
        for word in seq.bad_words
        if len(word) > 1 and len(output) >= len(word) - 1 and tuple(output[1 - len(word) :]) == word[:-1]
    ]
