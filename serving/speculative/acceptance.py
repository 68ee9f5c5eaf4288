"""Measurements that decide how many draft tokens pay: acceptance rates and step times."""

from dataclasses import dataclass, field

PRIOR_WEIGHT = 4.0  # draft tokens for which the overall rate counts in a sequence's estimate
SEQUENCE_MEMORY = 24.0  # draft tokens after which an old one counts e times less
STEP_MEMORY = 32.0  # steps after which an old step time counts e times less


@dataclass
class AcceptanceRate:
    """The recent share of draft tokens that were accepted."""

    memory: float  # draft tokens after which an old one counts e times less
    accepted: float = 0.0
    tried: float = 0.0

    def observe(self, num_accepted: int, num_drafts: int) -> None:
        """Count a verification. The draft tokens after the first rejected one say nothing."""
        num_tried = num_accepted + (num_accepted < num_drafts)
        decay = max(0.0, 1 - num_tried / self.memory)
        self.accepted = self.accepted * decay + num_accepted
        self.tried = self.tried * decay + num_tried

    def estimate(self, overall: "AcceptanceRate") -> float:
        """The expected rate: that of all sequences, until more is known of this one."""
        prior = PRIOR_WEIGHT * overall.accepted / overall.tried
        return (self.accepted + prior) / (self.tried + PRIOR_WEIGHT)


@dataclass
class DraftRecord:
    """What is known of one sequence's draft tokens."""

    rate: AcceptanceRate = field(default_factory=lambda: AcceptanceRate(SEQUENCE_MEMORY))
    num_available: int = 0  # tokens that the drafter proposed when it was asked last
    num_paying: int = 0  # draft tokens whose verification pays
    # A probe: tokens proposed after `probe_start` output tokens, to be compared with what comes.
    probe: list[int] = field(default_factory=list)
    probe_start: int = 0
    next_probe: int = 0  # host methods: number of output tokens at which to probe again
    last_probe_step: int = 0  # device methods


@dataclass
class StepTimeRatio:
    """How much longer steps take in service than in the measurement at the start."""

    measured: float  # seconds
    expected: float  # seconds, by the table of the start

    @property
    def factor(self) -> float:
        return self.measured / self.expected

    def observe(self, measured: float, expected: float) -> None:
        measured = min(measured, 3 * self.factor * expected)  # the process may have been suspended
        decay = 1 - 1 / STEP_MEMORY
        self.measured = self.measured * decay + measured
        self.expected = self.expected * decay + expected


@dataclass
class DraftCounts:
    """Draft tokens since the start, for the metrics."""

    proposals: int  # verifications, each of some draft tokens
    drafts: int
    accepted: list[int]  # by position among the draft tokens of a step

    def add(self, num_drafts: int, num_accepted: int) -> None:
        self.proposals += 1
        self.drafts += num_drafts
        for position in range(num_accepted):
            self.accepted[position] += 1
