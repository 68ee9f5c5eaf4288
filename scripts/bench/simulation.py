"""The real scheduler and page table under a load, with a pretended device and a clock of their own.

A step costs what a formula says and its tokens come when it is over, while the next one runs already, as in service.
"""

import heapq
import random
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from ...serving.api.params import SamplingParams
from ...serving.cache.page_table import PageTable
from ...serving.engine.scheduler import Limits, Scheduler, StepPlan, rank_of
from ...serving.request.sequence import Sequence

PARAMS = SamplingParams()
EVERY = 20  # steps between two looks at the whole


@dataclass(frozen=True)
class Job:
    """A request: what it asks for, and when its client loses patience or goes away, in seconds from its arrival."""

    arrival: float
    prompt: Seq[int]
    output: int
    priority: int = 0
    timeout: float | None = None
    abort: float | None = None


@dataclass(frozen=True)
class Cost:
    """Seconds of a step: what every step takes, and what each row adds."""

    step: float = 0.008
    row: float = 0.0004

    def of(self, plan: StepPlan) -> float:
        return self.step + self.row * plan.num_rows


class Look(NamedTuple):
    """The state between two steps."""

    now: float
    running: int
    waiting: int
    pages: float  # the share in use of the fullest group
    filled: float  # of the positions in the pages that are owned, those with a token; of the full group
    preemptions: int


@dataclass
class Fate:
    """What became of a job, in seconds of the simulation's clock."""

    job: Job
    seq: Sequence
    started: float | None = None  # its first rows were planned
    tokens: list[float] = field(default_factory=list)  # when each came
    ended: float | None = None


class Policy(StrEnum):
    """When requests are let in: at every step; or as a batch, full or after a delay; or as a full batch."""

    continuous = "continuous"
    dynamic = "dynamic"
    static = "static"


class Simulation:
    """Without continuous batching a batch is let in when the last one is over."""

    def __init__(
        self,
        table: PageTable,
        limits: Limits,
        cost: Cost = Cost(),
        policy: Policy = Policy.continuous,
        delay: float = 0.1,
        checks: int = 0,
    ):
        self.scheduler, self.cost, self.checks = Scheduler([table], limits), cost, checks
        self.table, self.policy, self.delay = table, policy, delay  # seconds that a dynamic batch waits for more
        self.now, self.steps, self.rows, self.preemptions = 0.0, 0, 0, 0
        self.fates: dict[Sequence, Fate] = {}
        self.looks: list[Look] = []
        self.held: list[Sequence] = []  # arrived, and waiting for a batch

    def run(self, jobs: Seq[Job]) -> list[Fate]:
        """Serve all jobs, given in the order of their arrivals, to their ends."""
        leaving: list[tuple[float, int, str, Sequence]] = []
        place, flying, scheduler = 0, None, self.scheduler
        while place < len(jobs) or self.held or scheduler.busy or flying:
            while place < len(jobs) and jobs[place].arrival <= self.now:
                seq = self.arrive(jobs[place])
                for reason, after in (("timeout", jobs[place].timeout), ("abort", jobs[place].abort)):
                    if after is not None:
                        heapq.heappush(leaving, (jobs[place].arrival + after, len(self.fates), reason, seq))
                place += 1
            while leaving and leaving[0][0] <= self.now:
                _, _, reason, seq = heapq.heappop(leaving)
                self.end(seq, reason)
            if self.held and not scheduler.busy and self.gathered(place == len(jobs)):
                batch, self.held = self.held[: scheduler.limits.max_seqs], self.held[scheduler.limits.max_seqs :]
                for seq in batch:
                    scheduler.add(seq)
            plan = scheduler.schedule()
            scheduler.take_moves()  # they take no time here
            if plan is None and flying is None:
                coming = [jobs[place].arrival] if place < len(jobs) else []
                coming += [leaving[0][0]] if leaving else []
                coming += [self.due] if self.held and self.policy is Policy.dynamic else []
                assert coming, "the scheduler has work and does none of it"
                self.now = max(self.now, min(coming))
                continue
            if plan is not None:
                for item in plan.items:
                    fate = self.fates[item.seq]
                    fate.started = self.now if fate.started is None else fate.started
                self.steps, self.rows = self.steps + 1, self.rows + plan.num_rows
            if flying is not None:
                self.take_in(flying)
            if plan is not None:
                self.now += self.cost.of(plan)
            flying = plan
            if self.steps % EVERY == 0:
                self.look()
            if self.checks and self.steps % self.checks == 0:
                scheduler.check()
        scheduler.check()
        return list(self.fates.values())

    @property
    def due(self) -> float:
        """When a dynamic batch begins, full or not."""
        return self.fates[self.held[0]].job.arrival + self.delay

    def gathered(self, last: bool) -> bool:
        """Whether those held make a batch; the last ones do."""
        full = len(self.held) >= self.scheduler.limits.max_seqs
        return full or last or (self.policy is Policy.dynamic and self.now >= self.due)

    def arrive(self, job: Job) -> Sequence:
        seq = Sequence(
            0, list(job.prompt), len(job.prompt), PARAMS, job.output, rank_of(job.priority, job.arrival)
        )  # fmt: skip
        self.fates[seq] = Fate(job, seq)
        if self.policy is not Policy.continuous:
            self.held.append(seq)
        else:
            self.scheduler.add(seq)
        return seq

    def take_in(self, plan: StepPlan) -> None:
        """The tokens of a step that is over."""
        for item in plan.items:
            seq = item.seq
            if item.draws:
                seq.pending -= 1
                if seq.finish_reason is None:
                    # Tokens that nobody else writes: only prompts are shared.
                    seq.tokens.append(-len(seq.tokens))
                    self.fates[seq].tokens.append(self.now)
                    if seq.num_output >= seq.max_tokens:
                        self.end(seq, "length")

    def end(self, seq: Sequence, reason: str) -> None:
        fate = self.fates[seq]
        if seq.finish_reason is not None:
            return
        if seq in self.held:
            self.held.remove(seq)
            seq.finish_reason = reason
        else:
            self.scheduler.finish(seq, reason)
        self.preemptions += seq.num_preemptions
        fate.ended = self.now

    def look(self) -> None:
        table, running = self.table, self.scheduler.running
        owned = sum(1 for owners in table.pools[0].owners if owners) * table.page_size
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


def conversations(count: int, rate: float, seed: int = 0, limit: int = 2000, shared: int = 0) -> list[Job]:
    """Jobs with the lengths of chats: log-normal, most of them short and some very long, in bursts of a random rate.

    `shared` is the length of a system prompt that all of them begin with.
    """
    rng, jobs, now = random.Random(seed), [], 0.0
    system = [rng.randrange(50_000) for _ in range(shared)]
    burst = 1.0
    for index in range(count):
        if index % 200 == 0:
            burst = rng.choice((0.5, 1.0, 3.0))
        now += rng.expovariate(rate * burst)
        prompt = min(limit, max(1, round(rng.lognormvariate(4.2, 1.2))))
        output = min(limit, max(1, round(rng.lognormvariate(4.6, 1.0))))
        jobs.append(Job(now, system + [rng.randrange(50_000) for _ in range(prompt)], output))
    return jobs


def reasons(fates: Seq[Fate]) -> Counter[str | None]:
    """How many ended in which way."""
    return Counter(fate.seq.finish_reason for fate in fates)
