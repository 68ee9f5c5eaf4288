"""The scheduler and the page table under heavy and ugly loads, on a clock of their own."""

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


def make(pages=(2000, 600), windows=(None, 64), limits=(64, 512, 64), **options) -> Simulation:
    return Simulation(PageTable(pages, 16, windows), StepShape.largest(*limits), **options)


def ugly(requests: list[SimulatedRequest], rng: random.Random) -> list[SimulatedRequest]:
    """Some go away, some have no patience, some are urgent, some repeat another's prompt."""
    found = []
    for request in requests:
        prompt = rng.choice(found[-50:]).prompt if found and rng.random() < 0.2 else request.prompt
        found.append(
            replace(
                request,
                prompt=prompt,
                priority=rng.choice((-1, 0, 0, 0, 1)),
                timeout=rng.uniform(0, 60) if rng.random() < 0.1 else None,
                abort=rng.uniform(0, 20) if rng.random() < 0.1 else None,
            )
        )
    return found


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
            due = request.arrival + min(
                t for t in (request.timeout, request.abort) if t is not None
            )
            assert outcome.ended >= due
    pools = simulation.scheduler.replicas[0].table.pools
    assert all(group.num_free == group.num_pages - 1 for group in pools)
    assert len(simulation.scheduler.replicas[0].free_slots) == simulation.scheduler.shape.max_seqs


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.slow
def test_every_request_ends_once_and_nothing_leaks(seed):
    """Pools from ample to tiny."""
    rng = random.Random(seed)
    pages = rng.choice(((900, 400), (400, 200), (150, 80)))
    simulation = make(pages, limits=(rng.choice((4, 32)), rng.choice((64, 512)), 32), checks=5)
    requests = ugly(conversations(200, rng.choice((0.5, 5.0, 50.0)), seed, limit=500), rng)
    outcomes = simulation.run(requests)
    check_ends(simulation, outcomes, requests)
    assert reasons(outcomes)["length"] > 60


def test_the_rare_states_are_reached():
    simulation = make((150, 80), limits=(16, 128, 16), checks=5)
    requests = ugly(conversations(400, 20.0, 3, limit=600), random.Random(3))
    outcomes = simulation.run(requests)
    check_ends(simulation, outcomes, requests)
    assert set(reasons(outcomes)) == {"length", "timeout", "abort"}
    assert simulation.preemptions > 20
    assert sum(outcome.seq.cache.num_cached > 0 for outcome in outcomes) > 5
    assert max(outcome.seq.num_preemptions for outcome in outcomes) >= 2


def test_a_pool_that_is_hardly_enough_makes_progress():
    """64 equal requests where one and a fifth fit: nobody is computed again more than thrice."""
    for seed in range(20):
        requests = [SimulatedRequest(0.01 * i, [seed * 64 + i] * 400, 100) for i in range(64)]
        simulation = make((39, 39), (None, 512), limits=(64, 512, 64), checks=10)
        outcomes = simulation.run(requests)
        check_ends(simulation, outcomes, requests)
        assert max(outcome.seq.num_preemptions for outcome in outcomes) <= 3


def test_no_class_starves():
    """Urgent requests keep coming faster than they can be served; the others wait for as long as
    their points say.
    """
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
    simulation = make(limits=(8, 128, 8), cost=Cost(0.02, 0.002))
    outcomes = simulation.run(requests)
    check_ends(simulation, outcomes, requests)
    started = {outcome.seq: outcome.started or 0.0 for outcome in outcomes}
    urgent = [
        started[outcome.seq] - outcome.request.arrival
        for outcome in outcomes
        if outcome.request.priority == -1
    ]
    assert max(urgent) > 3 * POINT  # there is more than can be served
    for outcome in outcomes:
        if outcome.request.priority >= 0:
            later = [
                started[f.seq]
                for f in outcomes
                if f.request.arrival > 20 + POINT * (outcome.request.priority + 1)
            ]
            # an urgent one passes it only within its points
            assert started[outcome.seq] <= min(later)


def test_continuous_batching_beats_static_batches():
    """Two to five times, as is published, on a device whose steps cost much the same for any number
    of rows.
    """
    requests = conversations(400, 1000.0, 7, limit=1000)
    ends = {}
    for policy in (Policy.continuous, Policy.static):
        simulation = make(
            (6000, 3000), limits=(32, 512, 32), policy=policy, cost=Cost(0.008, 0.00002)
        )
        outcomes = simulation.run(requests)
        check_ends(simulation, outcomes, requests)
        ends[policy] = simulation.now
    assert 2 < ends[Policy.static] / ends[Policy.continuous] < 5


def test_batches_wait_to_be_full_or_for_so_long():
    """Four slots, six requests a second apart and at last one more: who begins when, by policy."""
    requests = [SimulatedRequest(float(second), [second], 3) for second in (0, 1, 2, 3, 4, 5, 90)]
    starts = {}
    for policy in Policy:
        simulation = make((100, 100), limits=(4, 64, 16), policy=policy, delay=1.5)
        outcomes = simulation.run(requests)
        check_ends(simulation, outcomes, requests)
        starts[policy] = [round(outcome.started, 1) for outcome in outcomes]
    assert starts == {
        Policy.continuous: [0, 1, 2, 3, 4, 5, 90],
        Policy.dynamic: [1.5, 1.5, 3.5, 3.5, 5.5, 5.5, 90],
        Policy.static: [3, 3, 3, 3, 90, 90, 90],
    }


def test_chunks_keep_the_gaps_between_tokens_short():
    """Long prompts arrive among those who write: whole, each stops all others for as long as it
    takes.
    """
    rng = random.Random(8)
    writers = [SimulatedRequest(0.0, [i], 400) for i in range(8)]
    readers = [
        SimulatedRequest(1.0 + i, [rng.randrange(1000) for _ in range(3000)], 4) for i in range(5)
    ]
    worst = {}
    for rows in (64, 4096):
        outcomes = make((6000, 6000), (None, 4096), limits=(16, rows, 16)).run(
            sorted(writers + readers, key=lambda j: j.arrival)
        )
        gaps = [
            b - a
            for outcome in outcomes
            if outcome.request in writers
            for a, b in zip(outcome.tokens, outcome.tokens[1:], strict=False)
        ]
        worst[rows] = max(gaps)
    assert worst[64] < 0.05 < 1.0 < worst[4096]


def test_a_shared_beginning_is_computed_once():
    rows = {}
    for keeps in (True, False):
        pages = PageTable((6000, 3000), 16, (None, 64), keeps)
        simulation = Simulation(pages, StepShape.largest(32, 512, 32))
        simulation.run(conversations(100, 5.0, 2, limit=200, shared=1000))
        rows[keeps] = simulation.rows
    assert rows[False] - rows[True] > 95 * 900


def test_paging_fills_its_pages():
    """Over 96 % of what is owned holds a token; room for the longest answer for everybody would
    hold a fifth to two.
    """
    simulation = make((6000, 3000), limits=(32, 512, 32))
    simulation.run(conversations(600, 20.0, 4, limit=1800))
    busy = [look for look in simulation.looks if look.running > 16]
    assert sum(look.filled for look in busy) / len(busy) > 0.96
