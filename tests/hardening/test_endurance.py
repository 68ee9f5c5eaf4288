"""What wears other servers down: aborts by the thousand, requests without end, steps that fail,
pools too small.

The engine is whole but for its device, which draws the same token from every row at once.
"""

import gc
import random
import tracemalloc

import pytest

from quire.scripts.bench.host import pretended_engine
from quire.scripts.bench.simulation import Cost, SimulatedRequest, Simulation, reasons
from quire.serving.api.errors import RequestError
from quire.serving.api.params import SamplingParams, Terms
from quire.serving.cache.page_table import PageTable
from quire.serving.device.step_shape import StepShape
from quire.tests.support.cases import cases

SEEDS = cases(100)


@pytest.fixture(scope="module")
def engine():
    """Sixteen at once, and pages for about half of them."""
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


def params(rng: random.Random, most: int = 60) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=rng.randint(1, most), n=rng.choice((1, 1, 1, 3)), ignore_eos=True
    )


def test_ten_thousand_aborts_leak_nothing(engine):
    """In the queue, in the middle of a prompt, with a token under way, after giving way, together
    with others.
    """
    rng = random.Random(0)
    aborted = 0
    count = 0
    states = set()
    while aborted < 10_000:
        while len(engine.requests) < 40:
            tokens = [rng.randrange(400) for _ in range(rng.choice((3, 20, 120)))]
            engine.add(
                str(count), tokens, params(rng), terms=Terms(share_key=rng.choice((None, "a")))
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
            aborted += 1
        if rng.random() < 0.02:
            engine.scheduler.check()
    while engine.busy:
        engine.step()
    check_idle(engine)
    assert len(states) >= 7, states


@pytest.mark.random
@pytest.mark.slow
def test_twenty_thousand_requests_leave_nothing_behind(engine):
    rng = random.Random(1)
    count = 0

    def serve(requests: int) -> int:
        nonlocal count
        for _ in range(requests // 50):
            for _ in range(50):
                tokens = [rng.randrange(400) for _ in range(rng.randint(1, 20))]
                engine.add(
                    str(count), tokens, SamplingParams(max_tokens=2), terms=Terms(timeout=1000)
                )
                count += 1
            while engine.busy:
                engine.step()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = serve(cases(2_000))
        after = serve(cases(18_000))
    finally:
        tracemalloc.stop()
    assert (after - before) / cases(18_000) < 100  # bytes a request; a thousand would be a leak
    check_idle(engine)


@pytest.mark.random
def test_a_step_may_fail_at_any_time(engine, caplog):
    """At the first launch, the second, and so on: who was in it ends with an error, the others as
    they would have.
    """
    launch = engine.runner.launch
    collect = engine.runner.collect
    hurt = 0
    for broken in range(1, cases(200)):
        rng = random.Random(broken)
        calls = 0

        def fails(work, *given, broken=broken):
            nonlocal calls
            calls += 1
            if calls == broken:
                raise RuntimeError("the device is not well")
            return work(*given)

        engine.runner.launch = lambda plan, moves: fails(launch, plan, moves)
        engine.runner.collect = lambda launched: fails(collect, launched)
        requests = [
            engine.add(
                f"{broken} {i}",
                [rng.randrange(400) for _ in range(rng.randint(1, 90))],
                params(rng, 25),
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
        hurt += any(
            answer.finish_reason == "error"
            for request in requests
            for answer in request.output().outputs
        )
        check_idle(engine)
    engine.runner.launch, engine.runner.collect = launch, collect
    assert hurt > 0.3 * cases(200)  # the rest had ended before
    canary = engine.add("canary", [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    while engine.busy:
        engine.step()
    assert len(canary.output().outputs[0].token_ids) == 5


def test_bad_requests_hurt_nobody(engine):
    """Seven hundred of them while thirty-two are served."""
    good = [
        engine.add(f"good {i}", [i] * 30, SamplingParams(max_tokens=40, ignore_eos=True))
        for i in range(32)
    ]
    bad = [
        lambda: engine.add("x", [], SamplingParams()),
        lambda: engine.add("x", [10**6], SamplingParams()),
        lambda: engine.add("x", [1] * 10**5, SamplingParams()),
        lambda: engine.add("x", [1] * 1000, SamplingParams(max_tokens=1000)),  # would never fit
        lambda: engine.add("x", [1.5], SamplingParams()),
        lambda: engine.add("x", [1], SamplingParams(logit_bias={10**6: 1.0})),
        lambda: engine.add("x", [1], SamplingParams(stop_token_ids=[10**6])),
    ]
    for index in range(700):
        with pytest.raises(RequestError):
            bad[index % 7]()
        if index % 10 == 0:
            engine.step()
    while engine.busy:
        engine.step()
    assert all(len(request.output().outputs[0].token_ids) == 40 for request in good)
    check_idle(engine)


@pytest.mark.random
@pytest.mark.parametrize("block", range(10))
def test_a_pool_hardly_larger_than_one_request_serves_all(block):
    """64 requests in 1.2 times the pages of the largest: all end, and none starts over more than
    three times.
    """
    worst = 0
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
        worst = max(worst, *(outcome.seq.num_preemptions for outcome in outcomes))
    assert 0 < worst <= 3
