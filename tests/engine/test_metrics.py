"""Compares metrics with an independent count, over random runs of an engine with a fake device."""

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
from quire.serving.api.params import RequestOptions, SamplingParams
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

GRAFANA_BOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"
LATENCY_BOUNDS = [
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
TOKEN_BOUNDS = [
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
NUM_DRAFTS = 3  # per sequence, if the engine drafts
LENGTH_BOUNDS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]  # for a model of 1024 positions
VLLM_BOUNDS = {
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
    "vllm:inter_token_latency_seconds": TOKEN_BOUNDS,
    "vllm:request_time_per_output_token_seconds": TOKEN_BOUNDS,
    "vllm:e2e_request_latency_seconds": LATENCY_BOUNDS,
    "vllm:request_queue_time_seconds": LATENCY_BOUNDS,
    "vllm:request_prefill_time_seconds": LATENCY_BOUNDS,
    "vllm:request_decode_time_seconds": LATENCY_BOUNDS,
    "vllm:request_inference_time_seconds": LATENCY_BOUNDS,
    "vllm:request_prompt_tokens": LENGTH_BOUNDS,
    "vllm:request_generation_tokens": LENGTH_BOUNDS,
    "vllm:request_max_num_generation_tokens": LENGTH_BOUNDS,
    "vllm:request_params_max_tokens": LENGTH_BOUNDS,
    "vllm:request_params_n": [1, 2, 5, 10, 20],
    "vllm:iteration_tokens_total": [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384],
}
VLLM_QUERIES = """
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
"""  # queries of the dashboards that vLLM ships


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def shared_engine() -> Engine:
    """An engine whose runner and tokenizer the tests share, as they take long to make."""
    return make_shared_engine()


@pytest.fixture(scope="module")
def drafting_engine() -> Engine:
    """Like `shared_engine`; samples and drafts two tokens at random."""
    engine = make_shared_engine(NUM_DRAFTS)
    tokens = [engine.tokenizer.encode(text, add_special_tokens=False)[0] for text in (" the", " a")]
    for compiled in engine.runner.compiled.values():
        compiled.tokens = tokens
    return engine


def make_shared_engine(max_drafts: int = 0) -> Engine:
    engine = pretended_engine(4, 512, 64, max_drafts)
    engine.runner.compiled = {
        size: FakeCompiledStep(compiled) for size, compiled in engine.runner.compiled.items()
    }
    engine.runner.weights = jnp.zeros(1)
    engine.runner.load_weights = lambda: jnp.zeros(1)
    return engine


class FakeCompiledStep:
    """A compiled step whose sampled token is invalid where `has_valid_logits()` returns False."""

    def __init__(self, compiled):
        self.compiled = compiled
        self.has_valid_logits = lambda: True
        self.tokens = None
        self.rng = np.random.default_rng(0)

    def __call__(self, weights, state, buffer):
        sampled, _, state = self.compiled(weights, state, buffer)
        ok_R = np.array([self.has_valid_logits() for _ in sampled.tokens_R])
        tokens_R = (
            sampled.tokens_R if self.tokens is None else self.rng.choice(self.tokens, len(ok_R))
        )
        return (
            sampled.replace(tokens_R=np.where(ok_R, tokens_R, -1)),
            np.zeros((len(ok_R), 4)),
            state,
        )


class RandomDrafter:
    """Proposes a random number of random tokens."""

    def __init__(self, rng: random.Random, tokens: list[int]):
        self.rng = rng
        self.tokens = tokens

    def propose(self, seq, max_drafts):
        return self.rng.choices(self.tokens, k=self.rng.randint(0, max_drafts))

    def end(self, seq):
        pass


def make_engine(
    shared_engine: Engine, pages: int = 200, clock=None, caching: bool = True
) -> Engine:
    """Makes a new engine with few pages around the shared runner."""
    runner, groups = shared_engine.runner, len(shared_engine.runner.config.windows)
    runner.reset()
    for compiled in runner.compiled.values():
        compiled.has_valid_logits = lambda: True
    runner.num_pages = (2,) * groups
    table = PageTable((pages,) * groups, 16, runner.config.windows, caching)
    drafts = runner.shape.max_drafts
    chosen = drafts and {"method": "ngram", "num_speculative_tokens": drafts, "adapts": False}
    speculation = parse_speculative_config(chosen or None)
    engine = Engine(
        runner,
        shared_engine.tokenizer,
        [table],
        shared_engine.max_len,
        clock=clock or Clock(),
        speculation=speculation,
    )
    if engine.speculator is not None:
        engine.speculator.host_drafter = RandomDrafter(
            random.Random(0), next(iter(runner.compiled.values())).tokens
        )
    return engine


def add_metrics(engine: Engine) -> Metrics:
    engine.observers.append(metrics := Metrics(engine))
    return metrics


class ReferenceMetrics:
    """Counts independently of `Metrics`, from requests' outputs and the plans of steps."""

    def __init__(self, engine: Engine, clock: Clock, rng: random.Random):
        self.engine = engine
        self.clock = clock
        self.rng = rng
        self.output_counts: dict = {}  # by request: number of output tokens of each sequence
        self.last_token_times: dict = {}  # by sequence
        self.values: dict[str, list[float]] = {name: [] for name in VLLM_BOUNDS}
        self.planned_sequences: set = set()
        # of the last step: sequence, its number of tokens before the step, drafts
        self.verified_drafts: list = []
        self.accepted_positions = Counter()  # of accepted drafts
        self.counts, self.finish_reasons, self.phase_counts = Counter(), Counter(), Counter()
        launch = engine.runner.__class__.launch
        collect = engine.runner.__class__.collect
        self.failing_phase = None

        def launch_and_count(plan, moves):
            clock.now += 0.25
            if self.failing_phase == "launch":
                raise RuntimeError("the device is gone")
            launched = launch(engine.runner, plan, moves)
            self.planned_sequences |= {item.seq for item in plan.items}
            self.phase_counts["launch"] += 1
            return launched

        def collect_and_count(launched):
            clock.now += 0.5
            if self.failing_phase == "collect":
                raise RuntimeError("the device is gone")
            result = collect(engine.runner, launched)
            items = [item for item in launched.plan.items if item.draft_tokens]
            self.verified_drafts = [
                (item.seq, len(item.seq.tokens), item.draft_tokens) for item in items
            ]
            self.phase_counts["collect"] += 1
            return result

        engine.runner.launch, engine.runner.collect = launch_and_count, collect_and_count

    def close(self) -> None:
        del self.engine.runner.launch, self.engine.runner.collect

    def step(self, action) -> None:
        """Calls `action` and counts its effects."""
        for request in self.engine.requests.values():
            self.output_counts.setdefault(request, [0] * len(request.sequences))
        self.count_finished(self.clock.now)
        num_collected = self.phase_counts["collect"]
        num_tokens = self.counts["prompt"] + self.counts["generation"]
        self.verified_drafts = []
        action()
        self.count_drafts()
        collected_time = self.clock.now if self.phase_counts["collect"] > num_collected else None
        self.phase_counts["update"] += self.phase_counts["collect"] - num_collected
        for request, counts in self.output_counts.items():
            self.count_tokens(request, counts, collected_time)
        self.count_finished(self.clock.now)
        if collected_time is not None:
            num_new = self.counts["prompt"] + self.counts["generation"] - num_tokens
            self.values["vllm:iteration_tokens_total"].append(num_new)

    def count_drafts(self) -> None:
        """Counts drafts as accepted up to the first that differs from the new tokens."""
        for seq, num_known, drafts in self.verified_drafts:
            if new_tokens := seq.tokens[num_known:]:
                self.counts["drafts"] += 1
                self.counts["draft tokens"] += len(drafts)
                is_accepted = [
                    draft == token for draft, token in zip(drafts, new_tokens, strict=False)
                ]
                num_accepted = (is_accepted + [False]).index(False)
                assert num_accepted >= len(new_tokens) - 1 or seq.finish_reason == "error"
                self.counts["accepted"] += num_accepted
                self.accepted_positions.update(range(num_accepted))

    def count_tokens(self, request, counts, time) -> None:
        if not any(counts) and any(seq.num_output for seq in request.sequences):
            self.values["vllm:time_to_first_token_seconds"].append(time - request.arrival)
            self.counts["prompt"] += request.sequences[0].num_prompt
            self.counts["cached"] += request.sequences[0].cache.num_cached
        for index, seq in enumerate(request.sequences):
            if seq.num_output > counts[index]:
                num_new = seq.num_output - counts[index]
                assert num_new == 1 or self.engine.speculator is not None
                if seq in self.last_token_times:
                    self.values["vllm:inter_token_latency_seconds"].append(
                        time - self.last_token_times[seq]
                    )
                self.last_token_times[seq] = time
                counts[index] += num_new
                self.counts["generation"] += num_new

    def count_finished(self, end_time: float) -> None:
        for request in [request for request in self.output_counts if request.finished]:
            del self.output_counts[request]
            output = request.output()
            params = request.params
            values = self.values
            lengths = [seq.num_output for seq in request.sequences]
            reasons = [completion.finish_reason for completion in request.completions]
            reasons_by_rank = ["error", "timeout", "abort", "length", "stop"]
            self.finish_reasons[
                next(reason for reason in reasons_by_rank if reason in reasons)
            ] += 1
            self.counts["preemptions"] += output.metrics.num_preemptions
            self.counts["reported draft tokens"] += output.metrics.num_draft_tokens
            self.counts["reported accepted"] += output.metrics.num_accepted_tokens
            values["vllm:request_prompt_tokens"].append(len(output.prompt_token_ids))
            last_token_time = (
                request.last_token
                if reasons[0] in ("stop", "length") and len(set(reasons)) == 1
                else None
            )
            values["vllm:e2e_request_latency_seconds"].append(
                (last_token_time or end_time) - request.arrival
            )
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
        """Returns all samples of counters and histograms except phase buckets and recompiles."""
        looked_up = [
            seq
            for seq in self.planned_sequences
            if seq.shares_prefix and self.engine.tables[0].keeps_prefixes
        ]
        samples = {
            "vllm:prompt_tokens_total": self.counts["prompt"],
            "vllm:prompt_tokens_cached_total": self.counts["cached"],
            "vllm:generation_tokens_total": self.counts["generation"],
            "vllm:num_preemptions_total": self.counts["preemptions"],
            "vllm:prefix_cache_queries_total": sum(seq.num_prompt for seq in looked_up),
            "vllm:prefix_cache_hits_total": sum(seq.cache.num_cached for seq in looked_up),
        }
        if self.engine.speculator is not None:
            samples["vllm:spec_decode_num_drafts_total"] = self.counts["drafts"]
            samples["vllm:spec_decode_num_draft_tokens_total"] = self.counts["draft tokens"]
            samples["vllm:spec_decode_num_accepted_tokens_total"] = self.counts["accepted"]
            for position in range(NUM_DRAFTS):
                samples["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(position)] = (
                    self.accepted_positions[position]
                )
            assert self.counts["accepted"] == self.counts["reported accepted"]
            assert self.counts["draft tokens"] == self.counts["reported draft tokens"]
        for reason in ("stop", "length", "abort", "timeout", "error"):
            samples["vllm:request_success_total", reason] = self.finish_reasons[reason]
        for name, bounds in VLLM_BOUNDS.items():
            for bound in [*bounds, math.inf]:
                samples[name + "_bucket", bound] = sum(
                    value <= bound for value in self.values[name]
                )
            samples[name + "_count"] = len(self.values[name])
            samples[name + "_sum"] = pytest.approx(sum(self.values[name]))
        for phase, seconds in (("launch", 0.25), ("collect", 0.5), ("schedule", 0), ("update", 0)):
            count = self.phase_counts["launch" if phase == "schedule" else phase]
            samples["quire:step_seconds_count", phase] = count
            samples["quire:step_seconds_sum", phase] = pytest.approx(count * seconds)
        return samples


def parse_samples(text: bytes, model: str | None = "m") -> dict:
    """Parses the exposition format.

    Keys are a sample's name, or a tuple of it, its label values except the model's name, and `le`
    as a number.
    """
    samples = {}
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
            assert key not in samples
            samples[key if len(key) > 1 else name] = value
    return samples


def compare_metrics(metrics: Metrics, reference_metrics: ReferenceMetrics) -> None:
    samples = parse_samples(render({"m": metrics})[0])
    for key, value in reference_metrics.expected().items():
        assert samples.pop(key) == value, key
    remaining_names = {key if isinstance(key, str) else key[0] for key in samples}
    assert remaining_names == {
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
    """Compares gauges with the engine's state."""
    samples = parse_samples(render({"m": metrics})[0])
    engine.scheduler.check()
    assert samples["vllm:num_requests_running"] == len(engine.scheduler.running)
    assert samples["vllm:num_requests_waiting"] == len(list(engine.scheduler.waiting))
    used_pages = [
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
    assert samples["quire:pages", "running"] == sum(map(len, used_pages))
    assert samples["quire:pages", "cached"] == sum(
        len(group.cached) for group in engine.tables[0].pools
    )
    assert sum(
        samples["quire:pages", state] for state in ("free", "running", "cached")
    ) == pages * len(used_pages)
    assert samples["vllm:kv_cache_usage_perc"] == pytest.approx(max(map(len, used_pages)) / pages)


def random_request(
    rng: random.Random, token: int
) -> tuple[list[int], SamplingParams, RequestOptions, dict]:
    prefix = [rng.choice((5, 6)) for _ in range(rng.choice((0, 16, 16, 40, 90)))]
    prompt = (prefix if rng.random() < 0.5 else [5] * len(prefix)) + [
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
    request_options = RequestOptions(
        timeout=rng.choice((0.6, 3, 20)) if rng.random() < 0.2 else None,
        cache_salt=rng.choice((None, "x")),
    )
    if rng.random() < 0.1:
        return prompt, PARAMS, request_options, {"pooling": rng.choice(("last", "mean"))}
    return prompt, params, request_options, {}


def run_random_mix(shared_engine: Engine, seed: int) -> Metrics:
    """Runs an engine with random arrivals, aborts, timeouts, failed steps, NaN logits, preemptions,
    prefix hits, `n` > 1 and sleep, and checks its metrics.
    """
    rng = random.Random(seed)
    clock = Clock()
    engine = make_engine(shared_engine, rng.choice((36, 60, 200)), clock, rng.random() < 0.8)
    token = shared_engine.tokenizer.encode(" the", add_special_tokens=False)[0]
    failure_rate = rng.choice((0, 0, 0.03))
    nan_rate = rng.choice((0, 0, 0.01))
    for compiled in engine.runner.compiled.values():
        compiled.has_valid_logits = lambda: rng.random() >= nan_rate
    metrics = add_metrics(engine)
    reference_metrics = ReferenceMetrics(engine, clock, rng)
    try:
        for index in range(rng.randrange(1, 120)):
            while rng.random() < 0.3:
                prompt, params, request_options, pooling_options = random_request(rng, token)
                try:
                    request = engine.add(
                        f"{index}-{rng.random()}",
                        prompt,
                        params,
                        None,
                        request_options,
                        **pooling_options,
                    )
                except RequestError:  # it needs more pages than the pool has
                    continue
                if rng.random() < 0.05:
                    engine.abort(request.request_id)  # before any step
            if engine.requests and rng.random() < 0.1:
                engine.abort(rng.choice(list(engine.requests)))
            if rng.random() < 0.03:
                reference_metrics.failing_phase = None
                reference_metrics.step(lambda: engine.sleep(rng.choice((1, 2)), rng.random() < 0.5))
                check_state(metrics, engine)
                engine.lifecycle.wake_up()
            else:
                clock.now += rng.choice((0, 0.001, 0.1, 3))
            reference_metrics.failing_phase = (
                rng.choice(("launch", "collect")) if rng.random() < failure_rate else None
            )
            reference_metrics.step(engine.step)
            if rng.random() < 0.1:
                check_state(metrics, engine)
        reference_metrics.failing_phase = None
        for _ in range(5000):
            reference_metrics.step(engine.step)
            if not engine.busy and not metrics.open:
                break
        assert not engine.requests
        compare_metrics(metrics, reference_metrics)
        check_state(metrics, engine)
        assert not (metrics.begun or metrics.latest or metrics.earlier), (
            "metrics keep state of finished requests"
        )
        return metrics
    finally:
        reference_metrics.close()


@settings(max_examples=cases(30))
@given(seed=st.integers(0, 2**32))
def test_random_runs_match_reference_metrics(shared_engine, seed):
    run_random_mix(shared_engine, seed)


@settings(max_examples=cases(30))
@given(seed=st.integers(0, 2**32))
def test_random_runs_with_drafts_match_reference_metrics(drafting_engine, seed):
    run_random_mix(drafting_engine, seed)


def test_accepted_drafts_count_in_metrics_outputs_and_trace(drafting_engine, tmp_path):
    """Metrics, outputs, rates and the trace agree on the number of drafts and accepted drafts."""
    clock = Clock()
    engine = make_engine(drafting_engine, clock=clock)
    metrics = add_metrics(engine)
    trace = Trace(tmp_path / "trace.json")
    engine.observers.append(trace)
    requests = [
        engine.add(str(index), [5] * 20, SamplingParams(max_tokens=40, ignore_eos=True))
        for index in range(3)
    ]
    num_gaps = num_multi_token = 0
    drafted_positions: list[list[int]] = [[], [], []]  # positions of accepted drafts in a stream
    while engine.busy:
        num_output = [request.sequences[0].num_output for request in requests]
        clock.now += 0.01
        engine.step()
        num_new = [
            request.sequences[0].num_output - num_before
            for request, num_before in zip(requests, num_output, strict=True)
        ]
        num_gaps += sum(
            count > 0 and num_before > 0
            for count, num_before in zip(num_new, num_output, strict=True)
        )
        num_multi_token += sum(count > 1 for count in num_new)
        for positions, request, num_before in zip(
            drafted_positions, requests, num_output, strict=True
        ):
            positions += [
                num_before + position
                for completion in request.take().completions
                for position in completion.drafted
            ]
    trace.close()
    assert num_multi_token > 10
    values = metrics.values()
    request_metrics = [request.output().metrics for request in requests]
    assert values["vllm:inter_token_latency_seconds"]["count"] == num_gaps
    assert values["vllm:generation_tokens_total"] == metrics.written.total == 3 * 40
    assert (
        values["vllm:iteration_tokens_total"]["sum"] == 3 * 40 + values["vllm:prompt_tokens_total"]
    )
    num_accepted = sum(m.num_accepted_tokens for m in request_metrics)
    assert values["vllm:spec_decode_num_accepted_tokens_total"] == num_accepted == 3 * 39 - num_gaps
    assert (
        sum(values["vllm:spec_decode_num_accepted_tokens_per_pos_total"].values()) == num_accepted
    )
    assert drafted_positions == [
        request.sequences[0].draft.accepted_positions for request in requests
    ]
    assert sum(map(len, drafted_positions)) == num_accepted
    num_drafts = sum(m.num_draft_tokens for m in request_metrics)
    assert values["vllm:spec_decode_num_draft_tokens_total"] == num_drafts > num_accepted
    steps = [
        event["args"]
        for event in json.loads((tmp_path / "trace.json").read_text())
        if "rows" in str(event)
    ]
    assert sum(step.get("drafts", 0) for step in steps) == num_drafts
    assert sum(step.get("accepted", 0) for step in steps) == num_accepted


@pytest.mark.slow
def test_random_runs_reach_rare_states(shared_engine):
    """Every counter and finish reason is nonzero in at least 3 of 25 runs."""
    total = Counter()
    for seed in range(25):
        metrics = run_random_mix(shared_engine, seed)
        total.update(
            {name: int(count > 0) for name, count in (metrics.counts | metrics.ends).items()}
        )
    assert len(total) == 11 and min(total.values()) >= 3, total


def test_step_phases_have_exact_durations(shared_engine, monkeypatch):
    """Each phase takes a different time; calls of `step()` without work are not counted."""
    clock = Clock()
    engine = make_engine(shared_engine, clock=clock)
    metrics = add_metrics(engine)

    def advance_clock(owner, name, seconds):
        original = getattr(owner, name)

        def timed(*arguments):
            result = original(*arguments)
            clock.now += seconds
            return result

        monkeypatch.setattr(owner, name, timed)

    advance_clock(engine.scheduler, "schedule", 0.015625)
    advance_clock(engine.runner, "launch", 0.25)
    advance_clock(engine.runner, "collect", 2.0)
    advance_clock(engine.results, "process", 16.0)
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


def test_models_share_metric_families(shared_engine):
    engines = [make_engine(shared_engine), make_engine(shared_engine)]
    names = ['a "quoted"\nname', "b\\c"]
    models = {name: add_metrics(engine) for name, engine in zip(names, engines, strict=True)}
    engines[1].add("x", [5] * 20, SamplingParams(max_tokens=3, ignore_eos=True))
    while engines[1].busy:
        engines[1].step()
    text, kind = render(models)
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    lines = text.decode().splitlines()
    heads = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))
    assert parse_samples(text, names[0])["vllm:generation_tokens_total"] == 0
    assert parse_samples(text, names[1])["vllm:generation_tokens_total"] == 3
    assert render({}) == (b"", kind)


def test_values_equal_the_rendered_samples(shared_engine):
    engine = make_engine(shared_engine)
    metrics = add_metrics(engine)
    for index in range(6):
        engine.add(str(index), [5] * 40, SamplingParams(max_tokens=8, ignore_eos=True))
    for _ in range(5):
        engine.step()
    expected = {}
    for name, value in metrics.values().items():
        for label, labelled_value in (
            value.items() if isinstance(value, dict) and "count" not in value else [(None, value)]
        ):
            for sample_kind, number in (
                labelled_value.items()
                if isinstance(labelled_value, dict)
                else [(None, labelled_value)]
            ):
                for le, count in number.items() if sample_kind == "buckets" else [(None, number)]:
                    key = (
                        name
                        + {"buckets": "_bucket", "count": "_count", "sum": "_sum", None: ""}[
                            sample_kind
                        ]
                    )
                    label_values = [
                        label_value for label_value in (label, le) if label_value is not None
                    ]
                    expected[(key, *label_values) if label_values else key] = count
    samples = parse_samples(render({"m": metrics})[0])
    config = {key: value for key, value in samples.items() if key[0] == "vllm:cache_config_info"}
    assert expected.items() - samples.items() == {
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


def test_sleep_state_metric(shared_engine):
    engine = make_engine(shared_engine)
    metrics = add_metrics(engine)
    awake = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    assert metrics.values()["vllm:engine_sleep_state"] == awake
    for level, name in ((1, "weights_offloaded"), (2, "discard_all")):
        engine.sleep(level)
        assert metrics.values()["vllm:engine_sleep_state"] == {
            state: int(state == name) for state in awake
        }
        engine.lifecycle.wake_up()
        assert metrics.values()["vllm:engine_sleep_state"] == awake


def test_concurrent_reads_are_consistent_and_monotonic(shared_engine):
    """A thread reads while the engine writes: counts equal the buckets, no counter decreases."""
    engine = make_engine(shared_engine)
    metrics = add_metrics(engine)
    stop = threading.Event()
    errors = []
    num_readings = [0]

    def read():
        previous: dict = {}
        try:
            while not stop.is_set():
                samples = parse_samples(render({"m": metrics}, HttpMetrics())[0])
                for key, value in samples.items():
                    name = key if isinstance(key, str) else key[0]
                    if name.endswith("_count"):
                        labels = () if isinstance(key, str) else key[1:]
                        assert (
                            samples[name.removesuffix("_count") + "_bucket", *labels, math.inf]
                            == value
                        )
                    if name.endswith(("_total", "_count", "_sum", "_bucket")):
                        assert value >= previous.get(key, 0), key
                previous = samples
                num_readings[0] += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    rng = random.Random(1)
    while num_readings[0] < 30 and not errors:
        prompt, params, request_options, pooling_options = random_request(rng, 5)
        engine.add(
            str(rng.random()),
            prompt,
            replace(params, max_tokens=5),
            None,
            request_options,
            **pooling_options,
        )
        while engine.busy:
            engine.step()
    stop.set()
    thread.join()
    assert not errors, errors
    assert num_readings[0] >= 30


def metric_names(expressions: str) -> set[str]:
    return set(re.findall(r"\b(?:vllm|quire):[a-zA-Z0-9_:]+", expressions))


def exported_names(shared_engine) -> set[str]:
    http = HttpMetrics()
    http.request("/v1/models", "GET", 200)
    engine = make_engine(shared_engine)
    text = render({"m": add_metrics(engine)}, http)[0].decode()
    return {
        sample.name for family in text_string_to_metric_families(text) for sample in family.samples
    }


def test_vllm_dashboard_queries_find_their_metrics(shared_engine):
    board_names = metric_names(VLLM_QUERIES)
    assert len(board_names) > 15
    assert board_names <= exported_names(shared_engine)


def test_grafana_board_queries_exported_metrics(shared_engine):
    board = json.loads(GRAFANA_BOARD.read_text())
    assert board["schemaVersion"] >= 39
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert (
        variables["datasource"]["type"] == "datasource"
        and variables["model_name"]["type"] == "query"
    )
    valid_names = exported_names(shared_engine)
    ids = set()
    board_names = set()
    rows = [panel for panel in board["panels"] if panel["type"] == "row"]
    assert len(rows) >= 6
    for panel in board["panels"]:
        assert panel["id"] not in ids
        ids.add(panel["id"])
        position = panel["gridPos"]
        assert position["x"] + position["w"] <= 24
        for other_panel in board["panels"]:
            other_place = other_panel["gridPos"]
            is_apart = other_panel is panel or any(
                position[at] >= other_place[at] + other_place[size]
                or other_place[at] >= position[at] + position[size]
                for at, size in (("x", "w"), ("y", "h"))
            )
            assert is_apart, f"{panel['title']} overlaps {other_panel['title']}"
        for target in panel.get("targets", []):
            names = metric_names(target["expr"])
            assert names and names <= valid_names, names - valid_names
            if any(name.startswith("vllm:") for name in names):
                assert 'model_name=~"$model_name"' in target["expr"]
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"
            board_names |= names
    base_names = {re.sub("_(bucket|sum|count)$", "", name) for name in board_names}
    expected = {
        "vllm:time_to_first_token_seconds",
        "vllm:prefix_cache_hits_total",
        "quire:step_seconds",
    }
    expected |= {
        "quire:pages",
        "quire:http_requests_total",
        "quire:event_loop_delay_seconds",
        "quire:recompiles_total",
    }
    assert expected <= base_names


def test_http_metrics_have_a_bounded_number_of_labels():
    http = HttpMetrics()
    http.request("/v1/models", "GET", 200)
    http.request("/v1/models", "GET", 200)
    http.request("other", "other", 404)
    http.observe_delay(0.004)
    http.observe_delay(-1e-9)
    http.streams += 1
    samples = parse_samples(render({}, http)[0])
    assert samples["quire:http_requests_total", "GET", "/v1/models", "200"] == 2
    assert samples["quire:http_requests_total", "other", "other", "404"] == 1
    # label values are sorted by the labels' names
    assert samples["http_requests_total", "/v1/models", "GET", "2xx"] == 2
    assert samples["http_requests_total", "other", "other", "4xx"] == 1
    assert samples["quire:event_loop_delay_seconds_count"] == 2
    assert samples["quire:event_loop_delay_seconds_sum"] == 0.004
    assert samples["quire:event_loop_delay_seconds_bucket", 0.005] == 2
    assert samples["quire:event_loop_delay_seconds_bucket", 0.002] == 1
    assert samples["quire:streams_open"] == 1
    for index in range(5000):
        http.request(f"/{index}", "GET", 200)
    assert len(http.requests) <= HttpMetrics.MAX_LABEL_SETS + 1
    assert sum(http.requests.values()) == 5003


def test_unreferenced_engine_is_freed_without_gc(shared_engine):
    """Reference counting frees the engine and its weights: no reference cycle keeps them alive."""
    engine = make_engine(shared_engine)
    add_metrics(engine)
    engine.observers.append(live_view := LiveView())
    live_view.look(engine)
    engine.add("a", [5] * 20, SamplingParams(max_tokens=5))
    for _ in range(3):
        engine.step()
    gc.disable()
    try:
        engine_ref = weakref.ref(engine)
        del engine
        assert engine_ref() is None
    finally:
        gc.enable()


def test_observers_get_the_same_step_records(shared_engine, tmp_path):
    """All observers get one record per step; every launched plan is collected or fails."""
    records_by_observer: list[list] = [[], []]
    finished_ids: list[str] = []

    class RecordingObserver(Observer):
        def __init__(self, records: list):
            self.records = records

        def observe(self, record) -> None:
            self.records.append(record)
            finished_ids.extend(
                request.request_id for request in record.changed if request.finished
            )

        def close(self) -> None:
            self.records.append("closed")

    engine = make_engine(shared_engine)
    trace = Trace(tmp_path / "trace.json")
    engine.observers += [
        RecordingObserver(records_by_observer[0]),
        Metrics(engine),
        LiveView(),
        trace,
        RecordingObserver(records_by_observer[1]),
    ]
    run_with_failure(engine)
    assert (
        records_by_observer[0] == records_by_observer[1]
        and records_by_observer[0].pop() == "closed"
    )
    launched_plans = [
        record.launched.plan for record in records_by_observer[0] if record.launched is not None
    ]
    collected_plans = [
        record.result.plan for record in records_by_observer[0] if record.result is not None
    ]
    failed_plans = [
        plan
        for plan in launched_plans
        if not any(plan is collected_plan for collected_plan in collected_plans)
    ]
    assert (
        len(failed_plans) == 1
        and [plan for plan in launched_plans if plan is not failed_plans[0]] == collected_plans
    )
    assert sorted(finished_ids) == ["a", "a", "b", "b", "c", "c"]
    assert (
        any(record.running == 2 for record in records_by_observer[0])
        and records_by_observer[0][-1].running == records_by_observer[0][-1].waiting == 0
    )
    for record in records_by_observer[0]:
        times = [record.began]
        if (step := record.launched) is not None:
            times += [step.scheduled, step.launched]
        if (step := record.result) is not None:
            assert step.device_began <= step.collected
            times += [step.began, step.collected]
        assert times == sorted(times) and times[-1] <= record.ended
    assert len(json.loads((tmp_path / "trace.json").read_text())) > 20


def run_with_failure(engine: Engine) -> None:
    """Runs requests until they are finished; one step fails."""
    engine.add("a", [5] * 20, SamplingParams(max_tokens=5, ignore_eos=True))
    engine.add("b", [7] * 20, SamplingParams(max_tokens=9, ignore_eos=True))
    for _ in range(4):
        engine.step()
    launch = engine.runner.launch
    engine.runner.launch = lambda *arguments: 1 / 0
    engine.step()
    engine.runner.launch = launch
    engine.add("c", [7] * 20, SamplingParams(max_tokens=9, ignore_eos=True))
    while engine.busy:
        engine.step()
    engine.close()


@given(st.lists(st.floats(0, 100)), st.lists(st.floats(0, 99), min_size=1, unique=True))
def test_histogram_counts_each_value_once(values, bounds):
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
    assert reading.total == len(values), "a reading has changed after the fact"


@given(st.lists(st.tuples(st.floats(0, 200), st.floats(1e-5, 1e3), st.integers(1, 5)), min_size=1))
def test_recent_quantiles_cover_the_last_minute(observed):
    """Quantiles are accurate to 1 %, and the minute to five seconds."""
    recent = RecentDurations()
    now = 200.0
    for at, value, times in sorted(observed):
        recent.observe(at, value, times)
    assert len(recent.slots) <= RecentDurations.SLOTS
    values = sorted(
        v for at, value, times in observed if at // 5 > now // 5 - 12 for v in [value] * times
    )
    quantiles = recent.quantiles(now, (0.5, 0.9, 1.0))
    if not values:
        assert quantiles is None
        return
    for q, quantile in zip((0.5, 0.9, 1.0), quantiles, strict=True):
        assert quantile == pytest.approx(values[math.ceil(q * len(values)) - 1], rel=0.0102)


@given(st.lists(st.tuples(st.floats(0.001, 3), st.integers(0, 9)), min_size=1))
def test_rate_counts_the_last_second(steps):
    """Steps that began within the last second count, with a tolerance of a tenth of a second."""
    rate = Rate()
    now = 100.0
    events = []
    for gap, count in steps:
        rate.add(now + gap / 2, now + gap, count)
        events.append((now + gap / 2, count))
        now += gap
    num_recent = sum(count for began, count in events if began > now - 0.9)
    assert num_recent <= rate.last_second(now) + 1e-6 <= rate.total + 2e-6
    assert rate.last_second(now + 1) == rate.last_second(now + 100) == 0


def test_one_two_five_bounds():
    assert one_two_five(1, 100) == (1, 2, 5, 10, 20, 50, 100)
    assert one_two_five(1, 1024) == tuple(LENGTH_BOUNDS)
    assert one_two_five(0.001, 0.5) == (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
    assert one_two_five(1, 1) == (1,)


def test_metrics_of_a_real_engine_with_a_trace(tmp_path):
    """With a trace file as a second observer; nothing is recompiled."""
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
