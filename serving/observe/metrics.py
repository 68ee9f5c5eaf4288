"""Counts and distributions of the engine's work, with vLLM's names."""

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
from .histogram import Histogram, Rate, RecentDurations, one_two_five
from .metric_families import (
    COUNTERS,
    HISTOGRAMS,
    PHASES,
    SHORT,
    Family,
    labelled_family,
    states,
    to_plain_value,
)

IS_FIRST_STEP = itemgetter(ScheduledSequence._fields.index("is_first_step"))
SHARES = (0.5, 0.9, 0.99)


class Metrics(Observer):
    """Observes every step in the engine's thread; may be read in any thread.

    A request counts from the first step after its arrival, so a request that is aborted earlier
    leaves no trace. A request with several answers counts once, with the most severe finish reason.
    """

    def __init__(self, engine: Engine):
        # Weights must be freed when nothing else refers to them.
        self.engine = weakref.proxy(engine)
        self.requests = engine.requests
        longest = one_two_five(1, engine.max_len)
        self.counts = dict.fromkeys(COUNTERS, 0)
        self.ends = dict.fromkeys(FINISH_REASONS, 0)
        self.histograms = {
            name: Histogram(bounds or longest) for name, (_, bounds) in HISTOGRAMS.items()
        }
        self.phases = {phase: Histogram(SHORT) for phase in PHASES}
        self.collected = 0.0  # time of the previous results
        self.open: dict[Request, bool] = {}  # whether its first token has arrived
        self.begun: dict[Sequence, int] = {}  # preemptions already counted
        # Sequences with a token in the latest results that had any.
        self.latest: set[Sequence] = set()
        self.earlier: dict[Sequence, float] = {}  # time of the latest token of other sequences
        self.recent_firsts = RecentDurations()
        self.recent_gaps = RecentDurations()
        self.written = Rate()  # sampled tokens
        self.read = Rate()  # computed prompt tokens

    def observe(self, record: StepRecord) -> None:
        if (step := record.launched) is not None:
            self.phases["schedule"].observe(step.scheduled - step.began)
            self.phases["launch"].observe(step.launched - step.scheduled)
            for item in filter(IS_FIRST_STEP, step.plan.items):
                self.record_start(item.seq)
        before = self.tokens
        if (result := record.result) is not None:
            self.phases["collect"].observe(result.collected - result.began)
            self.phases["update"].observe(record.ended - result.collected)
            self.count_tokens(result, record.changed)
        self.count_requests(record)
        if result is not None:
            self.histograms["iteration_tokens_total"].observe(self.tokens - before)

    @property
    def tokens(self) -> int:
        """Of the prompts that are read and of the answers to them, so far."""
        return self.counts["prompt_tokens_total"] + self.counts["generation_tokens_total"]

    def record_start(self, seq: Sequence) -> None:
        """Count a start or restart; a preemption before it is certain now."""
        counts = self.counts
        counted = self.begun.get(seq)
        if counted is None and seq.shares_prefix and self.engine.tables[0].keeps_prefixes:
            counts["prefix_cache_queries_total"] += seq.num_prompt
            counts["prefix_cache_hits_total"] += seq.cache.num_cached
        counts["num_preemptions_total"] += seq.num_preemptions - (counted or 0)
        self.begun[seq] = seq.num_preemptions

    def count_tokens(self, result: StepResult, changed: Collection[Request]) -> None:
        """The tokens of a step have been given to their sequences."""
        now = result.collected
        came = self.collected
        written = 0
        latest = set()
        known = [item.num_tokens - len(item.draft_tokens) for item in result.plan.items]
        read = sum(count for count in known if count > 1)
        for output in result.outputs:
            item = output.item
            # A sequence that has ended may have done so before.
            if item.num_samples and (count := len(item.seq.tokens) - item.num_known) > 0:
                written += count
                latest.add(item.seq)
        self.counts["generation_tokens_total"] += written
        gaps = []
        new = 0
        if num_same := len(latest & self.latest):
            gaps.append((now - came, num_same))
        if num_same < len(self.latest):
            self.earlier.update(dict.fromkeys(self.latest - latest, came))
        if num_same < len(latest):
            previous_times = [self.earlier.pop(seq, None) for seq in latest - self.latest]
            new = previous_times.count(None)
            gaps += [(now - at, 1) for at in previous_times if at is not None]
        self.latest = latest
        self.collected = now
        for value, times in gaps:
            self.histograms["inter_token_latency_seconds"].observe(value, times)
            self.recent_gaps.observe(now, value, times)
        for request in changed if new else ():
            if request.first_token is not None and not self.open.get(request):
                self.record_first_token(request, request.first_token - request.arrival)
                self.recent_firsts.observe(now, request.first_token - request.arrival)
        self.written.add(result.device_began, now, written)
        self.read.add(result.device_began, now, read)

    def record_first_token(self, request: Request, seconds: float) -> None:
        """Record that a request got its first token."""
        self.open[request] = True
        self.count_prompt(request.sequences[0])
        self.histograms["time_to_first_token_seconds"].observe(seconds)

    def count_prompt(self, seq: Sequence) -> None:
        """Count a computed prompt."""
        self.counts["prompt_tokens_total"] += seq.num_prompt
        self.counts["prompt_tokens_cached_total"] += seq.cache.num_cached

    def count_requests(self, record: StepRecord) -> None:
        """Count requests that arrived since the last step, and those that ended; often none."""
        for request in reversed(self.requests.values()):  # newest first
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
        first = request.sequences[0]
        h = self.histograms
        for seq in request.sequences:
            self.latest.discard(seq)
            self.earlier.pop(seq, None)
            self.counts["num_preemptions_total"] += seq.num_preemptions - self.begun.pop(seq, 0)
        end = max(
            (completion.finish_reason for completion in request.completions),
            key=FINISH_REASONS.index,
        )
        self.ends[end] += 1
        by_token = request.last_token if end in ("stop", "length") else None
        h["e2e_request_latency_seconds"].observe((by_token or now) - request.arrival)
        h["request_prompt_tokens"].observe(first.num_prompt)
        if request.first_scheduled is not None:
            h["request_queue_time_seconds"].observe(request.first_scheduled - request.arrival)
        if first.pool is None:
            self.record_answer(request)
        elif end == "stop":
            self.count_prompt(first)

    def record_answer(self, request: Request) -> None:
        """Record the token counts and times of a generation request that ended."""
        counts = [seq.num_output for seq in request.sequences]
        h = self.histograms
        h["request_generation_tokens"].observe(sum(counts))
        h["request_max_num_generation_tokens"].observe(max(counts))
        h["request_params_n"].observe(request.params.n)
        if request.params.max_tokens is not None:
            h["request_params_max_tokens"].observe(request.params.max_tokens)
        begun = request.first_scheduled
        first = request.first_token
        last = request.last_token
        if begun is not None and first is not None and last is not None:
            h["request_prefill_time_seconds"].observe(first - begun)
            h["request_decode_time_seconds"].observe(last - first)
            h["request_inference_time_seconds"].observe(last - begun)
            if max(counts) > 1:
                h["request_time_per_output_token_seconds"].observe(
                    (last - first) / (max(counts) - 1)
                )

    def families(self) -> list[Family]:
        """Return all current metrics."""
        laps = {phase: histogram.read() for phase, histogram in self.phases.items()}
        return [
            *states(take_snapshot(self.engine)),
            *(
                Family(f"vllm:{name}", "counter", COUNTERS[name], [({}, n)])
                for name, n in self.counts.items()
            ),
            labelled_family(
                "vllm:request_success_total",
                "counter",
                "Requests by their ends",
                "finished_reason",
                self.ends,
            ),
            *(
                Family(f"vllm:{name}", "histogram", HISTOGRAMS[name][0], [({}, histogram.read())])
                for name, histogram in self.histograms.items()
            ),
            labelled_family(
                "quire:step_seconds",
                "histogram",
                "What the engine's thread did in a step",
                "phase",
                laps,
            ),
        ]

    def values(self) -> dict[str, Any]:
        """Return the same as plain values."""
        return {family.name: to_plain_value(family) for family in self.families()}

    def recent(self, now: float) -> dict[str, Any]:
        """Return totals, rates of the last second and latencies of the last minute, for the live
        page.
        """
        return {
            "totals": {
                "requests": sum(self.ends.values()),
                "prompt_tokens": self.counts["prompt_tokens_total"],
                "generation_tokens": self.counts["generation_tokens_total"],
                "cached_tokens": self.counts["prompt_tokens_cached_total"],
                "preemptions": self.counts["num_preemptions_total"],
                "recompiles": take_snapshot(self.engine).recompiles,
            },
            "rates": {
                "generation": self.written.last_second(now),
                "prompt": self.read.last_second(now),
            },
            "latency": {
                "ttft": milliseconds(self.recent_firsts, now),
                "itl": milliseconds(self.recent_gaps, now),
            },
        }


class HttpMetrics:
    """Counts of the server, in its event loop. Labels never come from clients' input."""

    MAX_LABEL_SETS = 1000  # label sets

    def __init__(self):
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.delays = Histogram(one_two_five(0.001, 10))
        self.streams = 0

    def request(self, path: str, method: str, status: int) -> None:
        """Count an answered request."""
        key = (path, method, status)
        has_room = len(self.requests) < self.MAX_LABEL_SETS
        self.requests[key if key in self.requests or has_room else ("other", "other", 0)] += 1

    def observe_delay(self, seconds: float) -> None:
        """Record by how many seconds a timer of the event loop was late."""
        self.delays.observe(max(0.0, seconds))

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
            Family(
                "http_requests_total", "counter", "The same as vLLM's dashboards read them", as_vllm
            ),
            Family(
                "quire:event_loop_delay_seconds",
                "histogram",
                "How late a timer was",
                [({}, self.delays.read())],
            ),
            Family(
                "quire:streams_open",
                "gauge",
                "Answers that are being streamed",
                [({}, self.streams)],
            ),
        ]


def milliseconds(recent: RecentDurations, now: float) -> list[float] | None:
    quantiles = recent.quantiles(now, SHARES)
    return None if quantiles is None else [round(value * 1e3, 3) for value in quantiles]


def render(models: Mapping[str, Metrics], http: HttpMetrics | None = None) -> tuple[bytes, str]:
    """Return the Prometheus text of these models and the server, and its content type."""
    from .prometheus import expose  # imported on first use, because it is slow to import

    families = [
        ({"model_name": name}, family)
        for name, metrics in models.items()
        for family in metrics.families()
    ]
    return expose(families + [({}, family) for family in (http.families() if http else [])])
