"""Compares the live view with the state of the engine."""

import json
import math
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.scripts.bench.host import pretended_engine
from quire.serving.api.params import RequestOptions, SamplingParams
from quire.serving.cache.page_table import PageTable
from quire.serving.engine.engine import Engine
from quire.serving.observe import live_view as live_view_module
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
def shared_engine() -> Engine:
    return pretended_engine(4, 512, 64)


def make_engine(shared_engine: Engine, pages: int = 200) -> tuple[Engine, Clock]:
    """Makes a new engine around the shared runner, and its clock."""
    runner, groups, clock = shared_engine.runner, len(shared_engine.runner.config.windows), Clock()
    runner.reset()
    table = PageTable((pages,) * groups, 16, runner.config.windows)
    max_drafts = runner.shape.max_drafts
    speculation = (
        parse_speculative_config(
            {"method": "ngram", "num_speculative_tokens": max_drafts, "adapts": False}
        )
        if max_drafts
        else None
    )
    return Engine(
        runner,
        shared_engine.tokenizer,
        [table],
        shared_engine.max_len,
        clock=clock,
        speculation=speculation,
    ), clock


def add_live_view(engine: Engine) -> LiveView:
    engine.observers.append(live := LiveView())
    return live


def page_state(engine: Engine, index: int, page: int, numbers_by_id: dict) -> int:
    """Returns the state of a page: its owner's number, -1 (cached), 0 (free) or -2 (shared)."""
    owners = [
        seq
        for seq in engine.scheduler.running
        if seq.cache.pages and page in seq.cache.pages[index]
    ]
    if len(owners) > 1:
        return -2
    if owners:
        return numbers_by_id[owners[0].request.request_id]
    return -1 if page in engine.tables[0].pools[index].cached else 0


def cell_state(states: list[int]) -> int:
    if -2 in states:
        return -2
    return max(states) if max(states) > 0 else min(states)


def check_view(engine: Engine, view: dict) -> None:
    assert view.keys() == KEYS
    assert json.loads(msgspec.json.encode(view)) == json.loads(json.dumps(view))
    running = {seq.request for seq in engine.scheduler.running}
    numbers = {shown_request["id"]: shown_request["number"] for shown_request in view["running"]}
    assert numbers.keys() == {request.request_id for request in running}
    assert len(set(numbers.values())) == len(numbers) and min(numbers.values(), default=1) >= 1
    for index, (group, shown_group) in enumerate(
        zip(engine.tables[0].pools, view["groups"], strict=True)
    ):
        assert shown_group["name"] == ("full" if group.window is None else f"window {group.window}")
        assert shown_group["pages"] == group.num_pages - 1
        states = [page_state(engine, index, page, numbers) for page in range(1, group.num_pages)]
        pages_per_cell = math.ceil(len(states) / live_view_module.CELLS)
        assert shown_group["each"] == pages_per_cell
        cells = [
            cell_state(states[start : start + pages_per_cell])
            for start in range(0, len(states), pages_per_cell)
        ]
        assert shown_group["cells"] == cells and len(cells) <= live_view_module.CELLS
    for shown_request in view["running"]:
        request = engine.requests[shown_request["id"]]
        slot_sequences = [seq for seq in request.sequences if seq.slot >= 0]
        assert shown_request == {
            "number": shown_request["number"],
            "id": request.request_id,
            "prompt": request.sequences[0].num_prompt,
            "cached": request.sequences[0].cache.num_cached,
            "computed": max(seq.num_computed for seq in slot_sequences),
            "tokens": sum(len(seq.tokens) - seq.num_prompt for seq in request.sequences),
            "state": shown_request["state"],
        }
        if (
            request.first_token is not None
            and not any(seq.num_preemptions for seq in slot_sequences)
            and len(slot_sequences) == 1
        ):
            assert shown_request["state"] == "writing"
        if all(seq.num_computed < seq.num_prompt for seq in slot_sequences):
            assert shown_request["state"] == "reading"
    waiting = [request for request in engine.requests.values() if request not in running]
    assert (view["num_running"], view["num_waiting"]) == (len(running), len(waiting))
    lengths = {request.request_id: request.sequences[0].num_prompt for request in waiting}
    assert len(view["waiting"]) == min(len(waiting), live_view_module.MAX_LISTED)
    assert {
        shown_request["id"]: shown_request["prompt"] for shown_request in view["waiting"]
    }.items() <= lengths.items()
    assert view["used"] == engine.tables[0].used()


@settings(max_examples=cases(40))
@given(seed=st.integers(0, 2**32), cells=st.sampled_from([7, 40, 150, 2048]))
def test_random_runs_show_the_state_of_the_engine(shared_engine, seed, cells):
    """In runs with shared prefixes, preemptions and aborts, a request keeps its number, and numbers
    of finished requests are reused.
    """
    rng = random.Random(seed)
    engine, clock = make_engine(shared_engine, rng.choice((36, 60, 200)))
    live = add_live_view(engine)
    numbers = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_view_module, "CELLS", cells)
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
                    RequestOptions(timeout=rng.choice((None, 3))),
                )
            if engine.requests and rng.random() < 0.1:
                engine.abort(rng.choice(list(engine.requests)))
            engine.step()
            clock.now += 0.1
            if rng.random() < 0.5:
                view = live.look(engine, rng.choice((-1, 0, live.count)))
                check_view(engine, view)
                assert "secret" not in str(view)
                shown_numbers = {
                    shown_request["id"]: shown_request["number"]
                    for shown_request in view["running"]
                }
                assert all(
                    numbers.get(name, number) == number for name, number in shown_numbers.items()
                )
                numbers = {
                    name: number
                    for name, number in (numbers | shown_numbers).items()
                    if name in engine.requests
                }
                assert len(set(numbers.values())) == len(numbers)
                assert max(shown_numbers.values(), default=0) <= len(numbers) + len(live.spare)
                assert max(shown_numbers.values(), default=0) <= 4 * 20


def test_request_numbers_are_reused(shared_engine):
    engine, _ = make_engine(shared_engine)
    live = add_live_view(engine)
    for index in range(200):
        engine.add(
            str(index), [index + 3] * 3, SamplingParams(max_tokens=index % 7 + 1, ignore_eos=True)
        )
    max_number = 0
    while engine.busy:
        engine.step()
        max_number = max(
            max_number,
            *(shown_request["number"] for shown_request in live.look(engine)["running"]),
            0,
        )
    assert max_number == 4
    assert live.look(engine)["running"] == []
    assert live.numbers == {}


def test_each_client_gets_the_steps_since_its_cursor(shared_engine):
    engine, clock = make_engine(shared_engine)
    live = add_live_view(engine)
    plans = []
    launch = engine.runner.launch
    engine.runner.launch = lambda plan, moves: plans.append(plan) or launch(plan, moves)
    try:
        for index in range(4):
            engine.add(
                str(index), [index + 3] * 30, SamplingParams(max_tokens=200, ignore_eos=True)
            )
        first_view = live.look(engine, -1)
        assert (first_view["steps"], first_view["cursor"]) == ([], 0)
        steps_by_client: dict[str, list] = {"a": [], "b": []}
        cursors = {"a": first_view["cursor"], "b": 0}
        rng = random.Random(3)
        times = []
        for _ in range(150):
            engine.step()
            times.append(clock.now)
            clock.now += 0.01
            for name in ("a", "b"):
                if rng.random() < {"a": 0.5, "b": 0.05}[name]:
                    view = live.look(engine, cursors[name])
                    steps_by_client[name] += view["steps"]
                    cursors[name] = view["cursor"]
        for name in steps_by_client:
            steps_by_client[name] += live.look(engine, cursors[name])["steps"]
        assert steps_by_client["a"] == steps_by_client["b"]
        expected = [
            [
                time,
                plan.num_tokens,
                sum(item.num_tokens == 1 for item in plan.items),
                len(plan.items),
                pytest.approx(0.01),
                0,
                0,
            ]
            for time, plan in zip(times[1:], plans, strict=False)
        ]
        assert steps_by_client["a"] == expected
        # steps with and without prompts
        assert {step[1] == step[2] for step in steps_by_client["a"]} == {True, False}
        assert live.look(engine, 10**6)["steps"] == []  # a cursor from before a restart
    finally:
        del engine.runner.launch


def test_drafts_are_counted_separately():
    """Draft tokens count neither as prompt nor as decode tokens; totals add up."""
    engine, _ = make_engine(pretended_engine(4, 512, 64, 3))
    # the fake device samples only this token
    token = engine.tokenizer.encode(" the", add_special_tokens=False)[0]

    class FixedDrafter:
        def propose(self, seq, max_drafts):
            return [token, 5, token][:max_drafts]

        def end(self, seq):
            pass

    engine.speculator.host_drafter = FixedDrafter()
    live = add_live_view(engine)
    assert live.look(engine)["drafts"] == (0, 0, 0)
    for index in range(3):
        engine.add(str(index), [index + 3] * 30, SamplingParams(max_tokens=31, ignore_eos=True))
    while engine.busy:
        engine.step()
    view = live.look(engine)
    assert all(rows >= decodes + drafts for _, rows, decodes, _, _, drafts, _ in view["steps"])
    assert (
        sum(rows - decodes - drafts for _, rows, decodes, _, _, drafts, _ in view["steps"])
        == 3 * 30
    )
    totals = [sum(step[column] for step in view["steps"]) for column in (5, 6)]
    # the last step of each request may verify one draft only
    assert list(view["drafts"][1:]) == totals == [3 * (14 * 3 + 1), 3 * 15]


def test_steps_are_recorded_while_a_client_looks(shared_engine):
    engine, clock = make_engine(shared_engine)
    live = add_live_view(engine)
    engine.add("a", [5] * 20, SamplingParams(max_tokens=400, ignore_eos=True))
    for _ in range(5):
        engine.step()
    assert live.look(engine, 0)["steps"] == []
    for _ in range(3):
        engine.step()
    assert len(live.look(engine, 0)["steps"]) == 3
    clock.now += live_view_module.PATIENCE + 1
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
    assert len(live.look(engine, cursor)["steps"]) == live_view_module.STEPS


def test_totals_rates_and_latencies(shared_engine):
    engine, clock = make_engine(shared_engine)
    metrics = Metrics(engine)
    engine.observers.append(metrics)
    gaps = []
    ttfts = []
    num_generated = 0
    num_prompt_tokens = 0
    assert metrics.recent(clock.now)["latency"] == {"ttft": None, "itl": None}
    assert metrics.recent(clock.now)["rates"] == {"generation": 0, "prompt": 0}
    rng = random.Random(7)
    for index in range(3):
        engine.add(
            str(index), [index + 3] * (40 + index), SamplingParams(max_tokens=100, ignore_eos=True)
        )
    tokens_by_time: list[tuple[float, int]] = []
    last_token_times: dict = {}
    arrival = clock.now
    while engine.busy:
        clock.now += rng.choice((0.01, 0.02, 0.04, 0.3))
        num_output = {
            request: request.sequences[0].num_output for request in engine.requests.values()
        }
        engine.step()
        updated_requests = [
            request
            for request, count in num_output.items()
            if request.sequences[0].num_output > count
        ]
        for request in updated_requests:
            gaps += [clock.now - last_token_times[request]] if request in last_token_times else []
            if request not in last_token_times:
                ttfts.append(clock.now - arrival)
                num_prompt_tokens += request.sequences[0].num_prompt
            last_token_times[request] = clock.now
        num_generated += len(updated_requests)
        tokens_by_time.append((clock.now, len(updated_requests)))
        recent_metrics = metrics.recent(clock.now)
        num_recent = sum(count for time, count in tokens_by_time if time > clock.now - 1)
        assert recent_metrics["rates"]["generation"] == pytest.approx(
            num_recent, abs=3 * 0.41 / 0.01
        )
        assert recent_metrics["totals"]["generation_tokens"] == num_generated
        assert recent_metrics["totals"]["prompt_tokens"] == num_prompt_tokens
    assert clock.now - arrival < 55
    recent_metrics = metrics.recent(clock.now)
    for name, values in (("itl", gaps), ("ttft", ttfts)):
        expected = [
            sorted(values)[math.ceil(quantile * len(values)) - 1] * 1e3
            for quantile in (0.5, 0.9, 0.99)
        ]
        assert recent_metrics["latency"][name] == pytest.approx(expected, rel=0.011)
    assert recent_metrics["totals"] == {
        "requests": 3,
        "prompt_tokens": 123,
        "generation_tokens": 300,
        "cached_tokens": sum(request.sequences[0].cache.num_cached for request in last_token_times),
        "preemptions": 0,
        "recompiles": metrics.values()["quire:recompiles_total"],
    }
    clock.now += 70
    recent_metrics = metrics.recent(clock.now)
    assert recent_metrics["latency"] == {"ttft": None, "itl": None}
    assert recent_metrics["rates"] == {"generation": 0, "prompt": 0}


@pytest.mark.parametrize("pause", [0.001, 0.02, 0.1, 0.25])
@pytest.mark.parametrize("idle", [0, 30])
def test_generation_rate_of_a_steady_stream(shared_engine, pause, idle):
    """Four tokens per step, with short and long steps, at the start and after an idle time."""
    engine, clock = make_engine(shared_engine)
    metrics = Metrics(engine)
    engine.observers.append(metrics)
    launch = engine.runner.launch

    def slow_launch(plan, moves):
        launched = launch(plan, moves)
        clock.now += pause
        return launched

    engine.runner.launch = slow_launch
    try:
        for repeat in range(2 if idle else 1):
            if repeat:
                while engine.busy:
                    engine.step()
                clock.now += idle
            for index in range(4):
                engine.add(
                    f"{repeat} {index}",
                    [index + 3] * 10,
                    SamplingParams(max_tokens=100, ignore_eos=True),
                )
            start_time = clock.now
            while clock.now < start_time + 1.2 and engine.busy:
                engine.step()
            duration = min(clock.now - start_time, 1.0)
            tokens = 4 / pause * duration if clock.now - start_time >= 1 else 400
            assert metrics.recent(clock.now)["rates"]["generation"] == pytest.approx(
                tokens, rel=0.15, abs=8
            )
    finally:
        del engine.runner.launch


def test_prompt_tokens_count_in_the_prompt_rate(shared_engine):
    engine, clock = make_engine(shared_engine)
    metrics = Metrics(engine)
    engine.observers.append(metrics)
    engine.add("a", list(range(3, 203)), SamplingParams(max_tokens=3, ignore_eos=True))
    for _ in range(10):
        clock.now += 0.01
        engine.step()
    assert metrics.recent(clock.now)["rates"]["prompt"] == pytest.approx(200)


def test_list_of_waiting_requests_is_limited(shared_engine):
    engine, _ = make_engine(shared_engine)
    live = add_live_view(engine)
    for index in range(150):
        engine.add(str(index), [5] * 20, SamplingParams(max_tokens=100, n=2, ignore_eos=True))
    engine.step()
    view = live.look(engine)
    assert len(view["waiting"]) == 64
    assert (view["num_running"], view["num_waiting"]) == (2, 148)
    check_view(engine, view)


def test_number_of_cells_is_limited(shared_engine):
    """A large cache is shown in at most 2048 cells."""
    engine, _ = make_engine(shared_engine, 100_001)
    live = add_live_view(engine)
    engine.add("a", [5] * 200, SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in range(6):
        engine.step()
    for group in live.look(engine)["groups"]:
        assert (group["pages"], group["each"], len(group["cells"])) == (100_000, 49, 2041)
        assert np.sum(np.array(group["cells"]) == 1) >= 1
