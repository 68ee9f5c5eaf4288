"""Endurance of the engine: aborts by the thousand, long series of requests, failing steps, and
small page pools.

All of the engine is real except its device, which samples the same token for every row immediately.
"""

import gc
import random
import tracemalloc

import pytest

from quire.scripts.bench.host import pretended_engine
from quire.scripts.bench.simulation import Cost, SimulatedRequest, Simulation, reasons
from quire.serving.api.errors import RequestError
from quire.serving.api.params import RequestOptions, SamplingParams
from quire.serving.cache.page_table import PageTable
from quire.serving.device.step_shape import StepShape
from quire.tests.support.cases import cases

SEEDS = cases(100)


@pytest.fixture(scope="module")
def engine():
    """An engine for sixteen sequences, with pages for about half of them."""
    engine = pretended_engine(16, 200, num_rows=64)
    engine.tables[0] = engine.scheduler.replicas[0].table = PageTable(
        (60, 60), 16, engine.runner.config.windows
    )
    return engine


def check_idle(engine) -> None:
    assert not engine.busy and not engine.requests
    engine.scheduler.check()
    assert all(group.num_free == group.num_pages - 1 for group in engine.tables[0].pools)
    assert len(engine.scheduler.replicas[0].free_slots) == 16
    assert not engine.scheduler.waiting.present and not engine.scheduler.waiting.waiting


def random_params(rng: random.Random, max_tokens: int = 60) -> SamplingParams:
    return SamplingParams(
        temperature=0,
        max_tokens=rng.randint(1, max_tokens),
        n=rng.choice((1, 1, 1, 3)),
        ignore_eos=True,
    )


def test_aborts_leak_nothing(engine):
    """Requests are aborted while queued, during prefill, with a step in flight, after preemption,
    singly or together.
    """
    rng = random.Random(0)
    num_aborted = 0
    count = 0
    states = set()
    while num_aborted < 10_000:
        while len(engine.requests) < 40:
            tokens = [rng.randrange(400) for _ in range(rng.choice((3, 20, 120)))]
            engine.add(
                str(count),
                tokens,
                random_params(rng),
                request_options=RequestOptions(share_key=rng.choice((None, "a"))),
            )
            count += 1
        for _ in range(rng.choice((0, 1, 1, 2, 5))):
            engine.step()
        for name in rng.sample(
            sorted(engine.requests), min(len(engine.requests), rng.choice((1, 1, 8, 30)))
        ):
            for seq in engine.requests[name].sequences:
                states.add(
                    (seq.slot >= 0, bool(seq.pending), seq.missing > 1, seq.num_preemptions > 0)
                )
            engine.abort(name)
            num_aborted += 1
        if rng.random() < 0.02:
            engine.scheduler.check()
    while engine.busy:
        engine.step()
    check_idle(engine)
    assert len(states) >= 7, states


@pytest.mark.random
@pytest.mark.slow
def test_finished_requests_leak_no_memory(engine):
    rng = random.Random(1)
    count = 0

    def serve_requests(requests: int) -> int:
        nonlocal count
        for _ in range(requests // 50):
            for _ in range(50):
                tokens = [rng.randrange(400) for _ in range(rng.randint(1, 20))]
                engine.add(
                    str(count),
                    tokens,
                    SamplingParams(max_tokens=2),
                    request_options=RequestOptions(timeout=1000),
                )
                count += 1
            while engine.busy:
                engine.step()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        bytes_before = serve_requests(cases(2_000))
        bytes_after = serve_requests(cases(18_000))
    finally:
        tracemalloc.stop()
    assert (bytes_after - bytes_before) / cases(
        18_000
    ) < 100  # bytes per request; a thousand would be a leak
    check_idle(engine)


@pytest.mark.random
def test_failed_steps_fail_only_their_requests(engine, caplog):
    """The first, the second, and so on of the calls to the device fails: its requests end with an
    error, others normally.
    """
    launch = engine.runner.launch
    collect = engine.runner.collect
    num_runs_with_errors = 0
    for failing_call in range(1, cases(200)):
        rng = random.Random(failing_call)
        calls = 0

        def call_or_fail(work, *arguments, failing_call=failing_call):
            nonlocal calls
            calls += 1
            if calls == failing_call:
                raise RuntimeError("the device is not well")
            return work(*arguments)

        engine.runner.launch = lambda plan, moves: call_or_fail(launch, plan, moves)
        engine.runner.collect = lambda launched: call_or_fail(collect, launched)
        requests = [
            engine.add(
                f"{failing_call} {i}",
                [rng.randrange(400) for _ in range(rng.randint(1, 90))],
                random_params(rng, 25),
            )
            for i in range(24)
        ]
        while engine.busy:
            engine.step()
        for request in requests:
            for answer in request.output().outputs:
                assert answer.finish_reason in ("length", "error")
                assert (
                    answer.finish_reason == "error"
                    or len(answer.token_ids) == request.params.max_tokens
                )
        num_runs_with_errors += any(
            answer.finish_reason == "error"
            for request in requests
            for answer in request.output().outputs
        )
        check_idle(engine)
    engine.runner.launch = launch
    engine.runner.collect = collect
    assert num_runs_with_errors > 0.3 * cases(200)  # the others ended before the failing call
    canary = engine.add("canary", [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    while engine.busy:
        engine.step()
    assert len(canary.output().outputs[0].token_ids) == 5


def test_bad_requests_do_not_affect_running_ones(engine):
    """Seven hundred bad requests while thirty-two are served."""
    good_requests = [
        engine.add(f"good {i}", [i] * 30, SamplingParams(max_tokens=40, ignore_eos=True))
        for i in range(32)
    ]
    bad_requests = [
        lambda: engine.add("x", [], SamplingParams()),
        lambda: engine.add("x", [10**6], SamplingParams()),
        lambda: engine.add("x", [1] * 10**5, SamplingParams()),
        lambda: engine.add("x", [1] * 1000, SamplingParams(max_tokens=1000)),  # can never fit
        lambda: engine.add("x", [1.5], SamplingParams()),
        lambda: engine.add("x", [1], SamplingParams(logit_bias={10**6: 1.0})),
        lambda: engine.add("x", [1], SamplingParams(stop_token_ids=[10**6])),
    ]
    for index in range(700):
        with pytest.raises(RequestError):
            bad_requests[index % 7]()
        if index % 10 == 0:
            engine.step()
    while engine.busy:
        engine.step()
    assert all(len(request.output().outputs[0].token_ids) == 40 for request in good_requests)
    check_idle(engine)


@pytest.mark.random
@pytest.mark.parametrize("block", range(10))
def test_small_page_pool_serves_all_requests(block):
    """64 requests on 1.2 times the pages of the largest: all finish, and none is preempted more
    than three times.
    """
    max_preemptions = 0
    for seed in range(block * SEEDS // 10, (block + 1) * SEEDS // 10):
        rng = random.Random(seed)
        requests = []
        now = 0.0
        for _ in range(64):
            now += rng.expovariate(20)
            prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 300))]
            requests.append(
                SimulatedRequest(
                    now, prompt, rng.randint(1, 200), priority=rng.choice((0, 0, 0, -1, 1))
                )
            )
        largest = max(-(-(len(request.prompt) + request.output) // 16) for request in requests)
        pages = PageTable((int(1.2 * largest) + 1, int(1.2 * largest) + 1), 16, (None, 64))
        simulation = Simulation(
            pages, StepShape.largest(32, 128, 32), Cost(0.008, 0.0001), checks=50
        )
        outcomes = simulation.run(requests)
        assert reasons(outcomes) == {"length": 64}
        assert all(len(outcome.tokens) == outcome.request.output for outcome in outcomes)
        max_preemptions = max(
            max_preemptions, *(outcome.seq.num_preemptions for outcome in outcomes)
        )
    assert 0 < max_preemptions <= 3
