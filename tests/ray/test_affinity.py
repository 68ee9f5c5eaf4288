"""Which replica a prompt goes to: by what was read where, within bounds on how uneven the load may
get.
"""

import json
import random
import sys
from collections import Counter

import pytest
import typer

from quire.__main__ import app
from quire.model.config import ModelError
from quire.serving.api.options import EngineOptions
from quire.serving.http.settings import ServerSettings
from quire.serving.ray import affinity as module
from quire.serving.ray.affinity import (
    CHUNK,
    MAX_PREFIXES,
    SLACK,
    Affinity,
    body_prefix,
    load_limit,
    prefix_digests,
    token_prefix,
)
from quire.serving.ray.scale import DeploymentPlan, ReplicaOptions


def body(**fields) -> bytes:
    return json.dumps(fields).encode()


def chat(*turns: str, **fields) -> bytes:
    return body(messages=[{"role": "user", "content": turn} for turn in turns], **fields)


LONG = ["x" * 700, "y" * 900, "z" * 300]


def test_a_conversation_begins_as_its_last_turn_did():
    before = body_prefix([], chat(*LONG[:2]))
    after = body_prefix([], chat(*LONG))
    assert len(before) > 4 and after[: len(before)] == before and len(after) > len(before)
    assert body_prefix([], chat(LONG[0], LONG[2]))[:2] == before[:2]
    for path in ("system", "instructions"):
        with_one = body_prefix([], chat(*LONG, **{path: "s" * 600}))
        assert (
            with_one[:2] == body_prefix([], chat("another", **{path: "s" * 600}))[:2]
            and with_one[0] != after[0]
        )


def test_tenants_share_nothing():
    names = {
        body_prefix(headers, chat(*LONG, **fields))[0]
        for headers in ([], [(b"authorization", b"Bearer a")], [(b"x-api-key", b"a")])
        for fields in ({}, {"cache_salt": "s"}, {"model": "m"})
    }
    assert len(names) == 9
    assert token_prefix(range(200), None) != token_prefix(range(200), "s")
    assert token_prefix(range(200), None)[:2] == token_prefix(range(150), None)[:2]


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[1]", b'"x"', b"\xff", b"[" * 100_000, b'{"prompt": {}}', b"null"]
)
def test_what_is_no_request_has_no_beginnings(raw):
    assert body_prefix([], raw) == ()


def test_of_a_huge_prompt_the_beginning_is_enough():
    assert len(body_prefix([], body(prompt="a" * 10**6))) == MAX_PREFIXES
    assert prefix_digests(b"", b"a" * (CHUNK - 1)) == ()


def test_to_the_one_that_has_read_most():
    known = Affinity()
    one = body_prefix([], chat(*LONG[:1]))
    two = body_prefix([], chat(*LONG))
    known.record_sent(one, "a")
    known.record_sent(two, "b")
    loads = {"a": 0, "b": 2, "c": 0}
    assert known.order(two, loads) == ["b", "a", "c"]
    assert known.order(two, loads, tried=["b"]) == ["a", "c", "b"]
    assert known.order((), loads)[0] == "c"  # which was not chosen yet
    assert known.order(two, loads | {"b": load_limit(0) + 1}) == ["a", "c", "b"]
    known.retain({"a", "c"})
    assert known.order(two, {"a": 0, "c": 0}) == ["a", "c"]
    assert not any("b" in readers for readers in known.readers.values())


def test_in_turn():
    known = Affinity("round-robin")
    chosen = []
    for _ in range(9):
        best = known.order(body_prefix([], chat(*LONG)), dict.fromkeys("abc", 0))[0]
        known.record_sent((), best)
        chosen.append(best)
    assert chosen == [*"abcabcabc"]


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "REMEMBERED", 50)
    known = Affinity()
    first = token_prefix(range(640), None)
    for salt in range(40):
        known.record_sent(token_prefix(range(640), str(salt)), "a")
        known.record_sent(first, "a")
    assert len(known.readers) == 50 and known.count_computed(first) == {"a": len(first)}


def simulated(routing: str, seed: int, replicas: int = 4) -> tuple[float, int, Counter]:
    """(the share of beginnings that were there, the most that one had more to do than the least,
    who answered).
    """
    rng = random.Random(seed)
    known = Affinity(routing)
    open_: list[tuple[float, str]] = []
    caches: dict[str, set] = {str(name): set() for name in range(replicas)}
    talks = [["s" * 2000] for _ in range(40)]
    hot = [str(rng.random()) * 300]
    hits = total = worst = 0
    answered: Counter = Counter()
    for step in range(2000):
        open_ = [(end, name) for end, name in open_ if end > step]
        loads = dict.fromkeys(caches, 0) | Counter(name for _, name in open_)
        talk = rng.choice(talks) if rng.random() < 0.7 else hot  # which many ask for
        if talk is not hot:
            del talk[1 if len(talk) > 10 else len(talk) :]
            talk.append(str(rng.random()) * 30)
        prefix = body_prefix([], chat(*talk))
        best = known.order(prefix, loads)[0]
        known.record_sent(prefix, best)
        hits = hits + sum(name in caches[best] for name in prefix)
        total = total + len(prefix)
        caches[best].update(prefix)
        worst = max(worst, loads[best] - load_limit(min(loads.values())))
        answered[best] += 1
        open_.append((step + rng.expovariate(1 / 20), best))
    return hits / total, worst, answered


@pytest.mark.parametrize("seed", range(3))
def test_more_is_found_and_nobody_drowns(seed):
    found, worst, answered = simulated("prefix", seed)
    in_turn, _, _ = simulated("round-robin", seed)
    assert found > in_turn + 0.1
    assert worst <= 0 and min(answered.values()) > 2000 / 4 / 2


@pytest.mark.parametrize("least", range(40))
def test_the_bound(least):
    assert least + SLACK <= load_limit(least) <= least + max(SLACK, least)


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ({"replicas": 0}, "replicas is 0"),
        ({"min_replicas": 2}, "max_replicas is not"),
        ({"target_ongoing_requests": 2.0}, "max_replicas is not"),
        ({"replicas": 2, "max_replicas": 3}, "leave one out"),
        ({"min_replicas": 4, "max_replicas": 3}, "at most max_replicas"),
        ({"max_replicas": 3, "target_ongoing_requests": 0}, "above 0"),
        ({"prefill_replicas": -1}, "at least 0"),
        ({"routing": "random"}, "prefix, round-robin"),
    ],
)
def test_scales_that_are_none(chosen, why):
    with pytest.raises(ModelError, match=why):
        ReplicaOptions(**chosen)


def test_how_many():
    options = EngineOptions(max_num_seqs=32).on("cpu")
    assert ReplicaOptions().scaling_arguments(options) == {"num_replicas": 1}
    [(_, scaled)] = ReplicaOptions(max_replicas=4).scaling_arguments(options).items()
    assert scaled == {
        "min_replicas": 1,
        "max_replicas": 4,
        "initial_replicas": 1,
        "target_ongoing_requests": 24,
    }
    options = EngineOptions(max_num_seqs=32, data_parallel_size=2).on("cpu")
    [(_, scaled)] = ReplicaOptions(max_replicas=4).scaling_arguments(options).items()
    assert scaled["target_ongoing_requests"] == 48
    assert ReplicaOptions(min_replicas=2, max_replicas=4, prefill_replicas=3).initial_count == 5


@pytest.mark.parametrize(
    ("models", "options", "scale", "why"),
    [
        (1, {"kv_cache_disk": "kv"}, {}, "kv_cache_disk is one process's own"),
        (1, {"trace": "file"}, {}, "trace is one"),
        (2, {}, {"prefill_replicas": 1}, "one model"),
        (
            1,
            {"enable_prefix_caching": False},
            {"prefill_replicas": 1},
            "needs enable_prefix_caching",
        ),
        (1, {"block_size": 0}, {}, "block_size is 0"),
    ],
)
def test_plans_that_are_none(models, options, scale, why):
    with pytest.raises(ModelError, match=why):
        DeploymentPlan(
            ((None, ("m",)),) * models, ServerSettings(), options, ReplicaOptions(**scale)
        )


def test_readers_need_room_for_what_they_hand_over():
    assert DeploymentPlan(
        ((None, ("m",)),), ServerSettings(), {}, ReplicaOptions(prefill_replicas=1)
    ).replica_options["kv_cache_host_bytes"]
    assert not DeploymentPlan(((None, ("m",)),), ServerSettings(), {}).replica_options


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--replicas", "2"], "--replicas needs --engine ray"),
        (["--ray-address", "auto"], "--ray-address needs --engine ray"),
        (["--engine", "slurm"], "it can be ray"),
        (["--engine", "ray", "--uds", "socket"], "--uds has no effect with --engine ray"),
        (["--engine", "ray", "--admin"], "--admin has no effect"),
        (["--engine", "ray", "--receive-seconds", "3"], "--receive-seconds has no effect"),
        (["--engine", "ray", "--state-dir", "state"], "--state-dir is of one server"),
        (["--engine", "ray", "--replica-resources", "CPU"], "write CPU=2,GPU=1"),
        (["--engine", "ray", "--replica-resources", "=2"], "write CPU=2,GPU=1"),
        (["--engine", "ray", "--routing", "random"], "routing is 'random'"),
        (["--engine", "ray"], "pip install 'quire\\[ray\\]'"),
    ],
)
def test_command_lines_that_are_none(flags, why, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # it is not installed
    with pytest.raises((ModelError, typer.TyperException), match=why):
        typer.main.get_command(app)(["serve", *flags], standalone_mode=False)
