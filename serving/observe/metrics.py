"""What the engine has done, in numbers: counts and distributions under the names that vLLM's users know."""

import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from operator import itemgetter
from typing import Any

from ..api.outputs import FINISH_REASONS
from ..engine.engine import Engine
from ..engine.scheduler import ScheduledSequence
from ..engine.snapshot import take_snapshot
from ..engine.step_record import Observer, StepRecord
from ..engine.step_result import StepResult
from ..request.request import Request
from ..request.sequence import Sequence
from .histogram import Histogram, Rate, Recent, one_two_five
from .metric_families import COUNTERS, HISTOGRAMS, PHASES, SHORT, Family, labelled, plain, states

BEGINS = itemgetter(ScheduledSequence._fields.index("begins"))
SHARES = (0.5, 0.9, 0.99)


class Metrics(Observer):
    """Hears of every step in the engine's thread, and may be read in any.

    A request counts from the first step after it came, so that one which is aborted before that leaves no mark. One
    with several answers counts once, and its finish reason is the gravest of theirs.
    """

    def __init__(self, engine: Engine):
        self.engine = weakref.proxy(engine)  # weights must go as soon as nobody else has them
        self.requests = engine.requests
        longest = one_two_five(1, engine.max_len)
        self.counts = dict.fromkeys(COUNTERS, 0)
        self.ends = dict.fromkeys(FINISH_REASONS, 0)
        self.histograms = {name: Histogram(bounds or longest) for name, (_, bounds) in HISTOGRAMS.items()}
        self.phases = {phase: Histogram(SHORT) for phase in PHASES}
        self.collected = 0.0  # when the tokens before the next ones came
        self.open: dict[Request, bool] = {}  # whether its first token has come
        self.begun: dict[Sequence, int] = {}  # preemptions that are counted
        self.latest: set[Sequence] = set()  # those whose last token came with the last step that gave any
        self.earlier: dict[Sequence, float] = {}  # when that of the others came
        self.recent_firsts, self.recent_gaps = Recent(), Recent()
        self.written, self.read = Rate(), Rate()  # tokens drawn, and tokens of prompts computed

    def observe(self, record: StepRecord) -> None:
        if (step := record.launched) is not None:
            self.phases["schedule"].observe(step.scheduled - step.began)
            self.phases["launch"].observe(step.launched - step.scheduled)
            for item in filter(BEGINS, step.plan.items):
                self.begins(item.seq)
        before = self.tokens
        if (result := record.result) is not None:
            self.phases["collect"].observe(result.collected - result.began)
            self.phases["update"].observe(record.ended - result.collected)
            self.count_tokens(result, record.changed)
        self.look(record)
        if result is not None:
            self.histograms["iteration_tokens_total"].observe(self.tokens - before)

    @property
    def tokens(self) -> int:
        """Of the prompts that are read and of the answers to them, so far."""
        return self.counts["prompt_tokens_total"] + self.counts["generation_tokens_total"]

    def begins(self, seq: Sequence) -> None:
        """It computes from its beginning; if it was preempted before, that is known for certain now."""
        counts, counted = self.counts, self.begun.get(seq)
        if counted is None and seq.shares_prefix and self.engine.tables[0].keeps_prefixes:
            counts["prefix_cache_queries_total"] += seq.num_prompt
            counts["prefix_cache_hits_total"] += seq.cache.num_cached
        counts["num_preemptions_total"] += seq.num_preemptions - (counted or 0)
        self.begun[seq] = seq.num_preemptions

    def count_tokens(self, result: StepResult, changed: Collection[Request]) -> None:
        """The tokens of a step have been given to their sequences."""
        now, came = result.collected, self.collected
        written, got = 0, set()
        known = [item.num_rows - len(item.drafts) for item in result.plan.items]
        read = sum(count for count in known if count > 1)
        for output in result.outputs:
            item = output.item
            # A sequence that has ended may have done so before.
            if item.draws and (count := len(item.seq.tokens) - item.num_known) > 0:
                written += count
                got.add(item.seq)
        self.counts["generation_tokens_total"] += written
        gaps, new = [], 0
        if same := len(got & self.latest):
            gaps.append((now - came, same))
        if same < len(self.latest):
            self.earlier.update(dict.fromkeys(self.latest - got, came))
        if same < len(got):
            before = [self.earlier.pop(seq, None) for seq in got - self.latest]
            new = before.count(None)
            gaps += [(now - at, 1) for at in before if at is not None]
        self.latest, self.collected = got, now
        for value, times in gaps:
            self.histograms["inter_token_latency_seconds"].observe(value, times)
            self.recent_gaps.observe(now, value, times)
        for request in changed if new else ():
            if request.first_token is not None and not self.open.get(request):
                self.first(request, request.first_token - request.arrival)
                self.recent_firsts.observe(now, request.first_token - request.arrival)
        self.written.add(result.device_began, now, written)
        self.read.add(result.device_began, now, read)

    def first(self, request: Request, seconds: float) -> None:
        """A request got its first token."""
        self.open[request] = True
        self.reads(request.sequences[0])
        self.histograms["time_to_first_token_seconds"].observe(seconds)

    def reads(self, seq: Sequence) -> None:
        """A prompt has been read."""
        self.counts["prompt_tokens_total"] += seq.num_prompt
        self.counts["prompt_tokens_cached_total"] += seq.cache.num_cached

    def look(self, record: StepRecord) -> None:
        """Count requests that came since the last step, and those that ended; mostly there are none."""
        for request in reversed(self.requests.values()):  # the newest first
            if request in self.open:
                break
            self.open[request] = False
        for request in [request for request in record.changed if request.finished]:
            self.open.pop(request, None)
            self.finish(request, record.ended)
        if len(self.open) != len(self.requests):  # aborted between two steps
            for request in self.open.keys() - set(self.requests.values()):
                del self.open[request]
                self.finish(request, record.began)

    def finish(self, request: Request, now: float) -> None:
        first, h = request.sequences[0], self.histograms
        for seq in request.sequences:
            self.latest.discard(seq)
            self.earlier.pop(seq, None)
            self.counts["num_preemptions_total"] += seq.num_preemptions - self.begun.pop(seq, 0)
        end = max((completion.finish_reason for completion in request.completions), key=FINISH_REASONS.index)
        self.ends[end] += 1
        by_token = request.last_token if end in ("stop", "length") else None
        h["e2e_request_latency_seconds"].observe((by_token or now) - request.arrival)
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
            *states(take_snapshot(self.engine)),
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

    def recent(self, now: float) -> dict[str, Any]:
        """Totals, the tokens of the last second and the latencies of the last minute, as the live page shows them."""
        return {
            "totals": {
                "requests": sum(self.ends.values()),
                "prompt_tokens": self.counts["prompt_tokens_total"],
                "generation_tokens": self.counts["generation_tokens_total"],
                "cached_tokens": self.counts["prompt_tokens_cached_total"],
                "preemptions": self.counts["num_preemptions_total"],
                "recompiles": take_snapshot(self.engine).recompiles,
            },
            "rates": {"generation": self.written.last_second(now), "prompt": self.read.last_second(now)},
            "latency": {"ttft": milliseconds(self.recent_firsts, now), "itl": milliseconds(self.recent_gaps, now)},
        }


class HttpMetrics:
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
        classes: Counter[tuple[str, str, str]] = Counter()
        for (path, method, status), count in self.requests.items():
            classes[path, method, f"{str(status)[0]}xx"] += count
        as_vllm = [
            ({"handler": path, "method": method, "status": status}, count)
            for (path, method, status), count in sorted(classes.items())
        ]
        return [
            Family("quire:http_requests_total", "counter", "Requests that were answered", requests),
            Family("http_requests_total", "counter", "The same as vLLM's dashboards read them", as_vllm),
            Family("quire:event_loop_delay_seconds", "histogram", "How late a timer was", [({}, self.delays.read())]),
            Family("quire:streams_open", "gauge", "Answers that are being streamed", [({}, self.streams)]),
        ]


def milliseconds(recent: Recent, now: float) -> list[float] | None:
    found = recent.quantiles(now, SHARES)
    return None if found is None else [round(value * 1e3, 3) for value in found]


def render(models: Mapping[str, Metrics], http: HttpMetrics | None = None) -> tuple[bytes, str]:
    """What Prometheus reads of these models and the server, and its content type."""
    from .prometheus import expose  # only who asks for it pays for its imports

    families = [({"model_name": name}, family) for name, metrics in models.items() for family in metrics.families()]
    return expose(families + [({}, family) for family in (http.families() if http else [])])
