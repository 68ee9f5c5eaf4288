"""What a watcher is shown, against the engine's own books."""

import json
import math
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.scripts.bench.host import pretended_engine
from quire.serving.api.params import SamplingParams, Terms
from quire.serving.cache.page_table import PageTable
from quire.serving.engine.engine import Engine
from quire.serving.observe import live_view as module
from quire.serving.observe.live_view import LiveView
from quire.serving.observe.metrics import Metrics
from quire.serving.speculative.config import parse_speculative_config
from quire.tests.support.cases import cases

KEYS = {
    "t",
    "page_size",
    "limits",
    "defaults",
    "groups",
    "used",
    "running",
    "waiting",
    "num_running",
    "num_waiting",
    "steps",
    "cursor",
    "drafts",
}


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def lent() -> Engine:
    return pretended_engine(4, 512, 64)


def make(lent: Engine, pages: int = 200) -> tuple[Engine, Clock]:
    """A fresh engine around the runner; a step takes a tenth of a second."""
    runner, groups, clock = lent.runner, len(lent.runner.config.windows), Clock()
    runner.reset()
    table = PageTable((pages,) * groups, 16, runner.config.windows)
    drafts = runner.shape.max_drafts
    chosen = (
        parse_speculative_config(
            {"method": "ngram", "num_speculative_tokens": drafts, "adapts": False}
        )
        if drafts
        else None
    )
    return Engine(
        runner, lent.tokenizer, [table], lent.max_len, clock=clock, speculation=chosen
    ), clock


def watched(engine: Engine) -> LiveView:
    engine.observers.append(live := LiveView())
    return live


def state_of(engine: Engine, index: int, page: int, numbers: dict) -> int:
    """Whose a page is, by asking everybody."""
    owners = [
        seq
        for seq in engine.scheduler.running
        if seq.cache.pages and page in seq.cache.pages[index]
    ]
    if len(owners) > 1:
        return -2
    if owners:
        return numbers[owners[0].request.request_id]
    return -1 if page in engine.tables[0].pools[index].cached else 0


def most_alive(states: list[int]) -> int:
    if -2 in states:
        return -2
    return max(states) if max(states) > 0 else min(states)


def check(engine: Engine, shown: dict) -> None:
    assert shown.keys() == KEYS
    assert json.loads(msgspec.json.encode(shown)) == json.loads(json.dumps(shown))
    running = {seq.request for seq in engine.scheduler.running}
    numbers = {one["id"]: one["number"] for one in shown["running"]}
    assert numbers.keys() == {request.request_id for request in running}
    assert len(set(numbers.values())) == len(numbers) and min(numbers.values(), default=1) >= 1
    for index, (group, told) in enumerate(
        zip(engine.tables[0].pools, shown["groups"], strict=True)
    ):
        assert told["name"] == ("full" if group.window is None else f"window {group.window}")
        assert told["pages"] == group.num_pages - 1
        states = [state_of(engine, index, page, numbers) for page in range(1, group.num_pages)]
        each = math.ceil(len(states) / module.CELLS)
        assert told["each"] == each
        cells = [most_alive(states[at : at + each]) for at in range(0, len(states), each)]
        assert told["cells"] == cells and len(cells) <= module.CELLS
    for one in shown["running"]:
        request = engine.requests[one["id"]]
        mine = [seq for seq in request.sequences if seq.slot >= 0]
        assert one == {
            "number": one["number"],
            "id": request.request_id,
            "prompt": request.sequences[0].num_prompt,
            "cached": request.sequences[0].cache.num_cached,
            "computed": max(seq.num_computed for seq in mine),
            "tokens": sum(len(seq.tokens) - seq.num_prompt for seq in request.sequences),
            "state": one["state"],
        }
        if (
            request.first_token is not None
            and not any(seq.num_preemptions for seq in mine)
            and len(mine) == 1
        ):
            assert one["state"] == "writing"
        if all(seq.num_computed < seq.num_prompt for seq in mine):
            assert one["state"] == "reading"
    waits = [request for request in engine.requests.values() if request not in running]
    assert (shown["num_running"], shown["num_waiting"]) == (len(running), len(waits))
    lengths = {request.request_id: request.sequences[0].num_prompt for request in waits}
    assert len(shown["waiting"]) == min(len(waits), module.MAX_LISTED)
    assert {one["id"]: one["prompt"] for one in shown["waiting"]}.items() <= lengths.items()
    assert shown["used"] == engine.tables[0].used()


@settings(max_examples=cases(40))
@given(seed=st.integers(0, 2**32), cells=st.sampled_from([7, 40, 150, 2048]))
def test_a_snapshot_is_what_the_engine_is_like(lent, seed, cells):
    """In random runs with shared prefixes, preemptions and aborts; numbers stay, and small ones
    come back.
    """
    rng = random.Random(seed)
    engine, clock = make(lent, rng.choice((36, 60, 200)))
    live = watched(engine)
    numbers = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CELLS", cells)
        for index in range(60):
            while rng.random() < 0.3:
                prompt = [5] * rng.choice((0, 16, 40, 90)) + [
                    rng.randrange(3, 400) for _ in range(rng.randrange(1, 60))
                ]
                params = SamplingParams(
                    n=rng.choice((1, 1, 2, 3)), max_tokens=rng.randrange(1, 60), ignore_eos=True
                )
                engine.add(
                    f"{index}-{rng.random()}",
                    prompt,
                    params,
                    "secret words",
                    Terms(timeout=rng.choice((None, 3))),
                )
            if engine.requests and rng.random() < 0.1:
                engine.abort(rng.choice(list(engine.requests)))
            engine.step()
            clock.now += 0.1
            if rng.random() < 0.5:
                shown = live.look(engine, rng.choice((-1, 0, live.count)))
                check(engine, shown)
                assert "secret" not in str(shown)
                mine = {one["id"]: one["number"] for one in shown["running"]}
                assert all(numbers.get(name, number) == number for name, number in mine.items())
                numbers = {
                    name: number
                    for name, number in (numbers | mine).items()
                    if name in engine.requests
                }
                assert len(set(numbers.values())) == len(numbers)
                assert max(mine.values(), default=0) <= len(numbers) + len(live.spare)
                assert max(mine.values(), default=0) <= 4 * 20


def test_numbers_are_small_and_come_back(lent):
    engine, _ = make(lent)
    live = watched(engine)
    for index in range(200):
        engine.add(
            str(index), [index + 3] * 3, SamplingParams(max_tokens=index % 7 + 1, ignore_eos=True)
        )
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, *(one["number"] for one in live.look(engine)["running"]), 0)
    assert most == 4
    assert live.look(engine)["running"] == []
    assert live.numbers == {}


def test_steps_since_the_last_look_of_each_watcher(lent):
    engine, clock = make(lent)
    live = watched(engine)
    plans = []
    launch = engine.runner.launch
    engine.runner.launch = lambda plan, moves: plans.append(plan) or launch(plan, moves)
    try:
        for index in range(4):
            engine.add(
                str(index), [index + 3] * 30, SamplingParams(max_tokens=200, ignore_eos=True)
            )
        one = live.look(engine, -1)
        assert (one["steps"], one["cursor"]) == ([], 0)
        seen: dict[str, list] = {"a": [], "b": []}
        cursors = {"a": one["cursor"], "b": 0}
        rng = random.Random(3)
        times = []
        for _ in range(150):
            engine.step()
            times.append(clock.now)
            clock.now += 0.01
            for name in ("a", "b"):
                if rng.random() < {"a": 0.5, "b": 0.05}[name]:
                    shown = live.look(engine, cursors[name])
                    seen[name] += shown["steps"]
                    cursors[name] = shown["cursor"]
        for name in seen:
            seen[name] += live.look(engine, cursors[name])["steps"]
        assert seen["a"] == seen["b"]
        expected = [
            [
                at,
                plan.num_tokens,
                sum(item.num_tokens == 1 for item in plan.items),
                len(plan.items),
                pytest.approx(0.01),
                0,
                0,
            ]
            for at, plan in zip(times[1:], plans, strict=False)
        ]
        assert seen["a"] == expected
        # with prompts and without
        assert {step[1] == step[2] for step in seen["a"]} == {True, False}
        assert live.look(engine, 10**6)["steps"] == []  # from before a restart
    finally:
        del engine.runner.launch


def test_drafts_are_shown_apart():
    """Rows of drafts are neither a prompt's nor a decode's; what is accepted adds up to the
    totals.
    """
    engine, _ = make(pretended_engine(4, 512, 64, 3))
    # which is all that the device draws
    token = engine.tokenizer.encode(" the", add_special_tokens=False)[0]

    class Half:
        def propose(self, seq, most):
            return [token, 5, token][:most]

        def end(self, seq):
            pass

    engine.speculator.host_drafter = Half()
    live = watched(engine)
    assert live.look(engine)["drafts"] == (0, 0, 0)
    for index in range(3):
        engine.add(str(index), [index + 3] * 30, SamplingParams(max_tokens=31, ignore_eos=True))
    while engine.busy:
        engine.step()
    shown = live.look(engine)
    assert all(rows >= decodes + drafts for _, rows, decodes, _, _, drafts, _ in shown["steps"])
    assert (
        sum(rows - decodes - drafts for _, rows, decodes, _, _, drafts, _ in shown["steps"])
        == 3 * 30
    )
    totals = [sum(step[place] for step in shown["steps"]) for place in (5, 6)]
    # the last step has room for one
    assert list(shown["drafts"][1:]) == totals == [3 * (14 * 3 + 1), 3 * 15]


def test_steps_are_kept_while_somebody_watches(lent):
    engine, clock = make(lent)
    live = watched(engine)
    engine.add("a", [5] * 20, SamplingParams(max_tokens=400, ignore_eos=True))
    for _ in range(5):
        engine.step()
    assert live.look(engine, 0)["steps"] == []
    for _ in range(3):
        engine.step()
    assert len(live.look(engine, 0)["steps"]) == 3
    clock.now += module.PATIENCE + 1
    engine.step()
    assert not live.steps and not live.numbers
    for _ in range(4):
        engine.step()
    cursor = live.look(engine, 0)["cursor"]
    for _ in range(300):
        engine.step()
    assert len(live.look(engine, cursor)["steps"]) == 300
    engine.add("b", [6] * 20, SamplingParams(max_tokens=400, ignore_eos=True))
    for _ in range(400):
        engine.step()
    assert len(live.look(engine, cursor)["steps"]) == module.STEPS


def test_totals_rates_and_latencies(lent):
    engine, clock = make(lent)
    metrics = Metrics(engine)
    engine.observers.append(metrics)
    gaps = []
    firsts = []
    tokens = 0
    prompts = 0
    assert metrics.recent(clock.now)["latency"] == {"ttft": None, "itl": None}
    assert metrics.recent(clock.now)["rates"] == {"generation": 0, "prompt": 0}
    rng = random.Random(7)
    for index in range(3):
        engine.add(
            str(index), [index + 3] * (40 + index), SamplingParams(max_tokens=100, ignore_eos=True)
        )
    written: list[tuple[float, int]] = []
    last: dict = {}
    arrival = clock.now
    while engine.busy:
        clock.now += rng.choice((0.01, 0.02, 0.04, 0.3))
        before = {request: request.sequences[0].num_output for request in engine.requests.values()}
        engine.step()
        new = [
            request for request, count in before.items() if request.sequences[0].num_output > count
        ]
        for request in new:
            gaps += [clock.now - last[request]] if request in last else []
            if request not in last:
                firsts.append(clock.now - arrival)
                prompts += request.sequences[0].num_prompt
            last[request] = clock.now
        tokens += len(new)
        written.append((clock.now, len(new)))
        shown = metrics.recent(clock.now)
        recent = sum(count for at, count in written if at > clock.now - 1)
        assert shown["rates"]["generation"] == pytest.approx(recent, abs=3 * 0.41 / 0.01)
        assert shown["totals"]["generation_tokens"] == tokens
        assert shown["totals"]["prompt_tokens"] == prompts
    assert clock.now - arrival < 55
    shown = metrics.recent(clock.now)
    for name, values in (("itl", gaps), ("ttft", firsts)):
        exact = [
            sorted(values)[math.ceil(share * len(values)) - 1] * 1e3 for share in (0.5, 0.9, 0.99)
        ]
        assert shown["latency"][name] == pytest.approx(exact, rel=0.011)
    assert shown["totals"] == {
        "requests": 3,
        "prompt_tokens": 123,
        "generation_tokens": 300,
        "cached_tokens": sum(request.sequences[0].cache.num_cached for request in last),
        "preemptions": 0,
        "recompiles": metrics.values()["quire:recompiles_total"],
    }
    clock.now += 70
    shown = metrics.recent(clock.now)
    assert shown["latency"] == {"ttft": None, "itl": None}
    assert shown["rates"] == {"generation": 0, "prompt": 0}


@pytest.mark.parametrize("pause", [0.001, 0.02, 0.1, 0.25])
@pytest.mark.parametrize("idle", [0, 30])
def test_rates_of_a_steady_stream(lent, pause, idle):
    """Four tokens a step, at any pace, after a pause or not."""
    engine, clock = make(lent)
    metrics = Metrics(engine)
    engine.observers.append(metrics)
    launch = engine.runner.launch

    def slow(plan, moves):
        found = launch(plan, moves)
        clock.now += pause
        return found

    engine.runner.launch = slow
    try:
        for turn in range(2 if idle else 1):
            if turn:
                while engine.busy:
                    engine.step()
                clock.now += idle
            for index in range(4):
                engine.add(
                    f"{turn} {index}",
                    [index + 3] * 10,
                    SamplingParams(max_tokens=100, ignore_eos=True),
                )
            begun = clock.now
            while clock.now < begun + 1.2 and engine.busy:
                engine.step()
            lasted = min(clock.now - begun, 1.0)
            tokens = 4 / pause * lasted if clock.now - begun >= 1 else 400
            assert metrics.recent(clock.now)["rates"]["generation"] == pytest.approx(
                tokens, rel=0.15, abs=8
            )
    finally:
        del engine.runner.launch


def test_rows_of_a_prompt_count_as_read(lent):
    engine, clock = make(lent)
    metrics = Metrics(engine)
    engine.observers.append(metrics)
    engine.add("a", list(range(3, 203)), SamplingParams(max_tokens=3, ignore_eos=True))
    for _ in range(10):
        clock.now += 0.01
        engine.step()
    assert metrics.recent(clock.now)["rates"]["prompt"] == pytest.approx(200)


def test_long_lists_are_cut(lent):
    engine, _ = make(lent)
    live = watched(engine)
    for index in range(150):
        engine.add(str(index), [5] * 20, SamplingParams(max_tokens=100, n=2, ignore_eos=True))
    engine.step()
    shown = live.look(engine)
    assert len(shown["waiting"]) == 64
    assert (shown["num_running"], shown["num_waiting"]) == (2, 148)
    check(engine, shown)


def test_cells_of_many_pages(lent):
    """A huge cache is shown in 2048 cells at most."""
    engine, _ = make(lent, 100_001)
    live = watched(engine)
    engine.add("a", [5] * 200, SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in range(6):
        engine.step()
    for group in live.look(engine)["groups"]:
        assert (group["pages"], group["each"], len(group["cells"])) == (100_000, 49, 2041)
        assert np.sum(np.array(group["cells"]) == 1) >= 1
