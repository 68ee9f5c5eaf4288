"""A fake device for tests of the scheduler: a step's tokens come back one step later.

It accepts a random number of draft tokens.
"""

from collections.abc import Iterator
from itertools import groupby

import numpy as np

from quire.serving.api.params import SamplingParams
from quire.serving.engine.scheduler import ScheduledSequence, Scheduler
from quire.serving.request.sequence import Sequence


def sequence(
    index: int, prompt: int, output: int, token: int | None = None, **settings
) -> Sequence:
    """The prompt repeats one token: sequences with the same token share a prefix."""
    token = 1000 + index if token is None else token
    return Sequence(0, [token] * prompt, prompt, SamplingParams(), output, index, **settings)


def random_sequences(
    rng: np.random.Generator, scheduler: Scheduler, count: int
) -> Iterator[Sequence]:
    """Add random sequences to the scheduler, except those that can never fit. Half of them have
    draft tokens where the step's shape allows drafts.
    """
    for index in range(count):
        prompt = int(rng.integers(1, 40))
        output = int(rng.integers(1, 12))
        if scheduler.replicas[0].table.fits(prompt + output, 16):
            seq = sequence(
                index,
                prompt,
                output,
                int(rng.integers(3)),
                needs_host_token=bool(rng.random() < 0.1),
            )
            if rng.random() < 0.2:
                seq.prompt_scores = [None] * (prompt - 1)
            seq.draft.waits_for_host = bool(scheduler.shape.max_drafts and rng.random() < 0.5)
            scheduler.add(seq)
            yield seq


class Device:
    """Runs plans one step behind, checks that they compute every token once, and ends sequences."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.in_flight = None
        self.steps = 0
        self.shape = scheduler.shape
        self.computed: dict[Sequence, int] = {}
        self.rng = np.random.default_rng(0)
        self.accepted = self.rejected = 0

    def step(self) -> None:
        plan = self.scheduler.schedule(drafts=self.shape.max_drafts > 0)
        self.scheduler.check()
        if plan is not None:
            for replica_items in map(
                list, (group for _, group in groupby(plan.items, lambda item: item.seq.replica))
            ):
                rows = sum(item.num_tokens for item in replica_items)
                assert rows <= self.shape.max_tokens
                assert len(replica_items) <= self.shape.max_seqs
                samples = sum(
                    len(item.scored_positions) + item.num_samples for item in replica_items
                )
                decodes = all(item.num_tokens == item.num_samples for item in replica_items)
                assert samples <= (
                    self.shape.max_tokens
                    if decodes and self.shape.max_drafts
                    else self.shape.max_samples
                )
            assert len({(item.seq.replica, item.seq.slot) for item in plan.items}) == len(
                plan.items
            )
            for item in plan.items:
                if item.is_first_step:
                    assert item.start == 0 or item.start < item.seq.num_tokens
                    self.computed[item.seq] = item.start
                assert item.start == self.computed[item.seq], (
                    "tokens are computed in order, each once"
                )
                self.computed[item.seq] += item.num_tokens
                assert item.num_tokens >= 1 and len(item.draft_tokens) <= self.shape.max_drafts
                assert item.num_samples in (0, 1 + len(item.draft_tokens))
                assert (
                    item.num_known + item.num_samples <= item.seq.num_prompt + item.seq.max_tokens
                )
        if self.in_flight is not None:
            for item in self.in_flight.items:
                seq = item.seq
                if seq.prompt_scores is not None:
                    for position in item.scored_positions:
                        seq.prompt_scores[position] = True
                if item.num_samples:
                    seq.pending -= item.num_samples
                    if seq.finish_reason is None:
                        self.apply_sampled_tokens(seq, item)
        self.in_flight = plan
        self.steps += 1

    def apply_sampled_tokens(self, seq: Sequence, item: ScheduledSequence) -> None:
        accepted = int(self.rng.integers(len(item.draft_tokens) + 1))
        rejected = len(item.draft_tokens) - accepted
        self.accepted += accepted
        self.rejected += rejected
        if item.draft_tokens:
            self.scheduler.roll_back(item, accepted)
            self.computed[seq] -= rejected
        for token in [*item.draft_tokens[:accepted], 2]:
            seq.tokens.append(token)
            if seq.num_output >= seq.max_tokens:
                self.scheduler.finish(seq, "length")
                return
        if seq.draft.waits_for_host:
            num_drafts = self.rng.integers(self.shape.max_drafts + 1)
            seq.draft.tokens = self.rng.integers(0, 3, num_drafts).tolist()
            seq.draft.num_requested = self.shape.max_drafts

    def run(self) -> None:
        while self.scheduler.busy or self.in_flight:
            self.step()
            assert self.steps < 20000, "no progress"
