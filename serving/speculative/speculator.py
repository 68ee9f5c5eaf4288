"""How many tokens are drafted: as many as pay, by what was accepted of late and by what a step
costs.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf
from time import perf_counter

from ..api.speculation import SpeculativeConfig
from ..request.sequence import Sequence
from . import Drafter, make_drafter

log = logging.getLogger("quire")

# the share of drafts that is accepted, before anything is known, and for how many it counts
PRIOR = 0.7
WEIGHT = 4.0
# tokens a step that further paths of drafts give beyond the first, before anything is known
MORE = 0.3
MEMORY = 24.0  # drafts of a sequence after which an old one counts e times less,
COMMON = 192.0  # and drafts of all
STEPS = 32.0  # that tell how long they take; an old one counts e times less after so many
HEARD = 4  # while nobody drafts, one step of so many is timed
FORGOTTEN = 128.0  # of these, after which steps with drafts may be as much longer as these are
# seconds that the device waits for the host in a step with drafts, before any was seen
WAITING = 1e-4
GAIN = 1.03  # of tokens a second, to begin with drafts: to change costs something
LOOKS = 0.01  # share of the time that may go into drafts which are only compared with what comes
LOOKED = 2  # so far ahead, where the step drafts
SOONEST = 16  # steps between two such looks, at least
IDLE_STEPS = 512  # decode steps without drafts after which the log says that drafts do not pay
MAX_PATIENCE = 64.0  # times longer between two looks where drafts have not paid for long
BEST = 0.98  # the share of accepted drafts above which nobody hopes


@dataclass
class Rate:
    """The share of drafts that was right, of late."""

    memory: float
    accepted: float = 0.0
    tried: float = 0.0

    def learn(self, accepted: int, drafts: int) -> None:
        """The drafts after the first wrong one tell nothing."""
        self.count(accepted, accepted + (accepted < drafts))

    def count(self, accepted: float, tried: float) -> None:
        kept = max(0.0, 1 - tried / self.memory)
        self.accepted = self.accepted * kept + accepted
        self.tried = self.tried * kept + tried

    def beside(self, common: "Rate") -> float:
        """The share that will be right: as of all, until more is known."""
        return (self.accepted + WEIGHT * common.accepted / common.tried) / (self.tried + WEIGHT)


@dataclass
class Record:
    """What is known of a sequence."""

    rate: Rate = field(default_factory=lambda: Rate(MEMORY))
    more: Rate = field(default_factory=lambda: Rate(MEMORY))  # tokens a step by further paths
    ideas: int = 0  # tokens that it would have drafted when it was asked last
    depth: int = 0  # drafts that pay
    branches: bool = False  # so do further paths
    # what was to come after the output token `since`
    guess: list[int] = field(default_factory=list)
    since: int = 0
    looks: int = 0  # output tokens after which it guesses again
    looked: int = 0  # the step in which it was asked to, where steps draft


@dataclass
class Pace:
    """How much longer steps take in service than they did alone, of late."""

    found: float  # seconds,
    expected: float  # and those by the table

    @property
    def factor(self) -> float:
        return self.found / self.expected

    def learn(self, found: float, expected: float) -> None:
        found = min(found, 3 * self.factor * expected)  # the process may have been stopped
        kept = 1 - 1 / STEPS
        self.found = self.found * kept + found
        self.expected = self.expected * kept + expected


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
    """Gives sequences their drafts where these pay.

    While one drafts on the host (`Sequence.awaits_drafts`), the next step is planned when the
    tokens of the last are known, and has all sequences. Where steps draft (`Sequence.asks`) and
    where nobody does, the engine stays a step ahead. Where nobody does, a drafter only guesses now
    and then, and what comes says whether it was right: nobody waits for it, and no row is computed
    for a guess. Where not even drafts that are all right would pay, it does not guess at all.

    `seconds(rows, sequences, drafts, paths)` is what a step takes that drafts so many tokens of
    each sequence, as measured at the start. What steps take in service, with the host's part,
    corrects it for both kinds. Where drafts have several paths, all of a sequence are verified, or
    the first alone.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        seconds: Callable[..., float],
        clock: Callable[[], float] = perf_counter,
    ):
        self.config, self.seconds, self.clock, self.in_step = config, seconds, clock, config.in_step
        self.drafter: Drafter = make_drafter(config)
        self.most, self.paths = config.depth, len(config.paths)
        # rows of a sequence's further paths
        self.others = config.num_rows - 1 - len(config.paths[0])
        self.records: dict[Sequence, Record] = {}
        # of all sequences: what a new one begins with
        self.common = Rate(COMMON, PRIOR * WEIGHT, WEIGHT)
        self.more = Rate(COMMON, MORE * WEIGHT, WEIGHT)  # the same of further paths
        self.step = 0
        self.drafting = not config.adapts
        self.depth = self.most  # of the drafts that steps make
        self.least = 0.0  # chance of the last draft that pays
        # sequences, and the step from which it is asked again what pays
        self.decided: tuple[int, int] = 0, 0
        self.news = True  # something was learnt since
        self.next_look = 0  # the step, where steps draft
        self.looked = -2  # the step of the last one
        # sequences when it was asked last, and whether all decoded
        self.waited: tuple[int, bool] = 0, False
        # the next step's time counts; so do tokens of sequences without drafts
        self.listens = self.attends = True
        self.asked: list[Sequence] = []  # to look
        self.paces: dict[
            tuple[int, bool], Pace
        ] = {}  # by the number of sequences, in powers of two; with drafts or not
        # by number of sequences, and of paths
        self.costs: dict[tuple[int, int], tuple[list[float], float]] = {}
        self.proposing = 1e-5  # seconds that a proposal takes on the host
        self.looking = 0.0  # and by which a step is longer that drafts only to look
        self.counts = Counts(0, 0, [0] * self.most)
        self.idle_steps = 0  # decode steps since one had drafts
        self.verdicts = Rate(inf)  # the share of drafts that was right since the start
        self.is_reported = False  # the log has said that drafts do not pay
        self.patience = 1.0  # factor of the time between two looks

    def begin(self, seq: Sequence) -> None:
        """A sequence comes."""
        if seq.pool is None and seq.max_tokens > 1:
            self.records[seq] = Record(ideas=self.most if self.in_step else 0)
            self.news = True
            self.let(seq, self.drafting)
            seq.branching = self.paths > 1 and not self.config.adapts

    def end(self, seq: Sequence) -> None:
        """A sequence is over."""
        if self.records.pop(seq, None) is not None:
            self.drafter.end(seq)
            seq.drafts = []

    def took(
        self,
        count: int,
        drafts: int,
        asks: int,
        waited: bool,
        seconds: float,
        branches: bool = False,
    ) -> None:
        """A step in which so many sequences decoded was done so long after the one before."""
        times, drafting = self.cost(count, self.paths if branches else 1)
        expected = times[min(drafts, len(times) - 1)] + asks * drafting
        if not 0 < expected < inf:
            return
        if asks and not waited:
            longer = max(0.0, seconds - times[0] * self.pace(count, False).factor)
            self.looking += (min(longer, 8 * times[0]) - self.looking) / 4
            return
        self.pace(count, waited).learn(seconds, expected)
        # it may be worth another try
        if not waited and (other := self.paces.get((count.bit_length(), True))):
            other.found += (
                other.expected * self.pace(count, False).factor - other.found
            ) / FORGOTTEN

    def pace(self, count: int, waited: bool) -> Pace:
        """How long such steps take; where none was seen, as those of the next number of sequences
        that was.
        """
        key = size, _ = count.bit_length(), waited
        if key not in self.paces:
            step = self.cost(count)[0][0] or inf
            known = [other for other, waits in self.paces if waits == waited]
            if known:
                nearest = min(known, key=lambda other: abs(other - size))
                factor = self.paces[nearest, waited].factor
                if waited:
                    factor *= self.pace(count, False).factor / self.paces[nearest, False].factor
            else:
                factor = self.pace(count, False).factor if waited else 1.0
                factor += WAITING / step if waited and not self.in_step else 0.0
            self.paces[key] = Pace(8 * step * factor, 8 * step) if step < inf else Pace(1, 1)
        return self.paces[key]

    def rate(self, record: Record) -> float:
        """The share of a sequence's drafts that will be right."""
        return record.rate.beside(self.common)

    def learn(self, record: Record, accepted: int, drafts: int) -> None:
        self.verdicts.learn(accepted, drafts)
        record.rate.learn(accepted, drafts)
        self.common.learn(accepted, drafts)
        self.news = True

    def take_in(self, seq: Sequence, drafts: int, accepted: int, more: int | None = None) -> None:
        """A sequence got its tokens: so many of its drafts were right. It gets the next ones, if it
        waits for them.

        `more` are those by which another path was better than the first, where there were others.
        """
        record = self.records.get(seq)
        if record is None:
            return
        seq.drafts = []
        seq.branches = []
        if drafts:
            self.learn(record, accepted, drafts)
        if more is not None:
            record.more.count(more, 1)
            self.more.count(more, 1)
        elif drafts and self.paths > 1:  # it may be worth another try
            record.more.count(MORE / FORGOTTEN, 1 / FORGOTTEN)
            self.more.count(MORE / FORGOTTEN, 1 / FORGOTTEN)
        if not seq.pending and (seq.awaits_drafts or seq.asks) and self.drafting:
            seq.drafts = self.propose(seq)
            if self.config.adapts and not (self.in_step or seq.drafts):
                self.rest(seq, record)
        elif self.config.adapts and not (self.in_step and self.drafting):
            self.look(seq, record)

    def propose(self, seq: Sequence) -> list[int]:
        most = min(self.most, seq.max_tokens - seq.num_output - 1)
        proposed = self.drafter.propose(seq, most) if most > 0 else []
        if proposed and seq.constraint is not None:
            proposed = seq.constraint.longest_allowed_prefix(proposed)
        return proposed

    def let(self, seq: Sequence, drafts: bool) -> None:
        """Whether a sequence is to have drafts."""
        # Of several paths the host lets one go on.
        seq.awaits_drafts = drafts and (not self.in_step or self.paths > 1)
        seq.asks = self.depth * (drafts and self.in_step)
        if not drafts:
            seq.drafts = []
            seq.branches = []
            seq.held = 0
            seq.branching = False

    def rest(self, seq: Sequence, record: Record) -> None:
        """A sequence goes on without drafts, until it would have some again that pay."""
        self.let(seq, False)
        record.guess = []
        record.looks = seq.num_output
        if not self.in_step:
            record.ideas = 0

    def look(self, seq: Sequence, record: Record) -> None:
        """What a sequence without drafts would have drafted; what came meanwhile says how much of
        it was right.
        """
        if record.guess:
            count = seq.num_output - record.since
            if count >= len(record.guess):
                came = seq.tokens[seq.num_prompt + record.since :]
                right = next(
                    (at for at, token in enumerate(record.guess) if came[at] != token),
                    len(record.guess),
                )
                self.learn(record, right, len(record.guess))
                record.guess = []
        elif seq.proposed if self.in_step else seq.num_output >= record.looks:
            began = self.clock()
            record.guess = self.drafter.propose(seq, self.most)
            record.since = seq.num_output
            if self.in_step:
                return
            record.ideas = len(record.guess)
            self.news = True
            seq.awaits_drafts = (
                self.drafting and record.ideas > 0 and self.rate(record) >= self.least
            )
            self.proposing += (self.clock() - began - self.proposing) / 16
            share = len(self.records) * self.proposing / LOOKS * self.patience
            if self.is_reported:
                self.patience = min(2 * self.patience, MAX_PATIENCE)
            record.looks = seq.num_output + max(1, ceil(share / max(self.seconds(1, 1, 0), 1e-4)))

    def trim(self, running: Seq[Sequence]) -> None:
        """Before a step is planned: leave as many drafts as make the most tokens a second of all
        who decode.
        """
        self.step += 1
        if not self.config.adapts:
            for seq in running if self.in_step else ():
                seq.asks = self.most if seq in self.records else 0
            return
        for seq in self.asked:
            seq.asks = seq.held = 0
        self.asked = []
        if self.drafting or self.due(len(running)):
            ready = [seq for seq in running if seq.missing == 1]
            self.waited = len(running), len(ready) == len(running)
            if not self.drafting:
                self.wait(ready)
            elif ready:
                self.draft(ready)
        if self.drafting:
            self.idle_steps = 0
            self.patience = 1.0
        elif running and self.waited == (len(running), True):
            self.idle_steps += 1
            if self.idle_steps >= IDLE_STEPS and not self.is_reported:
                self.is_reported = True
                self.report(len(running))
        self.listens = self.drafting or self.step % HEARD == 0 or self.step <= self.looked + 2
        self.attends = self.drafting or self.looks()

    def looks(self) -> bool:
        """Whether one of the sequences has guessed, or is to."""
        for seq, record in self.records.items():
            if record.guess or (
                not self.in_step and record.looks < len(seq.tokens) - seq.num_prompt + 2
            ):
                return True
        return False

    def due(self, count: int) -> bool:
        """Whether something may have changed since it was found that no drafts pay."""
        return (
            self.news
            or self.waited != (count, True)
            or (self.in_step and self.step >= self.next_look)
        )

    @property
    def rests(self) -> bool:
        """The step that is planned next has no drafts and makes none."""
        return not (self.drafting or self.asked)

    def draft(self, ready: list[Sequence]) -> None:
        """Keep the drafts that pay; where none would, all go on without."""
        n = len(ready)
        records = self.records
        of = [(seq, records[seq]) for seq in ready if seq in records]
        if self.in_step:
            asked = [(record, record.ideas) for _, record in of]
        else:
            asked = [(record, len(seq.drafts)) for seq, record in of if seq.awaits_drafts]
        if not any(ideas for _, ideas in asked):
            self.drafting = any(seq.awaits_drafts or seq.asks for seq in self.records)
            return
        count, until = self.decided
        if n != count or self.step >= until or not self.in_step:
            if self.decide(n, asked) <= 1:
                self.drafting = False
                self.news = False
                for seq, record in records.items():
                    self.rest(seq, record)
                return
            self.decided = n, self.step + 1 + n // 4
        for seq, record in of:
            del seq.drafts[record.depth :]
            if self.in_step:
                seq.held = min(seq.held, record.depth)
                seq.asks = self.depth
                seq.branching = record.branches
                seq.branches = [path[: record.depth] for path in seq.branches if record.branches]

    def wait(self, ready: list[Sequence]) -> None:
        """While nobody drafts: begin where it would pay by what is known, and look where that is to
        be known.

        Where all are new it is decided for their prompts.
        """
        records = self.records
        n = len(ready) or len(records)
        if self.news or n != self.decided[0]:
            self.decided = (n, 0)
            self.news = False
            asked = [
                (record, record.ideas) for seq in ready or records if (record := records.get(seq))
            ]
            if any(ideas for _, ideas in asked) and self.decide(n, asked) > GAIN:
                self.drafting = True
                for seq, record in records.items():
                    self.let(seq, record.ideas > 0)
                    seq.branching = self.in_step and record.branches
                return
        if self.in_step and ready and self.step >= self.next_look:
            times, drafting = self.cost(n)
            look = max(self.looking, (LOOKED + 2) * drafting / 2)
            interval = (
                ceil(look / (LOOKS * times[0] * self.pace(n, False).factor)) if times[0] else 0
            )
            self.next_look = self.step + int(max(SOONEST, interval) * self.patience)
            if self.is_reported:
                self.patience = min(2 * self.patience, MAX_PATIENCE)
            hope = Record(Rate(1.0, 1e6 * BEST, 1e6), depth=0)
            able = [seq for seq in ready if seq in records and not records[seq].guess]
            if not able or self.decide(n, [(hope, self.most)] * n) <= 1:
                return
            if self.config.follows:  # it has to be told what it has missed: one at a time
                able = [min(able, key=lambda seq: records[seq].looked)]
            for seq in able:
                records[seq].looked, seq.asks = self.step, LOOKED
            self.asked = able
            self.looked = self.step

    def report(self, n: int) -> None:
        """Log once that drafts do not pay, with what speaks against them; `n` sequences decode."""
        times, drafting = self.cost(n)
        figures = "not even drafts that are all right would"
        if self.verdicts.tried:
            figures = f"{self.verdicts.accepted / self.verdicts.tried:.0%} of the drafts are right"
        if times[0] > 0:
            verifying = times[min(n, len(times) - 1)] / times[0] - 1
            figures += f", and verifying one for each sequence takes {verifying:.0%} of a step"
            figures += f", drafting it {drafting / times[0]:.0%}" if self.in_step else ""
        log.info(
            "speculative decoding (%s) does not pay with %d running sequences: %s. Decoding goes "
            "on without drafts; leave --speculative-config out to have their memory back",
            self.config.method,
            n,
            figures,
        )

    def decide(self, n: int, asked: list[tuple[Record, int]]) -> float:
        """Tokens a second with the drafts that pay most, over those without; how many of each
        sequence these are.

        Of all drafts the likeliest are verified, and a step costs what its rows cost.
        """
        times, drafting = self.cost(n)
        # below it is chance
        slower = max(1.0, self.pace(n, True).factor / self.pace(n, False).factor)
        chances = []
        for record, ideas in asked:
            chance = rate = self.rate(record)
            for position in range(1, min(ideas, self.most) + 1):
                chances.append((chance, position))
                chance *= rate
        chances.sort(reverse=True)
        plain = n / max(times[0], 1e-9)
        best = plain
        self.least = inf
        self.depth = 0
        chosen = float(n), 0  # tokens, and rows of drafts
        for depth in range(1, self.most + 1) if self.in_step and drafting else (self.most,):
            tokens = float(n)
            rows = 0
            for chance, position in chances:
                if position > depth:
                    continue
                tokens = tokens + chance
                rows = rows + 1
                speed = tokens / slower / max(times[rows] + depth * drafting * self.in_step, 1e-9)
                if speed > best:
                    best = speed
                    self.least = chance
                    self.depth = depth
                    chosen = (tokens, rows)
        for record, _ in asked:
            chance = rate = self.rate(record)
            record.depth = 0
            while record.depth < self.depth and chance >= self.least:
                record.depth = record.depth + 1
                chance = chance * rate
            record.branches = False
        if self.paths > 1 and self.depth:
            best = (
                self.branch(
                    n, [record for record, _ in asked if record.depth], *chosen, best * slower
                )
                / slower
            )
        return best / plain

    def branch(
        self, n: int, drafting: list[Record], tokens: float, rows: int, best: float
    ) -> float:
        """Tokens a second where those sequences verify all paths for which these pay, by what they
        gave of late.
        """
        times, each = self.cost(n, self.paths)
        gains = sorted(
            ((record.more.beside(self.more), record) for record in drafting),
            key=lambda pair: -pair[0],
        )
        paying = 0
        for count, (gain, _) in enumerate(gains, 1):
            tokens = tokens + gain
            rows = rows + self.others
            speed = tokens / max(times[rows] + self.depth * each, 1e-9)
            if speed > best:
                best = speed
                paying = count
        for _, record in gains[:paying]:
            record.branches = True
        return best

    def cost(self, n: int, paths: int = 1) -> tuple[list[float], float]:
        """Seconds of a step of so many sequences by the drafts in it, and of each token that it
        drafts for all.
        """
        if (n, paths) not in self.costs:
            seconds = self.seconds if paths == 1 else partial(self.seconds, paths=paths)
            most = self.most if paths == 1 else self.config.num_rows - 1
            times = [seconds(n + drafts, n, 0) for drafts in range(n * most + 1)]
            self.costs[n, paths] = times, seconds(n, n, 1) - times[0]
        return self.costs[n, paths]
