"""Metrics against a count of one's own, over random runs of an engine whose device is not there."""

import gc
import json
import math
import random
import re
import threading
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from quire.scripts.bench.host import pretended_engine
from quire.serving.api.errors import RequestError
from quire.serving.api.outputs import FINISH_REASONS
from quire.serving.api.params import SamplingParams, Terms
from quire.serving.cache.page_table import PageTable
from quire.serving.engine.engine import Engine
from quire.serving.engine.step_record import Observer
from quire.serving.llm import LLM
from quire.serving.observe.histogram import Histogram, Rate, RecentDurations, one_two_five
from quire.serving.observe.live_view import LiveView
from quire.serving.observe.metrics import HttpMetrics, Metrics, render
from quire.serving.observe.trace import Trace
from quire.serving.request.pooling import PARAMS
from quire.serving.speculative.config import parse_speculative_config
from quire.tests.support.cases import cases
from quire.tests.support.tiny import write

BOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"
LATENCY = [
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
]
TOKEN = [
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
]
DRAFTS = 3  # of a sequence, where the engine drafts
LENGTH = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]  # of a model of 1024 positions
PUBLISHED = {  # vLLM's bounds
    "vllm:time_to_first_token_seconds": [
        *(
            0.001,
            0.005,
            0.01,
            0.02,
            0.04,
            0.06,
            0.08,
            0.1,
            0.25,
            0.5,
            0.75,
            1,
            2.5,
            5,
            7.5,
            10,
            20,
            40,
            80,
            160,
        ),
        *(640, 2560),
    ],
    "vllm:inter_token_latency_seconds": TOKEN,
    "vllm:request_time_per_output_token_seconds": TOKEN,
    "vllm:e2e_request_latency_seconds": LATENCY,
    "vllm:request_queue_time_seconds": LATENCY,
    "vllm:request_prefill_time_seconds": LATENCY,
    "vllm:request_decode_time_seconds": LATENCY,
    "vllm:request_inference_time_seconds": LATENCY,
    "vllm:request_prompt_tokens": LENGTH,
    "vllm:request_generation_tokens": LENGTH,
    "vllm:request_max_num_generation_tokens": LENGTH,
    "vllm:request_params_max_tokens": LENGTH,
    "vllm:request_params_n": [1, 2, 5, 10, 20],
    "vllm:iteration_tokens_total": [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384],
}
VLLM_BOARD = """
histogram_quantile(0.99, sum by(le) (rate(vllm:e2e_request_latency_seconds_bucket{model_name="$model_name"}[5m])))
rate(vllm:e2e_request_latency_seconds_sum[5m]) / rate(vllm:e2e_request_latency_seconds_count[5m])
rate(vllm:prompt_tokens_total{model_name="$model_name"}[5m])
rate(vllm:generation_tokens_total{model_name="$model_name"}[5m])
histogram_quantile(0.99, sum by(le) (rate(vllm:inter_token_latency_seconds_bucket{model_name="$model_name"}[5m])))
rate(vllm:inter_token_latency_seconds_sum[5m]) / rate(vllm:inter_token_latency_seconds_count[5m])
vllm:num_requests_running{model_name="$model_name"}
vllm:num_requests_waiting{model_name="$model_name"}
histogram_quantile(0.99, sum by(le) (rate(vllm:time_to_first_token_seconds_bucket{model_name="$model_name"}[5m])))
rate(vllm:time_to_first_token_seconds_sum[5m]) / rate(vllm:time_to_first_token_seconds_count[5m])
vllm:kv_cache_usage_perc{model_name="$model_name"}
sum by(le) (increase(vllm:request_prompt_tokens_bucket{model_name="$model_name"}[5m]))
sum by(le) (increase(vllm:request_generation_tokens_bucket{model_name="$model_name"}[5m]))
sum by(finished_reason) (increase(vllm:request_success_total{model_name="$model_name"}[5m]))
rate(vllm:request_queue_time_seconds_sum{model_name="$model_name"}[5m])
rate(vllm:request_prefill_time_seconds_sum{model_name="$model_name"}[5m])
rate(vllm:request_decode_time_seconds_sum{model_name="$model_name"}[5m])
rate(vllm:request_max_num_generation_tokens_sum{model_name="$model_name"}[5m])
sum(vllm:num_requests_waiting_by_reason{model_name=~"$model_name", reason="capacity"})
sum(rate(vllm:prompt_tokens_cached_total{model_name=~"$model_name"}[5m]))
sum(rate(vllm:prefix_cache_hits_total{model_name=~"$model_name"}[5m]))
sum(rate(vllm:prefix_cache_queries_total{model_name=~"$model_name"}[5m]))
sum(rate(vllm:num_preemptions_total{model_name=~"$model_name"}[5m]))
"""  # what the panels of vLLM's own boards ask for


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def lent() -> Engine:
    """Lends its runner, which takes long to make, and its tokenizer."""
    return lender()


@pytest.fixture(scope="module")
def lent_with_drafts() -> Engine:
    """Steps draw one of two tokens by chance, and drafts are two tokens by chance: some are
    accepted.
    """
    engine = lender(DRAFTS)
    tokens = [engine.tokenizer.encode(text, add_special_tokens=False)[0] for text in (" the", " a")]
    for compiled in engine.runner.compiled.values():
        compiled.tokens = tokens
    return engine


def lender(max_drafts: int = 0) -> Engine:
    engine = pretended_engine(4, 512, 64, max_drafts)
    engine.runner.compiled = {
        size: Told(compiled) for size, compiled in engine.runner.compiled.items()
    }
    engine.runner.weights = jnp.zeros(1)
    engine.runner.load_weights = lambda: jnp.zeros(1)
    return engine


class Told:
    """A compiled step that breaks the rows of which `chance` says so."""

    def __init__(self, compiled):
        self.compiled = compiled
        self.chance = lambda: True
        self.tokens = None
        self.rng = np.random.default_rng(0)

    def __call__(self, weights, state, buffer):
        sampled, _, state = self.compiled(weights, state, buffer)
        ok_R = np.array([self.chance() for _ in sampled.tokens_R])
        tokens_R = (
            sampled.tokens_R if self.tokens is None else self.rng.choice(self.tokens, len(ok_R))
        )
        return (
            sampled.replace(tokens_R=np.where(ok_R, tokens_R, -1)),
            np.zeros((len(ok_R), 4)),
            state,
        )


class Guesses:
    """Drafts as many of some tokens as chance says."""

    def __init__(self, rng: random.Random, tokens: list[int]):
        self.rng = rng
        self.tokens = tokens

    def propose(self, seq, most):
        return self.rng.choices(self.tokens, k=self.rng.randint(0, most))

    def end(self, seq):
        pass


def make(lent: Engine, pages: int = 200, clock=None, caching: bool = True) -> Engine:
    """A fresh engine around the runner, with little room."""
    runner, groups = lent.runner, len(lent.runner.config.windows)
    runner.reset()
    for compiled in runner.compiled.values():
        compiled.chance = lambda: True
    runner.num_pages = (2,) * groups
    table = PageTable((pages,) * groups, 16, runner.config.windows, caching)
    drafts = runner.shape.max_drafts
    chosen = drafts and {"method": "ngram", "num_speculative_tokens": drafts, "adapts": False}
    speculation = parse_speculative_config(chosen or None)
    engine = Engine(
        runner,
        lent.tokenizer,
        [table],
        lent.max_len,
        clock=clock or Clock(),
        speculation=speculation,
    )
    if engine.speculator is not None:
        engine.speculator.host_drafter = Guesses(
            random.Random(0), next(iter(runner.compiled.values())).tokens
        )
    return engine


def watched(engine: Engine) -> Metrics:
    engine.observers.append(metrics := Metrics(engine))
    return metrics


class Count:
    """Keeps its own books: it sees requests as a user does, and the plans that are carried out."""

    def __init__(self, engine: Engine, clock: Clock, rng: random.Random):
        self.engine = engine
        self.clock = clock
        self.rng = rng
        self.seen: dict = {}  # request: tokens of each sequence so far
        self.last: dict = {}  # sequence: when its last token came
        self.values: dict[str, list[float]] = {name: [] for name in PUBLISHED}
        self.planned: set = set()
        self.verified: list = []  # what a step verifies: sequence, its tokens before, drafts
        self.places = Counter()  # of the drafts that were right
        self.counts, self.ends, self.laps = Counter(), Counter(), Counter()
        launch = engine.runner.__class__.launch
        collect = engine.runner.__class__.collect
        self.trouble = None

        def launching(plan, moves):
            clock.now += 0.25
            if self.trouble == "launch":
                raise RuntimeError("the device is gone")
            launched = launch(engine.runner, plan, moves)
            self.planned |= {item.seq for item in plan.items}
            self.laps["launch"] += 1
            return launched

        def collecting(launched):
            clock.now += 0.5
            if self.trouble == "collect":
                raise RuntimeError("the device is gone")
            drawn = collect(engine.runner, launched)
            items = [item for item in launched.plan.items if item.draft_tokens]
            self.verified = [(item.seq, len(item.seq.tokens), item.draft_tokens) for item in items]
            self.laps["collect"] += 1
            return drawn

        engine.runner.launch, engine.runner.collect = launching, collecting

    def close(self) -> None:
        del self.engine.runner.launch, self.engine.runner.collect

    def step(self, act) -> None:
        """Something that the engine does, and what came of it."""
        for request in self.engine.requests.values():
            self.seen.setdefault(request, [0] * len(request.sequences))
        self.ended(self.clock.now)
        before = self.laps["collect"]
        tokens = self.counts["prompt"] + self.counts["generation"]
        self.verified = []
        act()
        self.drafts()
        at = self.clock.now if self.laps["collect"] > before else None
        self.laps["update"] += self.laps["collect"] - before
        for request, counts in self.seen.items():
            self.tokens(request, counts, at)
        self.ended(self.clock.now)
        if at is not None:
            brought = self.counts["prompt"] + self.counts["generation"] - tokens
            self.values["vllm:iteration_tokens_total"].append(brought)

    def drafts(self) -> None:
        """Drafts that are what came, up to the first that is not or to the end of the answer."""
        for seq, known, drafts in self.verified:
            if came := seq.tokens[known:]:
                self.counts["drafts"] += 1
                self.counts["draft tokens"] += len(drafts)
                same = [draft == token for draft, token in zip(drafts, came, strict=False)]
                right = (same + [False]).index(False)
                assert right >= len(came) - 1 or seq.finish_reason == "error"
                self.counts["accepted"] += right
                self.places.update(range(right))

    def tokens(self, request, counts, at) -> None:
        if not any(counts) and any(seq.num_output for seq in request.sequences):
            self.values["vllm:time_to_first_token_seconds"].append(at - request.arrival)
            self.counts["prompt"] += request.sequences[0].num_prompt
            self.counts["cached"] += request.sequences[0].cache.num_cached
        for index, seq in enumerate(request.sequences):
            if seq.num_output > counts[index]:
                came = seq.num_output - counts[index]
                assert came == 1 or self.engine.speculator is not None
                if seq in self.last:
                    self.values["vllm:inter_token_latency_seconds"].append(at - self.last[seq])
                self.last[seq] = at
                counts[index] += came
                self.counts["generation"] += came

    def ended(self, at: float) -> None:
        for request in [request for request in self.seen if request.finished]:
            del self.seen[request]
            output = request.output()
            params = request.params
            values = self.values
            lengths = [seq.num_output for seq in request.sequences]
            reasons = [completion.finish_reason for completion in request.completions]
            order = ["error", "timeout", "abort", "length", "stop"]
            self.ends[next(reason for reason in order if reason in reasons)] += 1
            self.counts["preemptions"] += output.metrics.num_preemptions
            self.counts["told draft tokens"] += output.metrics.num_draft_tokens
            self.counts["told accepted"] += output.metrics.num_accepted_tokens
            values["vllm:request_prompt_tokens"].append(len(output.prompt_token_ids))
            by_token = (
                request.last_token
                if reasons[0] in ("stop", "length") and len(set(reasons)) == 1
                else None
            )
            values["vllm:e2e_request_latency_seconds"].append((by_token or at) - request.arrival)
            if (scheduled := output.metrics.first_scheduled_time) is not None:
                values["vllm:request_queue_time_seconds"].append(scheduled - request.arrival)
            if request.sequences[0].pool is not None:
                if reasons == ["stop"]:
                    self.counts["prompt"] += request.sequences[0].num_prompt
                    self.counts["cached"] += request.sequences[0].cache.num_cached
                continue
            values["vllm:request_generation_tokens"].append(sum(lengths))
            values["vllm:request_max_num_generation_tokens"].append(max(lengths))
            values["vllm:request_params_n"].append(params.n)
            if params.max_tokens is not None:
                values["vllm:request_params_max_tokens"].append(params.max_tokens)
            if sum(lengths):
                first = output.metrics.first_token_time
                last = output.metrics.last_token_time
                values["vllm:request_prefill_time_seconds"].append(first - scheduled)
                values["vllm:request_decode_time_seconds"].append(last - first)
                values["vllm:request_inference_time_seconds"].append(last - scheduled)
                if max(lengths) > 1:
                    mean = (last - first) / (max(lengths) - 1)
                    values["vllm:request_time_per_output_token_seconds"].append(mean)

    def expected(self) -> dict:
        """Every sample of counters and histograms, but for phases and recompiles."""
        looked_for = [
            seq
            for seq in self.planned
            if seq.shares_prefix and self.engine.tables[0].keeps_prefixes
        ]
        found = {
            "vllm:prompt_tokens_total": self.counts["prompt"],
            "vllm:prompt_tokens_cached_total": self.counts["cached"],
            "vllm:generation_tokens_total": self.counts["generation"],
            "vllm:num_preemptions_total": self.counts["preemptions"],
            "vllm:prefix_cache_queries_total": sum(seq.num_prompt for seq in looked_for),
            "vllm:prefix_cache_hits_total": sum(seq.cache.num_cached for seq in looked_for),
        }
        if self.engine.speculator is not None:
            found["vllm:spec_decode_num_drafts_total"] = self.counts["drafts"]
            found["vllm:spec_decode_num_draft_tokens_total"] = self.counts["draft tokens"]
            found["vllm:spec_decode_num_accepted_tokens_total"] = self.counts["accepted"]
            for place in range(DRAFTS):
                found["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(place)] = (
                    self.places[place]
                )
            assert self.counts["accepted"] == self.counts["told accepted"]
            assert self.counts["draft tokens"] == self.counts["told draft tokens"]
        for reason in ("stop", "length", "abort", "timeout", "error"):
            found["vllm:request_success_total", reason] = self.ends[reason]
        for name, bounds in PUBLISHED.items():
            for bound in [*bounds, math.inf]:
                found[name + "_bucket", bound] = sum(value <= bound for value in self.values[name])
            found[name + "_count"] = len(self.values[name])
            found[name + "_sum"] = pytest.approx(sum(self.values[name]))
        for phase, seconds in (("launch", 0.25), ("collect", 0.5), ("schedule", 0), ("update", 0)):
            count = self.laps["launch" if phase == "schedule" else phase]
            found["quire:step_seconds_count", phase] = count
            found["quire:step_seconds_sum", phase] = pytest.approx(count * seconds)
        return found


def parsed(text: bytes, model: str | None = "m") -> dict:
    """Samples by name and the value of the one label that they have beside the model's name; `le`
    as a number.
    """
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        assert family.documentation
        for name, labels, value, *_ in family.samples:
            labels = dict(labels)
            if family.name.startswith(
                ("quire:http", "http_requests", "quire:event", "quire:streams")
            ):
                assert "model_name" not in labels
            elif labels.pop("model_name") != model:
                continue
            le = float(labels.pop("le")) if "le" in labels else None
            key = (name, *labels.values(), *([] if le is None else [le]))
            assert key not in found
            found[key if len(key) > 1 else name] = value
    return found


def compare(metrics: Metrics, count: Count) -> None:
    found = parsed(render({"m": metrics})[0])
    for key, value in count.expected().items():
        assert found.pop(key) == value, key
    rest = {key if isinstance(key, str) else key[0] for key in found}
    assert rest == {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_requests_waiting_by_reason",
        "vllm:kv_cache_usage_perc",
        "vllm:engine_sleep_state",
        "vllm:cache_config_info",
        "quire:batch_invariant",
        "quire:recompiles_total",
        "quire:pages",
        "quire:step_seconds_bucket",
    }


def check_state(metrics: Metrics, engine: Engine) -> None:
    """What an engine is like now, against its own proofs."""
    found = parsed(render({"m": metrics})[0])
    engine.scheduler.check()
    assert found["vllm:num_requests_running"] == len(engine.scheduler.running)
    assert found["vllm:num_requests_waiting"] == len(list(engine.scheduler.waiting))
    used = [
        {
            page
            for seq in engine.scheduler.running
            if seq.cache.pages
            for page in seq.cache.pages[index]
        }
        - {0}
        for index in range(len(engine.tables[0].pools))
    ]
    pages = engine.tables[0].pools[0].num_pages - 1
    assert found["quire:pages", "running"] == sum(map(len, used))
    assert found["quire:pages", "cached"] == sum(
        len(group.cached) for group in engine.tables[0].pools
    )
    assert sum(
        found["quire:pages", state] for state in ("free", "running", "cached")
    ) == pages * len(used)
    assert found["vllm:kv_cache_usage_perc"] == pytest.approx(max(map(len, used)) / pages)


def random_request(rng: random.Random, token: int) -> tuple[list[int], SamplingParams, Terms, dict]:
    start = [rng.choice((5, 6)) for _ in range(rng.choice((0, 16, 16, 40, 90)))]
    prompt = (start if rng.random() < 0.5 else [5] * len(start)) + [
        rng.randrange(3, 400) for _ in range(rng.randrange(1, 60))
    ]
    n = rng.choice((1, 1, 1, 2, 3))
    params = SamplingParams(
        temperature=0,
        n=n,
        best_of=n + 1 if rng.random() < 0.1 else None,
        max_tokens=rng.choice((None, 1, 1, 2, 5, 20, 60)) if rng.random() < 0.9 else 400,
        ignore_eos=True,
        stop_token_ids=[token] if rng.random() < 0.2 else [],
        prompt_logprobs=1 if rng.random() < 0.1 else None,
        bad_words=["a long word or two"] if rng.random() < 0.1 else [],
    )
    if params.max_tokens is None:
        params = replace(params, max_tokens=None if rng.random() < 0.3 else 7)
    terms = Terms(
        timeout=rng.choice((0.6, 3, 20)) if rng.random() < 0.2 else None,
        cache_salt=rng.choice((None, "x")),
    )
    if rng.random() < 0.1:
        return prompt, PARAMS, terms, {"pooling": rng.choice(("last", "mean"))}
    return prompt, params, terms, {}


def mixed(lent: Engine, seed: int) -> Metrics:
    """Arrivals, aborts, timeouts, failed steps, broken rows, preemptions, prefix hits, several
    answers, sleep.
    """
    rng = random.Random(seed)
    clock = Clock()
    engine = make(lent, rng.choice((36, 60, 200)), clock, rng.random() < 0.8)
    token = lent.tokenizer.encode(" the", add_special_tokens=False)[0]
    trouble = rng.choice((0, 0, 0.03))
    broken = rng.choice((0, 0, 0.01))
    for compiled in engine.runner.compiled.values():
        compiled.chance = lambda: rng.random() >= broken
    metrics = watched(engine)
    count = Count(engine, clock, rng)
    try:
        for index in range(rng.randrange(1, 120)):
            while rng.random() < 0.3:
                prompt, params, terms, more = random_request(rng, token)
                try:
                    request = engine.add(
                        f"{index}-{rng.random()}", prompt, params, None, terms, **more
                    )
                except RequestError:  # it needs more pages than there are
                    continue
                if rng.random() < 0.05:
                    engine.abort(request.request_id)  # no step ever sees it
            if engine.requests and rng.random() < 0.1:
                engine.abort(rng.choice(list(engine.requests)))
            if rng.random() < 0.03:
                count.trouble = None
                count.step(lambda: engine.sleep(rng.choice((1, 2)), rng.random() < 0.5))
                check_state(metrics, engine)
                engine.lifecycle.wake_up()
            else:
                clock.now += rng.choice((0, 0.001, 0.1, 3))
            count.trouble = rng.choice(("launch", "collect")) if rng.random() < trouble else None
            count.step(engine.step)
            if rng.random() < 0.1:
                check_state(metrics, engine)
        count.trouble = None
        for _ in range(5000):
            count.step(engine.step)
            if not engine.busy and not metrics.open:
                break
        assert not engine.requests
        compare(metrics, count)
        check_state(metrics, engine)
        assert not (metrics.begun or metrics.latest or metrics.earlier), (
            "what is over is remembered"
        )
        return metrics
    finally:
        count.close()


@settings(max_examples=cases(30))
@given(seed=st.integers(0, 2**32))
def test_every_number_is_what_another_count_says(lent, seed):
    mixed(lent, seed)


@settings(max_examples=cases(30))
@given(seed=st.integers(0, 2**32))
def test_every_number_where_several_tokens_come_in_a_step(lent_with_drafts, seed):
    mixed(lent_with_drafts, seed)


def test_a_step_with_drafts_gives_one_gap_and_counts_what_it_gave(lent_with_drafts, tmp_path):
    """Metrics, answers, rates and the trace tell the same."""
    clock = Clock()
    engine = make(lent_with_drafts, clock=clock)
    metrics = watched(engine)
    trace = Trace(tmp_path / "trace.json")
    engine.observers.append(trace)
    requests = [
        engine.add(str(index), [5] * 20, SamplingParams(max_tokens=40, ignore_eos=True))
        for index in range(3)
    ]
    gaps = gaining = 0
    drafted: list[list[int]] = [[], [], []]  # places of tokens, as a stream tells them
    while engine.busy:
        before = [request.sequences[0].num_output for request in requests]
        clock.now += 0.01
        engine.step()
        came = [
            request.sequences[0].num_output - old
            for request, old in zip(requests, before, strict=True)
        ]
        gaps += sum(count > 0 and old > 0 for count, old in zip(came, before, strict=True))
        gaining += sum(count > 1 for count in came)
        for own, request, old in zip(drafted, requests, before, strict=True):
            own += [old + place for part in request.take().completions for place in part.drafted]
    trace.close()
    assert gaining > 10
    values = metrics.values()
    told = [request.output().metrics for request in requests]
    assert values["vllm:inter_token_latency_seconds"]["count"] == gaps
    assert values["vllm:generation_tokens_total"] == metrics.written.total == 3 * 40
    assert (
        values["vllm:iteration_tokens_total"]["sum"] == 3 * 40 + values["vllm:prompt_tokens_total"]
    )
    accepted = sum(one.num_accepted_tokens for one in told)
    assert values["vllm:spec_decode_num_accepted_tokens_total"] == accepted == 3 * 39 - gaps
    assert sum(values["vllm:spec_decode_num_accepted_tokens_per_pos_total"].values()) == accepted
    assert drafted == [request.sequences[0].draft.accepted_positions for request in requests]
    assert sum(map(len, drafted)) == accepted
    drafts = sum(one.num_draft_tokens for one in told)
    assert values["vllm:spec_decode_num_draft_tokens_total"] == drafts > accepted
    steps = [
        event["args"]
        for event in json.loads((tmp_path / "trace.json").read_text())
        if "rows" in str(event)
    ]
    assert sum(step.get("drafts", 0) for step in steps) == drafts
    assert sum(step.get("accepted", 0) for step in steps) == accepted


@pytest.mark.slow
def test_the_random_runs_reach_the_rare_states(lent):
    """Otherwise the test above would prove little."""
    total = Counter()
    for seed in range(25):
        metrics = mixed(lent, seed)
        total.update(
            {name: int(count > 0) for name, count in (metrics.counts | metrics.ends).items()}
        )
    assert len(total) == 11 and min(total.values()) >= 3, total


def test_phases_are_what_the_thread_did(lent, monkeypatch):
    """Each part takes a time of its own, and turns without a step count nowhere."""
    clock = Clock()
    engine = make(lent, clock=clock)
    metrics = watched(engine)

    def slow(owner, name, seconds):
        original = getattr(owner, name)

        def act(*given):
            found = original(*given)
            clock.now += seconds
            return found

        monkeypatch.setattr(owner, name, act)

    slow(engine.scheduler, "schedule", 0.015625)
    slow(engine.runner, "launch", 0.25)
    slow(engine.runner, "collect", 2.0)
    slow(engine.results, "process", 16.0)
    engine.add("a", [5] * 20, SamplingParams(max_tokens=5, ignore_eos=True))
    while engine.busy:
        engine.step()
    for _ in range(3):
        engine.step()
    phases = metrics.values()["quire:step_seconds"]
    steps = phases["launch"]["count"]
    assert steps == 5
    for phase, seconds in {
        "schedule": 0.015625,
        "launch": 0.25,
        "collect": 2.0,
        "update": 16.0,
    }.items():
        assert phases[phase]["count"] == steps
        assert phases[phase]["sum"] == steps * seconds
        assert phases[phase]["buckets"][math.inf] == steps


def test_one_family_for_all_models(lent):
    engines = [make(lent), make(lent)]
    names = ['a "quoted"\nname', "b\\c"]
    models = {name: watched(engine) for name, engine in zip(names, engines, strict=True)}
    engines[1].add("x", [5] * 20, SamplingParams(max_tokens=3, ignore_eos=True))
    while engines[1].busy:
        engines[1].step()
    text, kind = render(models)
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    lines = text.decode().splitlines()
    heads = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))
    assert parsed(text, names[0])["vllm:generation_tokens_total"] == 0
    assert parsed(text, names[1])["vllm:generation_tokens_total"] == 3
    assert render({}) == (b"", kind)


def test_values_are_those_of_the_exposition(lent):
    engine = make(lent)
    metrics = watched(engine)
    for index in range(6):
        engine.add(str(index), [5] * 40, SamplingParams(max_tokens=8, ignore_eos=True))
    for _ in range(5):
        engine.step()
    flat = {}
    for name, value in metrics.values().items():
        for label, one in (
            value.items() if isinstance(value, dict) and "count" not in value else [(None, value)]
        ):
            for part, number in one.items() if isinstance(one, dict) else [(None, one)]:
                for le, count in number.items() if part == "buckets" else [(None, number)]:
                    key = (
                        name
                        + {"buckets": "_bucket", "count": "_count", "sum": "_sum", None: ""}[part]
                    )
                    parts = [at for at in (label, le) if at is not None]
                    flat[(key, *parts) if parts else key] = count
    found = parsed(render({"m": metrics})[0])
    config = {key: value for key, value in found.items() if key[0] == "vllm:cache_config_info"}
    assert flat.items() - found.items() == {
        (("vllm:cache_config_info", name), value)
        for name, value in metrics.values()["vllm:cache_config_info"].items()
    }
    assert metrics.values()["vllm:cache_config_info"] == {
        "block_size": "16",
        "num_gpu_blocks": "199",
        "cache_dtype": engine.runner.config.kv_dtype,
        "enable_prefix_caching": "True",
    }
    assert list(config.values()) == [1.0]


def test_sleep_states(lent):
    engine = make(lent)
    metrics = watched(engine)
    awake = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    assert metrics.values()["vllm:engine_sleep_state"] == awake
    for level, name in ((1, "weights_offloaded"), (2, "discard_all")):
        engine.sleep(level)
        assert metrics.values()["vllm:engine_sleep_state"] == {
            state: int(state == name) for state in awake
        }
        engine.lifecycle.wake_up()
        assert metrics.values()["vllm:engine_sleep_state"] == awake


def test_read_while_it_is_written(lent):
    """Another thread reads: counts are those of the buckets, and nothing goes back."""
    engine = make(lent)
    metrics = watched(engine)
    stop = threading.Event()
    errors = []
    readings = [0]

    def read():
        before: dict = {}
        try:
            while not stop.is_set():
                now = parsed(render({"m": metrics}, HttpMetrics())[0])
                for key, value in now.items():
                    name = key if isinstance(key, str) else key[0]
                    if name.endswith("_count"):
                        labels = () if isinstance(key, str) else key[1:]
                        assert (
                            now[name.removesuffix("_count") + "_bucket", *labels, math.inf] == value
                        )
                    if name.endswith(("_total", "_count", "_sum", "_bucket")):
                        assert value >= before.get(key, 0), key
                before = now
                readings[0] += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    rng = random.Random(1)
    while readings[0] < 30 and not errors:
        prompt, params, terms, more = random_request(rng, 5)
        engine.add(str(rng.random()), prompt, replace(params, max_tokens=5), None, terms, **more)
        while engine.busy:
            engine.step()
    stop.set()
    thread.join()
    assert not errors, errors
    assert readings[0] >= 30


def metric_names(expressions: str) -> set[str]:
    return set(re.findall(r"\b(?:vllm|quire):[a-zA-Z0-9_:]+", expressions))


def exported(lent) -> set[str]:
    http = HttpMetrics()
    http.request("/v1/models", "GET", 200)
    engine = make(lent)
    text = render({"m": watched(engine)}, http)[0].decode()
    return {
        sample.name for family in text_string_to_metric_families(text) for sample in family.samples
    }


def test_boards_made_for_vllm_find_what_they_ask_for(lent):
    asked = metric_names(VLLM_BOARD)
    assert len(asked) > 15
    assert asked <= exported(lent)


def test_the_board_asks_for_what_there_is(lent):
    board = json.loads(BOARD.read_text())
    assert board["schemaVersion"] >= 39
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert (
        variables["datasource"]["type"] == "datasource"
        and variables["model_name"]["type"] == "query"
    )
    there = exported(lent)
    ids = set()
    asked = set()
    rows = [panel for panel in board["panels"] if panel["type"] == "row"]
    assert len(rows) >= 6
    for panel in board["panels"]:
        assert panel["id"] not in ids
        ids.add(panel["id"])
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for other in board["panels"]:
            there_too = other["gridPos"]
            apart = other is panel or any(
                place[at] >= there_too[at] + there_too[size]
                or there_too[at] >= place[at] + place[size]
                for at, size in (("x", "w"), ("y", "h"))
            )
            assert apart, f"{panel['title']} lies over {other['title']}"
        for target in panel.get("targets", []):
            names = metric_names(target["expr"])
            assert names and names <= there, names - there
            if any(name.startswith("vllm:") for name in names):
                assert 'model_name=~"$model_name"' in target["expr"]
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"
            asked |= names
    bare = {re.sub("_(bucket|sum|count)$", "", name) for name in asked}
    wanted = {
        "vllm:time_to_first_token_seconds",
        "vllm:prefix_cache_hits_total",
        "quire:step_seconds",
    }
    wanted |= {
        "quire:pages",
        "quire:http_requests_total",
        "quire:event_loop_delay_seconds",
        "quire:recompiles_total",
    }
    assert wanted <= bare


def test_what_the_server_counts_is_bounded():
    http = HttpMetrics()
    http.request("/v1/models", "GET", 200)
    http.request("/v1/models", "GET", 200)
    http.request("other", "other", 404)
    http.observe_delay(0.004)
    http.observe_delay(-1e-9)
    http.streams += 1
    found = parsed(render({}, http)[0])
    assert found["quire:http_requests_total", "GET", "/v1/models", "200"] == 2
    assert found["quire:http_requests_total", "other", "other", "404"] == 1
    # sorted by the labels' names
    assert found["http_requests_total", "/v1/models", "GET", "2xx"] == 2
    assert found["http_requests_total", "other", "other", "4xx"] == 1
    assert found["quire:event_loop_delay_seconds_count"] == 2
    assert found["quire:event_loop_delay_seconds_sum"] == 0.004
    assert found["quire:event_loop_delay_seconds_bucket", 0.005] == 2
    assert found["quire:event_loop_delay_seconds_bucket", 0.002] == 1
    assert found["quire:streams_open"] == 1
    for index in range(5000):
        http.request(f"/{index}", "GET", 200)
    assert len(http.requests) <= HttpMetrics.MAX_LABEL_SETS + 1
    assert sum(http.requests.values()) == 5003


def test_an_engine_that_nobody_has_goes_at_once(lent):
    """Its weights are gigabytes: they cannot wait for a collection of cycles."""
    engine = make(lent)
    watched(engine)
    engine.observers.append(live := LiveView())
    live.look(engine)
    engine.add("a", [5] * 20, SamplingParams(max_tokens=5))
    for _ in range(3):
        engine.step()
    gc.disable()
    try:
        gone = weakref.ref(engine)
        del engine
        assert gone() is None
    finally:
        gc.enable()


def test_all_observers_hear_all(lent, tmp_path):
    """Each step leaves one record, whoever else hears of it; what is launched is taken in, or
    fails.
    """
    told: list[list] = [[], []]
    ended: list[str] = []

    class Hears(Observer):
        def __init__(self, records: list):
            self.records = records

        def observe(self, record) -> None:
            self.records.append(record)
            ended.extend(request.request_id for request in record.changed if request.finished)

        def close(self) -> None:
            self.records.append("closed")

    engine = make(lent)
    trace = Trace(tmp_path / "trace.json")
    engine.observers += [Hears(told[0]), Metrics(engine), LiveView(), trace, Hears(told[1])]
    drive(engine)
    assert told[0] == told[1] and told[0].pop() == "closed"
    launched = [record.launched.plan for record in told[0] if record.launched is not None]
    taken = [record.result.plan for record in told[0] if record.result is not None]
    lost = [plan for plan in launched if not any(plan is other for other in taken)]
    assert len(lost) == 1 and [plan for plan in launched if plan is not lost[0]] == taken
    assert sorted(ended) == ["a", "a", "b", "b", "c", "c"]
    assert (
        any(record.running == 2 for record in told[0])
        and told[0][-1].running == told[0][-1].waiting == 0
    )
    for record in told[0]:
        times = [record.began]
        if (step := record.launched) is not None:
            times += [step.scheduled, step.launched]
        if (step := record.result) is not None:
            assert step.device_began <= step.collected
            times += [step.began, step.collected]
        assert times == sorted(times) and times[-1] <= record.ended
    assert len(json.loads((tmp_path / "trace.json").read_text())) > 20


def drive(engine: Engine) -> None:
    """Some steps, one of which fails."""
    engine.add("a", [5] * 20, SamplingParams(max_tokens=5, ignore_eos=True))
    engine.add("b", [7] * 20, SamplingParams(max_tokens=9, ignore_eos=True))
    for _ in range(4):
        engine.step()
    launch = engine.runner.launch
    engine.runner.launch = lambda *given: 1 / 0
    engine.step()
    engine.runner.launch = launch
    engine.add("c", [7] * 20, SamplingParams(max_tokens=9, ignore_eos=True))
    while engine.busy:
        engine.step()
    engine.close()


@given(st.lists(st.floats(0, 100)), st.lists(st.floats(0, 99), min_size=1, unique=True))
def test_a_histogram_counts_each_value_once(values, bounds):
    histogram = Histogram(sorted(bounds))
    for value in values:
        histogram.observe(value)
    reading = histogram.read()
    assert reading.cumulative() == [
        (b, sum(v <= b for v in values)) for b in [*sorted(bounds), math.inf]
    ]
    assert reading.sum == pytest.approx(sum(values))
    assert reading.total == len(values)
    histogram.observe(0)
    assert reading.total == len(values), "what was read has changed"


@given(st.lists(st.tuples(st.floats(0, 200), st.floats(1e-5, 1e3), st.integers(1, 5)), min_size=1))
def test_quantiles_of_the_last_minute(observed):
    """To within a hundredth those of the values of the last minute, to within five seconds."""
    recent = RecentDurations()
    now = 200.0
    for at, value, times in sorted(observed):
        recent.observe(at, value, times)
    assert len(recent.slots) <= RecentDurations.SLOTS
    values = sorted(
        v for at, value, times in observed if at // 5 > now // 5 - 12 for v in [value] * times
    )
    found = recent.quantiles(now, (0.5, 0.9, 1.0))
    if not values:
        assert found is None
        return
    for share, got in zip((0.5, 0.9, 1.0), found, strict=True):
        assert got == pytest.approx(values[math.ceil(share * len(values)) - 1], rel=0.0102)


@given(st.lists(st.tuples(st.floats(0.001, 3), st.integers(0, 9)), min_size=1))
def test_a_rate_counts_the_last_second(steps):
    """What began within it counts whole, to within a tenth of a second; a second after the last,
    nothing does.
    """
    rate = Rate()
    now = 100.0
    came = []
    for gap, count in steps:
        rate.add(now + gap / 2, now + gap, count)
        came.append((now + gap / 2, count))
        now += gap
    since = sum(count for began, count in came if began > now - 0.9)
    assert since <= rate.last_second(now) + 1e-6 <= rate.total + 2e-6
    assert rate.last_second(now + 1) == rate.last_second(now + 100) == 0


def test_bounds_by_one_two_and_five():
    assert one_two_five(1, 100) == (1, 2, 5, 10, 20, 50, 100)
    assert one_two_five(1, 1024) == tuple(LENGTH)
    assert one_two_five(0.001, 0.5) == (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
    assert one_two_five(1, 1) == (1,)


def test_every_engine_has_them(tmp_path):
    """Also in the trace file's company; nothing is compiled in service."""
    write(tmp_path / "model")
    trace = str(tmp_path / "trace.json")
    options = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "kv_cache_memory_bytes": 1 << 20,
        "trace": trace,
    }
    with LLM(str(tmp_path / "model"), skip_tokenizer_init=True, **options) as llm:
        prompts = [{"prompt_token_ids": [5, 6, 7, index]} for index in range(5)]
        llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        values = llm.get_metrics()
        assert values["vllm:request_success_total"] == dict.fromkeys(FINISH_REASONS, 0) | {
            "length": 5
        }
        assert values["vllm:generation_tokens_total"] == 20
        assert values["quire:recompiles_total"] == 0
        assert 0 < values["vllm:e2e_request_latency_seconds"]["sum"] < 600
        assert llm.metrics.recent(0)["totals"]["requests"] == 5
    assert len(json.loads(Path(trace).read_text())) > 20
