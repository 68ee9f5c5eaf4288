"""The scheduler and the page table under heavy mixed loads, on a simulated clock."""

import random
from dataclasses import replace

import pytest

from quire.scripts.bench.simulation import (
    Cost,
    Policy,
    SimulatedRequest,
    Simulation,
    conversations,
    reasons,
)
from quire.serving.cache.page_table import PageTable
from quire.serving.device.step_shape import StepShape
from quire.serving.engine.scheduler import POINT


def make_simulation(
    pages=(2000, 600), windows=(None, 64), limits=(64, 512, 64), **options
) -> Simulation:
    return Simulation(PageTable(pages, 16, windows), StepShape.largest(*limits), **options)


def with_mixed_options(
    requests: list[SimulatedRequest], rng: random.Random
) -> list[SimulatedRequest]:
    """Some requests are aborted, time out, have a priority or repeat another's prompt."""
    mixed = []
    for request in requests:
        prompt = rng.choice(mixed[-50:]).prompt if mixed and rng.random() < 0.2 else request.prompt
        mixed.append(
            replace(
                request,
                prompt=prompt,
                priority=rng.choice((-1, 0, 0, 0, 1)),
                timeout=rng.uniform(0, 60) if rng.random() < 0.1 else None,
                abort=rng.uniform(0, 20) if rng.random() < 0.1 else None,
            )
        )
    return mixed


def check_ends(simulation: Simulation, outcomes, requests) -> None:
    assert len(outcomes) == len(requests)
    for outcome in outcomes:
        seq = outcome.seq
        request = outcome.request
        assert outcome.ended is not None and outcome.tokens == sorted(outcome.tokens)
        if seq.finish_reason == "length":
            assert len(outcome.tokens) == request.output
        else:
            assert (
                seq.finish_reason in ("timeout", "abort") and len(outcome.tokens) < request.output
            )
            earliest_end = request.arrival + min(
                t for t in (request.timeout, request.abort) if t is not None
            )
            assert outcome.ended >= earliest_end
    pools = simulation.scheduler.replicas[0].table.pools
    assert all(group.num_free == group.num_pages - 1 for group in pools)
    assert len(simulation.scheduler.replicas[0].free_slots) == simulation.scheduler.shape.max_seqs


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.slow
def test_every_request_ends_once_and_nothing_leaks(seed):
    """Page pools are ample, small or tiny."""
    rng = random.Random(seed)
    pages = rng.choice(((900, 400), (400, 200), (150, 80)))
    simulation = make_simulation(
        pages, limits=(rng.choice((4, 32)), rng.choice((64, 512)), 32), checks=5
    )
    requests = with_mixed_options(
        conversations(200, rng.choice((0.5, 5.0, 50.0)), seed, limit=500), rng
    )
    outcomes = simulation.run(requests)
    check_ends(simulation, outcomes, requests)
    assert reasons(outcomes)["length"] > 60


def test_timeouts_aborts_and_preemptions_all_occur():
    simulation = make_simulation((150, 80), limits=(16, 128, 16), checks=5)
    requests = with_mixed_options(conversations(400, 20.0, 3, limit=600), random.Random(3))
    outcomes = simulation.run(requests)
    check_ends(simulation, outcomes, requests)
    assert set(reasons(outcomes)) == {"length", "timeout", "abort"}
    assert simulation.preemptions > 20
    assert sum(outcome.seq.cache.num_cached > 0 for outcome in outcomes) > 5
    assert max(outcome.seq.num_preemptions for outcome in outcomes) >= 2


def test_a_barely_sufficient_pool_makes_progress():
    """64 equal requests; the pool holds 1.2 of them. None is preempted more than 3 times."""
    for seed in range(20):
        requests = [SimulatedRequest(0.01 * i, [seed * 64 + i] * 400, 100) for i in range(64)]
        simulation = make_simulation((39, 39), (None, 512), limits=(64, 512, 64), checks=10)
        outcomes = simulation.run(requests)
        check_ends(simulation, outcomes, requests)
        assert max(outcome.seq.num_preemptions for outcome in outcomes) <= 3


def test_no_priority_class_starves():
    """Urgent requests arrive faster than they are served; others wait POINT seconds per class."""
    rng = random.Random(5)
    requests = [
        SimulatedRequest(0.05 * i, [rng.randrange(1000) for _ in range(50)], 50, priority=-1)
        for i in range(4000)
    ]
    requests += [
        SimulatedRequest(20.0, [rng.randrange(1000) for _ in range(50)], 50, priority=p)
        for p in (0, 1)
    ]
    requests.sort(key=lambda request: request.arrival)
    simulation = make_simulation(limits=(8, 128, 8), cost=Cost(0.02, 0.002))
    outcomes = simulation.run(requests)
    check_ends(simulation, outcomes, requests)
    started = {outcome.seq: outcome.started or 0.0 for outcome in outcomes}
    urgent_waits = [
        started[outcome.seq] - outcome.request.arrival
        for outcome in outcomes
        if outcome.request.priority == -1
    ]
    assert max(urgent_waits) > 3 * POINT  # overload
    for outcome in outcomes:
        if outcome.request.priority >= 0:
            later_starts = [
                started[other_outcome.seq]
                for other_outcome in outcomes
                if other_outcome.request.arrival > 20 + POINT * (outcome.request.priority + 1)
            ]
            # urgent requests overtake it only within that time
            assert started[outcome.seq] <= min(later_starts)


def test_continuous_batching_is_faster_than_static_batching():
    """2 to 5 times, as published, on a device whose step time hardly depends on the batch size."""
    requests = conversations(400, 1000.0, 7, limit=1000)
    end_times = {}
    for policy in (Policy.continuous, Policy.static):
        simulation = make_simulation(
            (6000, 3000), limits=(32, 512, 32), policy=policy, cost=Cost(0.008, 0.00002)
        )
        outcomes = simulation.run(requests)
        check_ends(simulation, outcomes, requests)
        end_times[policy] = simulation.now
    assert 2 < end_times[Policy.static] / end_times[Policy.continuous] < 5


def test_start_times_by_batching_policy():
    """Four slots, six requests a second apart, and one more at the end."""
    requests = [
        SimulatedRequest(float(arrival), [arrival], 3) for arrival in (0, 1, 2, 3, 4, 5, 90)
    ]
    starts = {}
    for policy in Policy:
        simulation = make_simulation((100, 100), limits=(4, 64, 16), policy=policy, delay=1.5)
        outcomes = simulation.run(requests)
        check_ends(simulation, outcomes, requests)
        starts[policy] = [round(outcome.started, 1) for outcome in outcomes]
    assert starts == {
        Policy.continuous: [0, 1, 2, 3, 4, 5, 90],
        Policy.dynamic: [1.5, 1.5, 3.5, 3.5, 5.5, 5.5, 90],
        Policy.static: [3, 3, 3, 3, 90, 90, 90],
    }


def test_chunked_prefill_bounds_inter_token_gaps():
    """Without chunks a long prompt stalls all decoding sequences."""
    rng = random.Random(8)
    decoding = [SimulatedRequest(0.0, [i], 400) for i in range(8)]
    prefilling = [
        SimulatedRequest(1.0 + i, [rng.randrange(1000) for _ in range(3000)], 4) for i in range(5)
    ]
    worst_gap = {}
    for rows in (64, 4096):
        outcomes = make_simulation((6000, 6000), (None, 4096), limits=(16, rows, 16)).run(
            sorted(decoding + prefilling, key=lambda j: j.arrival)
        )
        gaps = [
            b - a
            for outcome in outcomes
            if outcome.request in decoding
            for a, b in zip(outcome.tokens, outcome.tokens[1:], strict=False)
        ]
        worst_gap[rows] = max(gaps)
    assert worst_gap[64] < 0.05 < 1.0 < worst_gap[4096]


def test_a_shared_prefix_is_computed_once():
    computed_tokens = {}
    for caches_prefixes in (True, False):
        pages = PageTable((6000, 3000), 16, (None, 64), caches_prefixes)
        simulation = Simulation(pages, StepShape.largest(32, 512, 32))
        simulation.run(conversations(100, 5.0, 2, limit=200, shared=1000))
        computed_tokens[caches_prefixes] = simulation.rows
    assert computed_tokens[False] - computed_tokens[True] > 95 * 900


def test_allocated_pages_are_almost_full():
    """Over 96 % of the slots of allocated pages hold a token. Reserving the longest answer for
    every request would fill 20 % to 40 %.
    """
    simulation = make_simulation((6000, 3000), limits=(32, 512, 32))
    simulation.run(conversations(600, 20.0, 4, limit=1800))
    busy = [look for look in simulation.looks if look.running > 16]
    assert sum(look.filled for look in busy) / len(busy) > 0.96
