"""Simulation of a load with the real scheduler and page table, and a simulated device and clock.

A linear formula gives the time of a step. As in serving, the results of a step are processed while
the next step runs.
"""

import heapq
import random
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from ...serving.api.outputs import FinishReason
from ...serving.api.params import SamplingParams
from ...serving.cache.page_table import PageTable
from ...serving.device.step_shape import StepShape
from ...serving.engine.scheduler import Scheduler, StepPlan, queue_priority
from ...serving.request.sequence import Sequence

PARAMS = SamplingParams()
SAMPLE_PERIOD = 20  # steps between two entries of `Simulation.looks`


@dataclass(frozen=True)
class SimulatedRequest:
    """A request of the simulated load."""

    arrival: float  # seconds
    prompt: Seq[int]
    output: int  # number of output tokens
    priority: int = 0
    timeout: float | None = None  # seconds from arrival until it times out
    abort: float | None = None  # seconds from arrival until its client disconnects


@dataclass(frozen=True)
class Cost:
    """The time of a step in seconds: a constant (`step`) plus a time per token (`row`)."""

    step: float = 0.008
    row: float = 0.0004

    def of(self, plan: StepPlan) -> float:
        return self.step + self.row * plan.num_tokens


class Look(NamedTuple):
    """The state of the scheduler between two steps."""

    now: float
    running: int
    waiting: int
    pages: float  # fraction of pages in use, in the fullest cache group
    filled: float  # fraction of the allocated pages' positions in use, in the first cache group
    preemptions: int


@dataclass
class Outcome:
    """The result of a request; times are in seconds of the simulated clock."""

    request: SimulatedRequest
    seq: Sequence
    started: float | None = None  # when its first tokens were scheduled
    tokens: list[float] = field(default_factory=list)  # time of each output token
    ended: float | None = None


class Policy(StrEnum):
    """Batching policy: admit requests at every step (continuous), in batches that are full or have
    waited long enough (dynamic), or in full batches (static).
    """

    continuous = "continuous"
    dynamic = "dynamic"
    static = "static"


class Simulation:
    """Runs requests through the scheduler on a simulated device.

    Args:
        table: The page table.
        shape: Limits of a step.
        cost: Time of a step.
        policy: Batching policy. Without continuous batching, a batch is admitted when the previous
            one has finished.
        delay: Seconds that a dynamic batch waits to be full.
        checks: Check the scheduler's invariants every `checks` steps; 0: only at the end.
    """

    def __init__(
        self,
        table: PageTable,
        shape: StepShape,
        cost: Cost = Cost(),
        policy: Policy = Policy.continuous,
        delay: float = 0.1,
        checks: int = 0,
    ):
        self.scheduler = Scheduler([table], shape)
        self.cost = cost
        self.checks = checks
        self.table = table
        self.policy = policy
        self.delay = delay
        self.now = 0.0
        self.steps = 0
        self.rows = 0
        self.preemptions = 0
        self.outcomes: dict[Sequence, Outcome] = {}
        self.looks: list[Look] = []
        self.held: list[Sequence] = []  # arrived, waiting for a batch

    def run(self, requests: Seq[SimulatedRequest]) -> list[Outcome]:
        """Serve all requests, sorted by arrival."""
        leaving: list[tuple[float, int, FinishReason, Sequence]] = []
        place = 0
        in_flight = None
        scheduler = self.scheduler
        while place < len(requests) or self.held or scheduler.busy or in_flight:
            while place < len(requests) and requests[place].arrival <= self.now:
                request = requests[place]
                seq = self.arrive(request)
                delays: dict[FinishReason, float | None] = {
                    "timeout": request.timeout,
                    "abort": request.abort,
                }
                for reason, delay in delays.items():
                    if delay is not None:
                        heapq.heappush(
                            leaving, (request.arrival + delay, len(self.outcomes), reason, seq)
                        )
                place += 1
            while leaving and leaving[0][0] <= self.now:
                _, _, reason, seq = heapq.heappop(leaving)
                self.end(seq, reason)
            if self.held and not scheduler.busy and self.batch_is_ready(place == len(requests)):
                batch = self.held[: scheduler.shape.max_seqs]
                self.held = self.held[scheduler.shape.max_seqs :]
                for seq in batch:
                    scheduler.add(seq)
            plan = scheduler.schedule()
            scheduler.take_moves()  # page copies take no time in the simulation
            if plan is None and in_flight is None:
                coming = [requests[place].arrival] if place < len(requests) else []
                coming += [leaving[0][0]] if leaving else []
                coming += [self.due] if self.held and self.policy is Policy.dynamic else []
                assert coming, "the scheduler has work and does none of it"
                self.now = max(self.now, min(coming))
                continue
            if plan is not None:
                for item in plan.items:
                    outcome = self.outcomes[item.seq]
                    outcome.started = self.now if outcome.started is None else outcome.started
                self.steps = self.steps + 1
                self.rows = self.rows + plan.num_tokens
            if in_flight is not None:
                self.process_results(in_flight)
            if plan is not None:
                self.now += self.cost.of(plan)
            in_flight = plan
            if self.steps % SAMPLE_PERIOD == 0:
                self.look()
            if self.checks and self.steps % self.checks == 0:
                scheduler.check()
        scheduler.check()
        return list(self.outcomes.values())

    @property
    def due(self) -> float:
        """When a dynamic batch starts even if it is not full."""
        return self.outcomes[self.held[0]].request.arrival + self.delay

    def batch_is_ready(self, last: bool) -> bool:
        """Whether the held requests may start as a batch; `last`: no more requests will arrive."""
        full = len(self.held) >= self.scheduler.shape.max_seqs
        return full or last or (self.policy is Policy.dynamic and self.now >= self.due)

    def arrive(self, request: SimulatedRequest) -> Sequence:
        prompt = list(request.prompt)
        rank = queue_priority(request.priority, request.arrival)
        seq = Sequence(0, prompt, len(prompt), PARAMS, request.output, rank)
        self.outcomes[seq] = Outcome(request, seq)
        if self.policy is not Policy.continuous:
            self.held.append(seq)
        else:
            self.scheduler.add(seq)
        return seq

    def process_results(self, plan: StepPlan) -> None:
        """Append the tokens of a completed step."""
        for item in plan.items:
            seq = item.seq
            if item.num_samples:
                seq.pending -= 1
                if seq.finish_reason is None:
                    # Distinct token ids, so that only prompts hit the prefix cache.
                    seq.tokens.append(-len(seq.tokens))
                    self.outcomes[seq].tokens.append(self.now)
                    if seq.num_output >= seq.max_tokens:
                        self.end(seq, "length")

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        outcome = self.outcomes[seq]
        if seq.finish_reason is not None:
            return
        if seq in self.held:
            self.held.remove(seq)
            seq.finish_reason = reason
        else:
            self.scheduler.finish(seq, reason)
        self.preemptions += seq.num_preemptions
        outcome.ended = self.now

    def look(self) -> None:
        table = self.table
        running = self.scheduler.running
        owned = sum(1 for owners in table.pools[0].ref_counts if owners) * table.page_size
        distinct = owned - sum(-seq.num_computed % table.page_size for seq in running)
        preemptions = self.preemptions + sum(seq.num_preemptions for seq in running)
        self.looks.append(
            Look(
                self.now,
                len(running),
                len(self.scheduler.waiting) + len(self.held),
                table.used(),
                distinct / owned if owned else 1.0,
                preemptions,
            )  # fmt: skip
        )


def conversations(
    count: int, rate: float, seed: int = 0, limit: int = 2000, shared: int = 0
) -> list[SimulatedRequest]:
    """Requests with log-normal lengths typical of chats, and arrivals in bursts of random rates.

    Args:
        count: Number of requests.
        rate: Mean requests per second.
        seed: Random seed.
        limit: Maximum length of a prompt and of an output.
        shared: Length of a common system prompt.
    """
    rng = random.Random(seed)
    requests = []
    now = 0.0
    system = [rng.randrange(50_000) for _ in range(shared)]
    burst = 1.0
    for index in range(count):
        if index % 200 == 0:
            burst = rng.choice((0.5, 1.0, 3.0))
        now += rng.expovariate(rate * burst)
        prompt = min(limit, max(1, round(rng.lognormvariate(4.2, 1.2))))
        output = min(limit, max(1, round(rng.lognormvariate(4.6, 1.0))))
        requests.append(
            SimulatedRequest(now, system + [rng.randrange(50_000) for _ in range(prompt)], output)
        )
    return requests


def reasons(outcomes: Seq[Outcome]) -> Counter[str | None]:
    """The number of requests by finish reason."""
    return Counter(outcome.seq.finish_reason for outcome in outcomes)
