"""What the engine has done, in numbers: counts and distributions under the names that vLLM's users know."""

import weakref
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from ..api.outputs import FINISH_REASONS
from ..engine.engine import Engine
from ..engine.scheduler import ScheduledSequence, StepPlan
from ..request.request import Request
from ..request.sequence import Sequence
from .histogram import Histogram, one_two_five
from .metric_families import COUNTERS, HISTOGRAMS, PHASES, SHORT, Family, labelled, plain, states
from .trace import NoTrace

ROWS, BEGINS = (
    itemgetter(ScheduledSequence._fields.index("num_rows")),
    itemgetter(ScheduledSequence._fields.index("begins")),
)


class Step(NamedTuple):
    """A step whose tokens are there."""

    at: float  # when they came
    rows: int
    decodes: int  # sequences that brought a single row
    sequences: int
    seconds: float
    gaps: list[tuple[float, int]]  # since the last token of a sequence, and of how many
    firsts: list[float]  # from arrival to the first token


class Metrics(NoTrace):
    """Hears of every step in the engine's thread, and may be read in any.

    A request counts from the first step that begins with it there, so that one which is taken back before that leaves
    no mark. One with several answers counts once, and its end is the gravest of theirs.
    """

    def __init__(self, engine: Engine):
        self.engine = weakref.proxy(engine)  # weights must go as soon as nobody else has them
        self.requests, self.clock = engine.requests, engine.clock
        longest = one_two_five(1, engine.max_len)
        self.counts = dict.fromkeys(COUNTERS, 0)
        self.ends = dict.fromkeys(FINISH_REASONS, 0)
        self.histograms = {name: Histogram(bounds or longest) for name, (_, bounds) in HISTOGRAMS.items()}
        self.phases = {phase: Histogram(SHORT) for phase in PHASES}
        self.at = self.free = 0.0  # when the lap began, when the device was done
        self.came = 0.0  # the tokens before the next ones
        self.scheduling = 0.0
        self.flying: deque[tuple[StepPlan, float, int, int]] = deque()
        self.taken: tuple[StepPlan, float, int, int] | None = None
        self.step: Step | None = None  # of this turn
        self.open: dict[Request, bool] = {}  # whether its first token has come
        self.begun: dict[Sequence, int] = {}  # preemptions that are counted
        self.latest: set[Sequence] = set()  # those whose last token came with the last step that gave any
        self.earlier: dict[Sequence, float] = {}  # when that of the others came

    def begin(self) -> None:
        if self.taken is not None:  # the engine fell asleep with it
            self.take(*self.taken, self.open)
        self.step = None
        self.at = self.clock()
        self.look()

    def lap(self, name: str) -> None:
        now = self.clock()
        self.scheduling, self.at = now - self.at, now

    def launched(self, plan: StepPlan) -> None:
        now = self.clock()
        self.phases["schedule"].observe(self.scheduling)
        self.phases["launch"].observe(now - self.at)
        self.at = now
        counts = list(map(ROWS, plan.items))
        for item in filter(BEGINS, plan.items):
            self.begins(item.seq)
        self.flying.append((plan, now, sum(counts), counts.count(1)))

    def begins(self, seq: Sequence) -> None:
        """Where it gave way before, that is known for certain now."""
        counts, counted = self.counts, self.begun.get(seq)
        if counted is None and seq.shares_prefix and self.engine.tables[0].keeps_prefixes:
            counts["prefix_cache_queries_total"] += seq.num_prompt
            counts["prefix_cache_hits_total"] += seq.cache.num_cached
        counts["num_preemptions_total"] += seq.num_preemptions - (counted or 0)
        self.begun[seq] = seq.num_preemptions

    def collected(self) -> None:
        now = self.clock()
        self.phases["collect"].observe(now - self.at)
        self.at = now
        self.taken = self.flying.popleft()

    def end(self, requests: Iterable[Request], **counts: float) -> None:
        now = self.clock()
        if self.taken is not None:
            self.phases["update"].observe(now - self.at)
            self.take(*self.taken, requests)
        self.at = now
        self.look()

    def failed(self) -> None:
        self.flying.clear()

    def take(self, plan: StepPlan, launched: float, rows: int, decodes: int, requests: Iterable[Request]) -> None:
        """The tokens of a step have been given to their sequences."""
        now, came = self.at, self.came
        self.taken = None
        got = {  # a sequence that has ended may have done so before
            seq
            for seq, start, count, draws, _, _ in plan.items
            if draws and (seq.finish_reason is None or len(seq.tokens) > start + count)
        }
        self.counts["generation_tokens_total"] += len(got)
        gaps, new = [], 0
        if same := len(got & self.latest):
            gaps.append((now - came, same))
        if same < len(self.latest):
            self.earlier.update(dict.fromkeys(self.latest - got, came))
        if same < len(got):
            before = [self.earlier.pop(seq, None) for seq in got - self.latest]
            new = before.count(None)
            gaps += [(now - at, 1) for at in before if at is not None]
        self.latest = got
        for value, times in gaps:
            self.histograms["inter_token_latency_seconds"].observe(value, times)
        self.histograms["iteration_tokens_total"].observe(rows)
        firsts = []
        for request in requests if new else ():
            if request.first_token is not None and not self.open.get(request):
                firsts.append(self.first(request, request.first_token - request.arrival))
        self.step = Step(now, rows, decodes, len(plan.items), now - max(launched, self.free), gaps, firsts)
        self.came = self.free = now

    def first(self, request: Request, seconds: float) -> float:
        """A request got its first token."""
        self.open[request] = True
        self.reads(request.sequences[0])
        self.histograms["time_to_first_token_seconds"].observe(seconds)
        return seconds

    def reads(self, seq: Sequence) -> None:
        """A prompt has been read."""
        self.counts["prompt_tokens_total"] += seq.num_prompt
        self.counts["prompt_tokens_cached_total"] += seq.cache.num_cached

    def look(self) -> None:
        """Requests that came since the last look, and those that went; mostly there are none."""
        for request in reversed(self.requests.values()):  # the newest first
            if request in self.open:
                break
            self.open[request] = False
        if len(self.open) != len(self.requests):
            for request in self.open.keys() - set(self.requests.values()):
                del self.open[request]
                self.finish(request)

    def finish(self, request: Request) -> None:
        first, h = request.sequences[0], self.histograms
        for seq in request.sequences:
            self.latest.discard(seq)
            self.earlier.pop(seq, None)
            self.counts["num_preemptions_total"] += seq.num_preemptions - self.begun.pop(seq, 0)
        end = max((stream.finish_reason for stream in request.streams), key=FINISH_REASONS.index)
        self.ends[end] += 1
        by_token = request.last_token if end in ("stop", "length") else None
        h["e2e_request_latency_seconds"].observe((by_token or self.at) - request.arrival)
        h["request_prompt_tokens"].observe(first.num_prompt)
        if request.first_scheduled is not None:
            h["request_queue_time_seconds"].observe(request.first_scheduled - request.arrival)
        if first.pool is None:
            self.wrote(request)
        elif end == "stop":
            self.reads(first)

    def wrote(self, request: Request) -> None:
        """A request that asked for tokens has ended."""
        counts, h = [seq.num_output for seq in request.sequences], self.histograms
        h["request_generation_tokens"].observe(sum(counts))
        h["request_max_num_generation_tokens"].observe(max(counts))
        h["request_params_n"].observe(request.params.n)
        if request.params.max_tokens is not None:
            h["request_params_max_tokens"].observe(request.params.max_tokens)
        begun, first, last = request.first_scheduled, request.first_token, request.last_token
        if begun is not None and first is not None and last is not None:
            h["request_prefill_time_seconds"].observe(first - begun)
            h["request_decode_time_seconds"].observe(last - first)
            h["request_inference_time_seconds"].observe(last - begun)
            if max(counts) > 1:
                h["request_time_per_output_token_seconds"].observe((last - first) / (max(counts) - 1))

    def families(self) -> list[Family]:
        """Everything as it is now."""
        laps = {phase: histogram.read() for phase, histogram in self.phases.items()}
        return [
            *states(self.engine),
            *(Family(f"vllm:{name}", "counter", COUNTERS[name], [({}, n)]) for name, n in self.counts.items()),
            labelled("vllm:request_success_total", "counter", "Requests by their ends", "finished_reason", self.ends),
            *(
                Family(f"vllm:{name}", "histogram", HISTOGRAMS[name][0], [({}, histogram.read())])
                for name, histogram in self.histograms.items()
            ),
            labelled("quire:step_seconds", "histogram", "What the engine's thread did in a step", "phase", laps),
        ]

    def values(self) -> dict[str, Any]:
        """The same as plain values."""
        return {family.name: plain(family) for family in self.families()}


class Http:
    """What the server counts, in its event loop; labels are few: templates of routes, never what a client wrote."""

    MOST = 1000  # label sets

    def __init__(self):
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.delays = Histogram(one_two_five(0.001, 10))
        self.streams = 0

    def request(self, path: str, method: str, status: int) -> None:
        """A request to a route was answered."""
        key = (path, method, status)
        self.requests[key if key in self.requests or len(self.requests) < self.MOST else ("other", "other", 0)] += 1

    def beat(self, late: float) -> None:
        """A timer of the event loop was late by so many seconds."""
        self.delays.observe(max(0.0, late))

    def families(self) -> list[Family]:
        requests = [
            ({"path": path, "method": method, "status": str(status)}, count)
            for (path, method, status), count in sorted(self.requests.items())
        ]
        return [
            Family("quire:http_requests_total", "counter", "Requests that were answered", requests),
            Family("quire:event_loop_delay_seconds", "histogram", "How late a timer was", [({}, self.delays.read())]),
            Family("quire:streams_open", "gauge", "Answers that are being streamed", [({}, self.streams)]),
        ]


def render(models: Mapping[str, Metrics], http: Http | None = None) -> tuple[bytes, str]:
    """What Prometheus reads of these models and the server, and its content type."""
    from .prometheus import expose  # only who asks for it pays for its imports

    families = [({"model_name": name}, family) for name, metrics in models.items() for family in metrics.families()]
    return expose(families + [({}, family) for family in (http.families() if http else [])])
