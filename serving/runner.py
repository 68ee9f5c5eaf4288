"""Between the scheduler's plans and the device: builds batches, launches steps, reads tokens back."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from ..model.config import ModelConfig
from ..ops.sampling import Sampled, SlotState
from .batch import Size
from .batcher import Batcher
from .compiles import CompileCounter
from .grammar import Constraint
from .mover import Leaving, Mover
from .moves import Moves
from .scheduler import Item, Limits, Plan
from .sequence import Sequence
from .step import empty_state, reset_slot, set_bias, step


@dataclass(frozen=True)
class Launched:
    """A step under way: its results are futures until they are collected."""

    plan: Plan
    sampled: Sampled
    hidden_RD: jax.Array
    leaving: list[Leaving]


class Drawn(NamedTuple):  # hundreds are made a step
    """What a step gave one of its items, a row of `sampled` each: scores of prompt tokens, then the token drawn."""

    item: Item
    row: int  # the first
    ok: bool
    token: int  # of the last row
    sampled: Sampled
    hidden_RD: np.ndarray | None  # where one of the items has a pool

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
        to_host: bool = False,
        load_weights: Callable[[], Any] | None = None,
    ):
        self.config, self.weights, self.limits = config, weights, limits
        self.num_pages, self.page_size, self.load_weights = num_pages, page_size, load_weights
        self.batcher = Batcher(limits, len(num_pages), page_size, -(-max_len // page_size))
        self.mover = Mover(config, page_size, to_host)
        self.compiled: dict[Size, Any] = {}
        self.compiles = CompileCounter()
        self.reset()

    def reset(self) -> None:
        """A fresh device state: nothing that was computed is kept."""
        self.batcher.forget()
        self.state = empty_state(self.config, self.num_pages, self.page_size, self.limits.max_seqs)

    def warm_up(self, progress: Callable[[Size], None] = lambda size: None) -> None:
        """Compile every size, or read it from the compile cache; nothing is compiled after this."""
        threads, futures, copies = ThreadPoolExecutor(), {}, {}  # XLA compiles outside of Python's lock: side by side
        try:
            for size, layout in self.batcher.layouts.items():
                lowered = step.lower(self.weights, self.state, layout.padding, layout, self.config)
                futures[size] = threads.submit(lowered.compile)
            for name, lowered in self.mover.lower(self.state.pages):
                copies[name] = threads.submit(lowered.compile)
            for size, future in futures.items():
                progress(size)
                self.compiled[size] = future.result()
            self.mover.programs = {name: future.result() for name, future in copies.items()}
        finally:
            threads.shutdown(cancel_futures=True)  # after Ctrl-C only those under way are waited for
        V = self.config.vocab_size
        row = SlotState(*(np.zeros(V, leaf.dtype) for leaf in jax.tree.leaves(self.state.slots)))
        slots = reset_slot(self.state.slots, np.int32(0), row)
        self.state = self.state.replace(slots=slots.replace(bias_BV=set_bias(slots.bias_BV, np.int32(0), row.bias_BV)))
        jax.block_until_ready(self.state.slots)
        self.compiles.mark()

    def sleep(self, keep_weights: bool, keep_pages: bool) -> None:
        """Free the device's memory; what is kept goes to the host's."""
        self.where = jax.tree.map(lambda leaf: leaf.sharding, (self.weights, self.state))
        self.weights = to_host(self.weights, keep_weights)
        self.state = to_host(self.state, keep_pages)

    def wake_up(self) -> None:
        """The inverse; what was not kept is read again, or empty."""
        weights, state = self.where
        if self.weights is None:
            assert self.load_weights is not None, "the weights were dropped and nobody knows where they came from"
            self.weights = self.load_weights()
        else:
            self.weights = jax.device_put(self.weights, weights)
        if self.state is None:
            self.reset()
        else:
            self.state = jax.device_put(self.state, state)

    def launch(self, plan: Plan, moves: Moves) -> Launched:
        """Send a step to the device, and the moves before it, and return at once."""
        leaving = self.move(moves) if moves else []
        for item in plan.items:
            if item.begins:
                self.assign(item.seq, item.start)
            if item.draws and item.seq.constraint is not None:
                self.constrain(item.seq, item.seq.constraint)
        size, buffer = self.batcher.build(plan)
        sampled, hidden_RD, self.state = self.compiled[size](self.weights, self.state, buffer)
        return Launched(plan, sampled, hidden_RD, leaving)

    def move(self, moves: Moves) -> list[Leaving]:
        """Copy pages; what goes to the host is under way when this returns."""
        pages, leaving = self.mover.move(self.state.pages, moves)
        self.state = self.state.replace(pages=pages)
        return leaving

    def collect(self, launched: Launched) -> list[Drawn]:
        """Wait for a step and hand out its results; scores come along only if somebody wants them."""
        for pages in launched.leaving:
            pages.arrive()
        items, sampled = launched.plan.items, launched.sampled
        if any(item.scores or item.seq.scored for item in items):
            sampled = jax.device_get(sampled)
        hidden_RD = np.asarray(launched.hidden_RD) if any(item.seq.pool is not None for item in items) else None
        tokens, ok = np.asarray(sampled.tokens_R).tolist(), np.asarray(sampled.ok_R).tolist()
        drawn, row = [], 0
        for item in items:
            count = len(item.scores) + item.draws
            if count:
                end = row + count
                fine = ok[row] if count == 1 else all(ok[row:end])
                drawn.append(Drawn(item, row, fine, tokens[end - 1], sampled, hidden_RD))
                row = end
        return drawn

    def assign(self, seq: Sequence, computed: int) -> None:
        """Give a slot to a sequence: its sampling parameters, and a clean row on the device where it needs one.

        Tokens that were found computed never pass through a step, so the penalties learn of them here.
        """
        V = self.config.vocab_size
        bias = bias_of(seq, V)
        if seq.constraint is not None:
            seq.constraint.bias = bias
        self.batcher.assign(seq, bias is not None or seq.constraint is not None)
        if bias is None and not self.batcher.tracked[seq.slot] and not seq.params.min_tokens:
            return
        stop, prompt = np.zeros(V, bool), np.zeros(V, bool)
        stop[[token for token in seq.stop_ids if token < V]] = True
        prompt[seq.tokens[: min(computed, seq.num_prompt)]] = True
        counts = np.bincount(seq.tokens[seq.num_prompt : computed], minlength=V).astype(np.int32)
        row = SlotState(np.zeros(V, np.float32) if bias is None else bias, stop, counts, prompt)
        self.state = self.state.replace(slots=reset_slot(self.state.slots, np.int32(seq.slot), row))

    def constrain(self, seq: Sequence, constraint: Constraint) -> None:
        """Let the next token be one that the sequence's grammar allows."""
        slots, row = self.state.slots, constraint.row(seq.stop_ids)
        slots = slots.replace(bias_BV=set_bias(slots.bias_BV, np.int32(seq.slot), row))
        self.state = self.state.replace(slots=slots)


def to_host(tree: Any, keep: bool) -> Any:
    """The same as numpy arrays, or None; its memory on the device is free, one array after the other."""

    def move(leaf: jax.Array) -> np.ndarray | None:
        host = np.array(leaf) if keep else None
        leaf.delete()
        return host

    moved = jax.tree.map(move, tree)
    return moved if keep else None


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
