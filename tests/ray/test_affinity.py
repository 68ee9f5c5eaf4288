"""Prefix-aware routing of prompts to replicas, within bounds on load imbalance."""

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
from quire.serving.ray import affinity as affinity_module
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


def json_body(**fields) -> bytes:
    return json.dumps(fields).encode()


def chat_body(*turns: str, **fields) -> bytes:
    return json_body(messages=[{"role": "user", "content": turn} for turn in turns], **fields)


LONG_TURNS = ["x" * 700, "y" * 900, "z" * 300]


def test_conversation_prefix_extends_the_previous_turn():
    prefix_before = body_prefix([], chat_body(*LONG_TURNS[:2]))
    prefix_after = body_prefix([], chat_body(*LONG_TURNS))
    assert (
        len(prefix_before) > 4
        and prefix_after[: len(prefix_before)] == prefix_before
        and len(prefix_after) > len(prefix_before)
    )
    assert body_prefix([], chat_body(LONG_TURNS[0], LONG_TURNS[2]))[:2] == prefix_before[:2]
    for path in ("system", "instructions"):
        prefix_with_field = body_prefix([], chat_body(*LONG_TURNS, **{path: "s" * 600}))
        assert (
            prefix_with_field[:2] == body_prefix([], chat_body("another", **{path: "s" * 600}))[:2]
            and prefix_with_field[0] != prefix_after[0]
        )


def test_tenants_share_no_prefixes():
    names = {
        body_prefix(headers, chat_body(*LONG_TURNS, **fields))[0]
        for headers in ([], [(b"authorization", b"Bearer a")], [(b"x-api-key", b"a")])
        for fields in ({}, {"cache_salt": "s"}, {"model": "m"})
    }
    assert len(names) == 9
    assert token_prefix(range(200), None) != token_prefix(range(200), "s")
    assert token_prefix(range(200), None)[:2] == token_prefix(range(150), None)[:2]


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[1]", b'"x"', b"\xff", b"[" * 100_000, b'{"prompt": {}}', b"null"]
)
def test_invalid_bodies_have_no_prefix(raw):
    assert body_prefix([], raw) == ()


def test_prefix_digests_are_bounded():
    assert len(body_prefix([], json_body(prompt="a" * 10**6))) == MAX_PREFIXES
    assert prefix_digests(b"", b"a" * (CHUNK - 1)) == ()


def test_prefix_routing_prefers_longest_cached_prefix():
    affinity = Affinity()
    short_prefix = body_prefix([], chat_body(*LONG_TURNS[:1]))
    long_prefix = body_prefix([], chat_body(*LONG_TURNS))
    affinity.record_sent(short_prefix, "a")
    affinity.record_sent(long_prefix, "b")
    loads = {"a": 0, "b": 2, "c": 0}
    assert affinity.order(long_prefix, loads) == ["b", "a", "c"]
    assert affinity.order(long_prefix, loads, tried=["b"]) == ["a", "c", "b"]
    assert affinity.order((), loads)[0] == "c"  # the replica that was not chosen yet
    assert affinity.order(long_prefix, loads | {"b": load_limit(0) + 1}) == ["a", "c", "b"]
    affinity.retain({"a", "c"})
    assert affinity.order(long_prefix, {"a": 0, "c": 0}) == ["a", "c"]
    assert not any("b" in readers for readers in affinity.readers.values())


def test_round_robin_routing():
    affinity = Affinity("round-robin")
    chosen_replicas = []
    for _ in range(9):
        best = affinity.order(body_prefix([], chat_body(*LONG_TURNS)), dict.fromkeys("abc", 0))[0]
        affinity.record_sent((), best)
        chosen_replicas.append(best)
    assert chosen_replicas == [*"abcabcabc"]


def test_remembered_prefixes_are_bounded(monkeypatch):
    monkeypatch.setattr(affinity_module, "REMEMBERED", 50)
    affinity = Affinity()
    first = token_prefix(range(640), None)
    for salt in range(40):
        affinity.record_sent(token_prefix(range(640), str(salt)), "a")
        affinity.record_sent(first, "a")
    assert len(affinity.readers) == 50 and affinity.count_computed(first) == {"a": len(first)}


def simulate_routing(routing: str, seed: int, replicas: int = 4) -> tuple[float, int, Counter]:
    """Simulate requests; return (hit rate of prefixes, worst load above the limit, number of
    requests by replica).
    """
    rng = random.Random(seed)
    affinity = Affinity(routing)
    open_: list[tuple[float, str]] = []
    caches: dict[str, set] = {str(name): set() for name in range(replicas)}
    conversations = [["s" * 2000] for _ in range(40)]
    popular_prompt = [str(rng.random()) * 300]
    num_hits = num_prefixes = worst_imbalance = 0
    num_answered: Counter = Counter()
    for step in range(2000):
        open_ = [(end, name) for end, name in open_ if end > step]
        loads = dict.fromkeys(caches, 0) | Counter(name for _, name in open_)
        conversation = (
            rng.choice(conversations) if rng.random() < 0.7 else popular_prompt
        )  # a popular prompt
        if conversation is not popular_prompt:
            del conversation[1 if len(conversation) > 10 else len(conversation) :]
            conversation.append(str(rng.random()) * 30)
        prefix = body_prefix([], chat_body(*conversation))
        best = affinity.order(prefix, loads)[0]
        affinity.record_sent(prefix, best)
        num_hits = num_hits + sum(name in caches[best] for name in prefix)
        num_prefixes = num_prefixes + len(prefix)
        caches[best].update(prefix)
        worst_imbalance = max(worst_imbalance, loads[best] - load_limit(min(loads.values())))
        num_answered[best] += 1
        open_.append((step + rng.expovariate(1 / 20), best))
    return num_hits / num_prefixes, worst_imbalance, num_answered


@pytest.mark.parametrize("seed", range(3))
def test_prefix_routing_raises_hit_rate_within_load_limit(seed):
    prefix_hit_rate, worst_imbalance, num_answered = simulate_routing("prefix", seed)
    round_robin_hit_rate, _, _ = simulate_routing("round-robin", seed)
    assert prefix_hit_rate > round_robin_hit_rate + 0.1
    assert worst_imbalance <= 0 and min(num_answered.values()) > 2000 / 4 / 2


@pytest.mark.parametrize("min_load", range(40))
def test_load_limit(min_load):
    assert min_load + SLACK <= load_limit(min_load) <= min_load + max(SLACK, min_load)


@pytest.mark.parametrize(
    ("chosen", "message_pattern"),
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
def test_invalid_replica_options_are_rejected(chosen, message_pattern):
    with pytest.raises(ModelError, match=message_pattern):
        ReplicaOptions(**chosen)


def test_scaling_arguments():
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
    ("models", "options", "scale", "message_pattern"),
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
def test_invalid_deployment_plans_are_rejected(models, options, scale, message_pattern):
    with pytest.raises(ModelError, match=message_pattern):
        DeploymentPlan(
            ((None, ("m",)),) * models, ServerSettings(), options, ReplicaOptions(**scale)
        )


def test_prefill_replicas_need_host_cache():
    assert DeploymentPlan(
        ((None, ("m",)),), ServerSettings(), {}, ReplicaOptions(prefill_replicas=1)
    ).replica_options["kv_cache_host_bytes"]
    assert not DeploymentPlan(((None, ("m",)),), ServerSettings(), {}).replica_options


@pytest.mark.parametrize(
    ("flags", "message_pattern"),
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
def test_invalid_ray_flags_are_rejected(flags, message_pattern, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if not installed
    with pytest.raises((ModelError, typer.TyperException), match=message_pattern):
        typer.main.get_command(app)(["serve", *flags], standalone_mode=False)
