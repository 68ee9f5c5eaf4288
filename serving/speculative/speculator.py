"""Adaptive speculation: how many draft tokens pay, by acceptance rates and step times."""

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from importlib import import_module
from math import ceil, inf
from time import perf_counter
from typing import Any, Protocol

from ..request.sequence import Sequence
from .acceptance import AcceptanceRate, DraftCounts, DraftRecord, StepTimeRatio
from .config import SpeculativeConfig

log = logging.getLogger("quire")

PRIOR_RATE = 0.7  # acceptance rate before anything is known,
PRIOR_TOKENS = 4.0  # which counts as so many draft tokens
OVERALL_MEMORY = 192.0  # draft tokens of all sequences after which an old one counts e times less
TIMING_INTERVAL = 4  # while nothing is drafted, one step of so many is timed
# Plain steps after which steps with drafts are assumed to be slowed down as plain ones are.
RATIO_MEMORY = 128.0
# Seconds that the device waits for the host in a step with drafts, before any was timed.
HOST_WAIT = 1e-4
MIN_GAIN = 1.03  # in tokens a second, to begin drafting: a change costs something
PROBE_SHARE = 0.01  # of the time may go into probes
PROBE_TOKENS = 2  # draft tokens of a probe of a device method
MIN_PROBE_INTERVAL = 16  # steps
IDLE_STEPS = 512  # decode steps without drafts after which the log says that drafts do not pay
MAX_BACKOFF = 64.0  # longest time between probes, in multiples of the first
BEST_RATE = 0.98  # acceptance rate that no drafter is hoped to exceed


class HostDrafter(Protocol):
    """Proposes draft tokens from the text, between steps."""

    def propose(self, seq: Sequence, max_tokens: int) -> list[int]:
        """Tokens that may come next; none if the drafter has no proposal."""
        ...

    def end(self, seq: Sequence) -> None:
        """Forget a finished sequence."""
        ...


def make_host_drafter(config: SpeculativeConfig) -> HostDrafter | None:
    """The drafter of a host method; None for a device method, whose steps draft."""
    if config.traits.on_device:
        return None
    return import_module(config.traits.module, __package__).make_drafter(config)


class Speculator:
    """Gives sequences draft tokens where these pay; see `DraftState`.

    Host methods: while a sequence drafts (`DraftState.waits_for_host`), the next step is scheduled
    once the tokens of the last are known. Device methods: the engine stays a step ahead. While
    nothing is drafted, a drafter now and then makes a probe: proposals that are not verified but
    compared with the tokens that come. Nothing waits for a probe. Where not even accepted drafts
    would pay, there are no probes.

    `step_seconds(num_tokens, num_seqs, num_drafts)` is the time of a step that drafts `num_drafts`
    tokens of each sequence, as measured at the start. The time of steps in service, the host's part
    included, corrects it for steps with drafts and without.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        step_seconds: Callable[[int, int, int], float],
        clock: Callable[[], float] = perf_counter,
    ):
        self.config = config
        self.step_seconds = step_seconds
        self.clock = clock
        self.on_device = config.traits.on_device
        self.host_drafter = make_host_drafter(config)
        self.max_drafts = config.num_speculative_tokens
        self.records: dict[Sequence, DraftRecord] = {}
        self.overall_rate = AcceptanceRate(OVERALL_MEMORY, PRIOR_RATE * PRIOR_TOKENS, PRIOR_TOKENS)
        self.lifetime_rate = AcceptanceRate(inf)
        self.step = 0
        self.is_drafting = not config.adapts
        self.depth = self.max_drafts  # draft tokens of each sequence that a device step makes
        self.min_chance = 0.0  # of acceptance, for a draft token to pay
        # (sequences, step from which they are decided about again)
        self.decided: tuple[int, int] = (0, 0)
        self.has_news = True  # acceptance was observed, or a sequence came, since the last decision
        self.last_batch: tuple[int, bool] = (0, False)  # (running sequences, whether all decoded)
        self.next_probe_step = 0  # device methods
        self.last_probe_step = -2
        self.probed: list[Sequence] = []  # which the step in planning drafts for as a probe
        self.records_timing = True  # the next step is to be timed
        self.tracks_tokens = True  # tokens of sequences without drafts are compared with probes
        # By the bit length of the number of sequences, and whether the step has drafts.
        self.time_ratios: dict[tuple[int, bool], StepTimeRatio] = {}
        # By the number of sequences, see `costs_for`.
        self.costs: dict[int, tuple[list[float], float]] = {}
        self.proposal_seconds = 1e-5  # of a proposal on the host
        self.probe_seconds = 0.0  # by which a step is longer that drafts as a probe
        self.counts = DraftCounts(0, 0, [0] * self.max_drafts)
        self.idle_steps = 0  # decode steps since one had drafts
        self.is_reported = False  # the log has said that drafts do not pay
        self.backoff = 1.0  # factor of the time between two probes

    @property
    def is_idle(self) -> bool:
        """Whether the step that is planned next neither verifies nor makes drafts."""
        return not (self.is_drafting or self.probed)

    def add(self, seq: Sequence) -> None:
        """Speculate for a new sequence, unless it generates one token or none."""
        if seq.pool is None and seq.max_tokens > 1:
            self.records[seq] = DraftRecord(num_available=self.max_drafts if self.on_device else 0)
            self.has_news = True
            self.set_drafting(seq, self.is_drafting)

    def remove(self, seq: Sequence) -> None:
        """Forget a finished sequence."""
        if self.records.pop(seq, None) is not None:
            seq.draft.tokens = []
            if self.host_drafter is not None:
                self.host_drafter.end(seq)

    def plan_drafts(self, running: Seq[Sequence]) -> None:
        """Before a step is scheduled: decide how many draft tokens each sequence gets in it."""
        self.step += 1
        if not self.config.adapts:
            for seq in running if self.on_device else ():
                seq.draft.num_requested = self.max_drafts if seq in self.records else 0
            return
        for seq in self.probed:
            seq.draft.num_requested = 0
            seq.draft.num_on_device = 0
        self.probed = []
        if self.is_drafting or self.is_decision_due(len(running)):
            decoding = [seq for seq in running if seq.missing == 1]
            self.last_batch = len(running), len(decoding) == len(running)
            if not self.is_drafting:
                self.begin_drafting_if_paying(decoding)
            elif decoding:
                self.choose_depths(decoding)
        if self.is_drafting:
            self.idle_steps = 0
            self.backoff = 1.0
        elif running and self.last_batch == (len(running), True):
            self.idle_steps += 1
            if self.idle_steps >= IDLE_STEPS and not self.is_reported:
                self.is_reported = True
                self.report(len(running))
        self.records_timing = (
            self.is_drafting
            or self.step % TIMING_INTERVAL == 0
            or self.step <= self.last_probe_step + 2
        )
        self.tracks_tokens = self.is_drafting or self.has_probes()

    def record_step(self, plan: Any, seconds_since_previous: float) -> None:
        """Learn from the time of a decode step, unless requests came or ended around it."""
        items = plan.items
        if not self.records_timing:
            return
        if any(item.is_first_step for item in items) or all(
            item.seq.finish_reason is not None for item in items
        ):
            return  # the device may have been idle before it
        num_drafts = plan.num_tokens - len(items)
        num_requested = max(item.num_to_draft for item in items)
        is_drafting = plan.needs_host_sync or num_drafts > 0
        if plan.draft_prefills and (is_drafting or not num_requested):
            return  # the time includes that of the draft prefill
        self.record_step_time(
            len(items), num_drafts, num_requested, is_drafting, seconds_since_previous
        )

    def record_step_time(
        self, num_seqs: int, num_drafts: int, num_requested: int, is_drafting: bool, seconds: float
    ) -> None:
        """Learn from the time of a step that verified `num_drafts` tokens and then drafted
        `num_requested` of each sequence.
        """
        step_times, draft_time = self.costs_for(num_seqs)
        expected = step_times[min(num_drafts, len(step_times) - 1)] + num_requested * draft_time
        if not 0 < expected < inf:
            return
        if num_requested and not is_drafting:
            plain_seconds = step_times[0] * self.time_ratio(num_seqs, False).factor
            extra = min(max(0.0, seconds - plain_seconds), 8 * step_times[0])
            self.probe_seconds += (extra - self.probe_seconds) / 4
            return
        self.time_ratio(num_seqs, is_drafting).observe(seconds, expected)
        # Steps with drafts may be worth another try.
        if not is_drafting and (ratio := self.time_ratios.get((num_seqs.bit_length(), True))):
            factor = self.time_ratio(num_seqs, False).factor
            ratio.measured += (ratio.expected * factor - ratio.measured) / RATIO_MEMORY

    def update(self, output: Any) -> None:
        """Take a sequence's sampled tokens: count accepted drafts, and draft for its next step."""
        item = output.item
        seq = item.seq
        draft = seq.draft
        if item.draft_tokens:
            first = item.num_known - seq.num_prompt
            num_accepted = output.num_accepted
            draft.num_verified += len(item.draft_tokens)
            draft.accepted_positions.extend(range(first, first + num_accepted))
            self.counts.add(len(item.draft_tokens), num_accepted)
        if (
            item.num_samples
            and seq.finish_reason is None
            and (item.draft_tokens or item.num_to_draft or self.tracks_tokens)
        ):
            draft.proposals = output.proposals if item.num_to_draft and output.proposals else []
            self.draft_next(seq, len(item.draft_tokens), len(output.tokens) - 1)

    def draft_next(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Learn from a sequence's verified drafts, and draft for its next step."""
        record = self.records.get(seq)
        if record is None:
            return
        draft = seq.draft
        draft.tokens = []
        if num_drafts:
            self.observe(record, num_accepted, num_drafts)
        if not seq.pending and (draft.waits_for_host or draft.num_requested) and self.is_drafting:
            draft.tokens = self.propose(seq)
            if self.config.adapts and not (self.on_device or draft.tokens):
                self.stop_drafting(seq, record)
        elif self.config.adapts and not (self.on_device and self.is_drafting):
            self.probe(seq, record)

    def propose(self, seq: Sequence) -> list[int]:
        """The draft tokens for a sequence's next step that the host knows."""
        max_tokens = min(self.max_drafts, seq.max_tokens - seq.num_output - 1)
        tokens = self.proposals(seq, max_tokens) if max_tokens > 0 else []
        if tokens and seq.constraint is not None:
            tokens = seq.constraint.longest_allowed_prefix(tokens)
        return tokens

    def proposals(self, seq: Sequence, max_tokens: int) -> list[int]:
        if self.host_drafter is not None:
            return self.host_drafter.propose(seq, max_tokens)
        tokens = seq.draft.proposals[:max_tokens]
        return tokens[: next((i for i, token in enumerate(tokens) if token < 0), max_tokens)]

    def set_drafting(self, seq: Sequence, is_drafting: bool) -> None:
        seq.draft.waits_for_host = is_drafting and not self.on_device
        seq.draft.num_requested = self.depth if is_drafting and self.on_device else 0
        if not is_drafting:
            seq.draft.clear()

    def stop_drafting(self, seq: Sequence, record: DraftRecord) -> None:
        """Let a sequence go on without drafts until a probe says that they pay."""
        self.set_drafting(seq, False)
        record.probe = []
        record.next_probe = seq.num_output
        if not self.on_device:
            record.num_available = 0

    def probe(self, seq: Sequence, record: DraftRecord) -> None:
        """Compare the probe of a sequence without drafts with its tokens, or make one."""
        if record.probe:
            if seq.num_output - record.probe_start >= len(record.probe):
                actual = seq.tokens[seq.num_prompt + record.probe_start :]
                num_accepted = next(
                    (i for i, token in enumerate(record.probe) if actual[i] != token),
                    len(record.probe),
                )
                self.observe(record, num_accepted, len(record.probe))
                record.probe = []
            return
        is_due = seq.draft.proposals if self.on_device else seq.num_output >= record.next_probe
        if not is_due:
            return
        began = self.clock()
        record.probe = self.proposals(seq, self.max_drafts)
        record.probe_start = seq.num_output
        if self.on_device:
            return
        record.num_available = len(record.probe)
        self.has_news = True
        seq.draft.waits_for_host = (
            self.is_drafting
            and record.num_available > 0
            and self.expected_rate(record) >= self.min_chance
        )
        self.proposal_seconds += (self.clock() - began - self.proposal_seconds) / 16
        # One probe of each sequence in so many seconds.
        interval = len(self.records) * self.proposal_seconds / PROBE_SHARE * self.next_backoff()
        step_time = max(self.step_seconds(1, 1, 0), 1e-4)
        record.next_probe = seq.num_output + max(1, ceil(interval / step_time))

    def next_backoff(self) -> float:
        """The factor of the time to the next probe; it doubles once drafts are known not to
        pay.
        """
        backoff = self.backoff
        if self.is_reported:
            self.backoff = min(2 * backoff, MAX_BACKOFF)
        return backoff

    def has_probes(self) -> bool:
        """Whether a sequence has a probe, or is to have one."""
        return any(
            record.probe
            or (not self.on_device and record.next_probe < len(seq.tokens) - seq.num_prompt + 2)
            for seq, record in self.records.items()
        )

    def expected_rate(self, record: DraftRecord) -> float:
        return record.rate.estimate(self.overall_rate)

    def observe(self, record: DraftRecord, num_accepted: int, num_drafts: int) -> None:
        for rate in (self.lifetime_rate, record.rate, self.overall_rate):
            rate.observe(num_accepted, num_drafts)
        self.has_news = True

    def is_decision_due(self, num_running: int) -> bool:
        """Whether something may have changed since drafts were found not to pay."""
        return (
            self.has_news
            or self.last_batch != (num_running, True)
            or (self.on_device and self.step >= self.next_probe_step)
        )

    def choose_depths(self, decoding: list[Sequence]) -> None:
        """Keep the draft tokens that pay; where none does, all sequences go on without."""
        num_seqs = len(decoding)
        records = self.records
        candidates = [(seq, records[seq]) for seq in decoding if seq in records]
        if self.on_device:
            available = [(record, record.num_available) for _, record in candidates]
        else:
            available = [
                (record, len(seq.draft.tokens))
                for seq, record in candidates
                if seq.draft.waits_for_host
            ]
        if not any(count for _, count in available):
            self.is_drafting = any(
                seq.draft.waits_for_host or seq.draft.num_requested for seq in records
            )
            return
        decided_seqs, next_decision = self.decided
        if num_seqs != decided_seqs or self.step >= next_decision or not self.on_device:
            if self.decide(num_seqs, available) <= 1:
                self.is_drafting = False
                self.has_news = False
                for seq, record in records.items():
                    self.stop_drafting(seq, record)
                return
            self.decided = num_seqs, self.step + 1 + num_seqs // 4
        for seq, record in candidates:
            draft = seq.draft
            del draft.tokens[record.num_paying :]
            if self.on_device:
                draft.num_on_device = min(draft.num_on_device, record.num_paying)
                draft.num_requested = self.depth

    def begin_drafting_if_paying(self, decoding: list[Sequence]) -> None:
        """While nothing is drafted: begin where drafts would pay, and probe where that is
        unknown.

        Before any sequence decodes, the decision is made for the prompts.
        """
        records = self.records
        num_seqs = len(decoding) or len(records)
        if self.has_news or num_seqs != self.decided[0]:
            self.decided = (num_seqs, 0)
            self.has_news = False
            available = [
                (record, record.num_available)
                for seq in decoding or records
                if (record := records.get(seq))
            ]
            if any(count for _, count in available) and self.decide(num_seqs, available) > MIN_GAIN:
                self.is_drafting = True
                for seq, record in records.items():
                    self.set_drafting(seq, record.num_available > 0)
                return
        if self.on_device and decoding and self.step >= self.next_probe_step:
            self.probe_on_device(decoding)

    def probe_on_device(self, decoding: list[Sequence]) -> None:
        """Let the next step draft for sequences that drafts may pay for."""
        num_seqs = len(decoding)
        step_times, draft_time = self.costs_for(num_seqs)
        step_time = step_times[0] * self.time_ratio(num_seqs, False).factor
        probe_time = max(self.probe_seconds, (PROBE_TOKENS + 2) * draft_time / 2)
        interval = ceil(probe_time / (PROBE_SHARE * step_time)) if step_times[0] else 0
        interval = int(max(MIN_PROBE_INTERVAL, interval) * self.next_backoff())
        self.next_probe_step = self.step + interval
        best_record = DraftRecord(AcceptanceRate(1.0, 1e6 * BEST_RATE, 1e6))
        records = self.records
        probed = [seq for seq in decoding if seq in records and not records[seq].probe]
        if not probed or self.decide(num_seqs, [(best_record, self.max_drafts)] * num_seqs) <= 1:
            return
        if self.config.traits.needs_draft_prefill:  # of one sequence at a time
            probed = [min(probed, key=lambda seq: records[seq].last_probe_step)]
        for seq in probed:
            records[seq].last_probe_step = self.step
            seq.draft.num_requested = PROBE_TOKENS
        self.probed = probed
        self.last_probe_step = self.step

    def decide(self, num_seqs: int, available: list[tuple[DraftRecord, int]]) -> float:
        """Choose each record's `num_paying`; returns the gain in tokens a second over plain
        decoding.

        Of all available draft tokens the likeliest are verified, as many as give the most tokens a
        second by the time of a step with so many tokens.
        """
        step_times, draft_time = self.costs_for(num_seqs)
        # below 1 it is chance
        slowdown = max(
            1.0, self.time_ratio(num_seqs, True).factor / self.time_ratio(num_seqs, False).factor
        )
        chances = []
        for record, num_available in available:
            chance = rate = self.expected_rate(record)
            for position in range(1, min(num_available, self.max_drafts) + 1):
                chances.append((chance, position))
                chance *= rate
        chances.sort(reverse=True)
        plain_speed = num_seqs / max(step_times[0], 1e-9)
        best_speed = plain_speed
        self.min_chance = inf
        self.depth = 0
        depths: Iterable[int] = (self.max_drafts,)
        if self.on_device and draft_time:
            depths = range(1, self.max_drafts + 1)
        for depth in depths:
            num_tokens = float(num_seqs)
            num_drafts = 0
            draft_seconds = depth * draft_time if self.on_device else 0.0
            for chance, position in chances:
                if position > depth:
                    continue
                num_tokens += chance
                num_drafts += 1
                seconds = max(step_times[num_drafts] + draft_seconds, 1e-9)
                speed = num_tokens / slowdown / seconds
                if speed > best_speed:
                    best_speed = speed
                    self.min_chance = chance
                    self.depth = depth
        for record, _ in available:
            chance = rate = self.expected_rate(record)
            record.num_paying = 0
            while record.num_paying < self.depth and chance >= self.min_chance:
                record.num_paying += 1
                chance *= rate
        return best_speed / plain_speed

    def costs_for(self, num_seqs: int) -> tuple[list[float], float]:
        """(seconds of a step by its number of draft tokens, seconds to draft one token of each
        sequence).
        """
        if num_seqs not in self.costs:
            step_times = [
                self.step_seconds(num_seqs + num_drafts, num_seqs, 0)
                for num_drafts in range(num_seqs * self.max_drafts + 1)
            ]
            draft_time = self.step_seconds(num_seqs, num_seqs, 1) - step_times[0]
            self.costs[num_seqs] = step_times, draft_time
        return self.costs[num_seqs]

    def time_ratio(self, num_seqs: int, is_drafting: bool) -> StepTimeRatio:
        """The ratio of such steps; before one was timed, that of the nearest number of
        sequences.
        """
        key = num_seqs.bit_length(), is_drafting
        if key not in self.time_ratios:
            step_time = self.costs_for(num_seqs)[0][0] or inf
            known_sizes = [size for size, drafting in self.time_ratios if drafting == is_drafting]
            if known_sizes:
                nearest = min(known_sizes, key=lambda size: abs(size - key[0]))
                factor = self.time_ratios[nearest, is_drafting].factor
                if is_drafting:
                    plain_factor = self.time_ratios[nearest, False].factor
                    factor *= self.time_ratio(num_seqs, False).factor / plain_factor
            else:
                factor = self.time_ratio(num_seqs, False).factor if is_drafting else 1.0
                if is_drafting and not self.on_device:
                    factor += HOST_WAIT / step_time
            self.time_ratios[key] = (
                StepTimeRatio(8 * step_time * factor, 8 * step_time)
                if step_time < inf
                else StepTimeRatio(1, 1)
            )
        return self.time_ratios[key]

    def report(self, num_seqs: int) -> None:
        """Log once that drafts do not pay, and why."""
        step_times, draft_time = self.costs_for(num_seqs)
        figures = "not even drafts that are all right would"
        if self.lifetime_rate.tried:
            accepted_share = self.lifetime_rate.accepted / self.lifetime_rate.tried
            figures = f"{accepted_share:.0%} of the drafts are right"
        if step_times[0] > 0:
            verifying = step_times[min(num_seqs, len(step_times) - 1)] / step_times[0] - 1
            figures += f", and verifying one for each sequence takes {verifying:.0%} of a step"
            figures += f", drafting it {draft_time / step_times[0]:.0%}" if self.on_device else ""
        log.info(
            "speculative decoding (%s) does not pay with %d running sequences: %s. Decoding goes "
            "on without drafts; leave --speculative-config out to have their memory back",
            self.config.method,
            num_seqs,
            figures,
        )
