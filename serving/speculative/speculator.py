"""How many tokens are drafted: as many as pay, by what was accepted of late and by what a step costs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..api.speculation import SpeculativeConfig
from ..request.sequence import Sequence
from . import Drafter, make_drafter

PRIOR, WEIGHT = 0.7, 4.0  # the share of drafts that is accepted, before anything is known, and for how many it counts
MEMORY = 24.0  # drafts after which an old one counts e times less
PAUSES = 8, 64  # tokens, or steps, without drafts where these do not pay: at first, and at most
IDLE = 0.05  # seconds after which there was nothing to do
MISSES = 3  # times in a row that a drafter has no idea, before the sequence goes on without


@dataclass
class Record:
    """What is known of a sequence."""

    accepted: float = PRIOR * WEIGHT
    tried: float = WEIGHT
    misses: int = 0
    pause: int = PAUSES[0]
    resumes: int = 0  # output tokens after which it drafts again

    @property
    def rate(self) -> float:
        return self.accepted / self.tried

    def learn(self, accepted: int, drafts: int) -> None:
        """The drafts after the first rejected one tell nothing."""
        tried = accepted + (accepted < drafts)
        kept = max(0.0, 1 - tried / MEMORY)
        self.accepted, self.tried = self.accepted * kept + accepted, self.tried * kept + tried


@dataclass
class Counts:
    """What was drafted, and what of it the answers have taken over."""

    proposals: int  # of some drafts each
    drafts: int
    accepted: list[int]  # by position

    def add(self, drafts: int, accepted: int) -> None:
        self.proposals += 1
        self.drafts += drafts
        for position in range(accepted):
            self.accepted[position] += 1


class Speculator:
    """Gives sequences their drafts, and lets them go on without where these do not pay.

    While one drafts (`Sequence.waits`), the next step is planned when the tokens of the last are known, and has all
    sequences. If none does, the engine stays a step ahead, as in plain decoding. One that has stopped to draft tries
    again after a pause.

    `seconds(rows, sequences, drafts)` is what a step takes, and one that drafts itself.
    """

    def __init__(self, config: SpeculativeConfig, seconds: Callable[[int, int, bool], float]):
        self.config, self.seconds = config, seconds
        self.drafter: Drafter = make_drafter(config)
        self.most = config.num_speculative_tokens
        self.records: dict[Sequence, Record] = {}
        self.step, self.resumes, self.pause = 0, 0, PAUSES[0]  # nobody drafts before step `resumes`
        self.gap = 1e-4  # seconds that the device waits for the host where a sequence waits for its token
        self.counts = Counts(0, 0, [0] * self.most)

    def begin(self, seq: Sequence) -> None:
        """A sequence comes."""
        if seq.pool is None and seq.max_tokens > 1:
            self.records[seq] = Record()
            seq.waits = self.step >= self.resumes

    def end(self, seq: Sequence) -> None:
        """A sequence is over."""
        if self.records.pop(seq, None) is not None:
            self.drafter.end(seq)
            seq.drafts = []

    def waited(self, seconds: float) -> None:
        """The device had nothing to do for so long, since a token was waited for."""
        if seconds < IDLE:
            self.gap += (seconds - self.gap) / 16

    def take_in(self, seq: Sequence, drafts: int, accepted: int) -> None:
        """A sequence got its tokens: so many of its drafts were right. It gets the next ones, if it waits for them."""
        record = self.records.get(seq)
        if record is None:
            return
        seq.drafts = []
        if drafts:
            record.learn(accepted, drafts)
            if accepted == drafts:
                record.pause = PAUSES[0]
        if not seq.waits and seq.num_output >= record.resumes and self.step >= self.resumes:
            seq.waits = True
            record.accepted += PRIOR  # enough for another try, soon forgotten if it fails
            record.tried += 1
        if not seq.waits or seq.pending:
            return
        most = min(self.most, seq.max_tokens - seq.num_output - 1)
        proposed = self.drafter.propose(seq, most) if most > 0 else []
        if proposed and seq.constraint is not None:
            proposed = seq.constraint.open_beginning(proposed)
        seq.drafts = proposed
        record.misses = 0 if proposed else record.misses + 1
        if self.config.adapts and record.misses >= MISSES:
            self.rest(seq, record)

    def rest(self, seq: Sequence, record: Record) -> None:
        """Let a sequence go on without drafts for a while."""
        seq.drafts, seq.waits, record.misses = [], False, 0
        record.resumes = seq.num_output + record.pause
        record.pause = min(2 * record.pause, PAUSES[1])

    def trim(self, running: Iterable[Sequence]) -> None:
        """Before a step is planned: leave as many drafts as make the most tokens a second of all who decode.

        Where none do, nobody drafts for a while: one sequence that does holds up all others.
        """
        self.step += 1
        ready = [seq for seq in running if seq.missing == 1]
        drafting = [seq for seq in ready if seq.drafts]
        if not drafting or not self.config.adapts:
            return
        n, depth = len(ready), 0
        best = n / max(self.seconds(n, n, False), self.gap)  # without drafts the host works while the device does
        expected = [0.0] * len(drafting)
        chances = [1.0] * len(drafting)
        rows = n
        for k in range(1, self.most + 1):
            for index, seq in enumerate(drafting):
                if k <= len(seq.drafts):
                    chances[index] *= self.records[seq].rate
                    expected[index] += chances[index]
                    rows += 1
            speed = (n + sum(expected)) / (self.seconds(rows, n, True) + self.gap)
            if speed > best:
                best, depth = speed, k
        for seq in drafting:
            del seq.drafts[depth:]
        if depth:
            self.pause = PAUSES[0]
            return
        self.resumes, self.pause = self.step + self.pause, min(2 * self.pause, PAUSES[1])
        for seq in ready:
            seq.waits = False
