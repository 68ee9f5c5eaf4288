"""The engine against the decoder without a cache: random mixes of requests, token for token."""

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.model.families.quill import small_cache_config
from quire.model.weights import abstract
from quire.serving.api.errors import RequestError
from quire.serving.api.outputs import NO_TOKEN_ALLOWED
from quire.serving.api.params import SamplingParams, Terms
from quire.serving.cache import disk_cache as disk_module
from quire.serving.cache.disk_cache import DiskCache
from quire.serving.cache.host_cache import HostCache
from quire.serving.cache.page_table import PageTable
from quire.serving.device import state as state_module
from quire.serving.device.state import page_bytes
from quire.serving.device.step_shape import StepShape
from quire.serving.engine.engine import Engine
from quire.serving.engine.runner import Runner
from quire.serving.engine.scheduler import POINT
from quire.serving.observe.trace import Trace
from quire.sharding.spec import random_arrays
from quire.tests.support import uncached
from quire.tests.support.cases import thinned

LENGTH = 64
VOCAB = 96
CONFIG = small_cache_config(
    VOCAB,
    dim=32,
    num_layers=4,
    heads=4,
    head_dim=16,
    ffn=48,
    window=9,
    global_every=2,
    max_len=LENGTH,
    dtype="float32",
)


@pytest.fixture(scope="module")
def weights():
    return random_arrays(abstract(CONFIG), seed=1)


@pytest.fixture(scope="module")
def oracle(weights):
    """Log-probabilities [T, V] of every position of one sequence, from the decoder without a
    cache.
    """
    forward = jax.jit(partial(uncached.forward, config=CONFIG))

    def logprobs(tokens: list[int]) -> np.ndarray:
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(forward(weights, padded), np.float64)[0, : len(tokens)]
        logits -= logits.max(axis=-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))

    return logprobs


def make(
    weights, num_pages=(40, 40), compiled: Engine | None = None, config=CONFIG, host_cache=None
) -> Engine:
    """An engine for four sequences and 16 rows; `compiled` lends its steps to one of the same
    shape.
    """
    runner = Runner(
        config, weights, StepShape.largest(4, 16, 16), num_pages, 8, LENGTH, True, lambda: weights
    )
    if compiled is not None:
        runner.compiled, runner.page_copier.programs = (
            compiled.runner.compiled,
            compiled.runner.page_copier.programs,
        )
    return Engine(
        runner, None, [PageTable(num_pages, 8, CONFIG.windows, host_cache=host_cache)], LENGTH
    )


@pytest.fixture(scope="module")
def engine(weights):
    engine = make(weights)
    engine.runner.warm_up()
    return engine


def run(
    engine: Engine, arrivals: dict[int, list], aborts: dict[int, list[str]] | None = None
) -> dict:
    """Drive the engine; `arrivals` maps a step to (id, tokens, params), `aborts` a step to ids."""
    requests = {}
    step = 0
    while engine.busy or step <= max(arrivals):
        for name, tokens, params in arrivals.get(step, ()):
            requests[name] = engine.add(name, tokens, params)
        for name in (aborts or {}).get(step, ()):
            engine.abort(name)
        engine.step()
        engine.scheduler.check()
        step += 1
        assert step < 5000, "the engine makes no progress"
    return {name: request.output() for name, request in requests.items()}


def check_greedy(oracle, output, params: SamplingParams) -> None:
    """Every token is the oracle's best given those before it, with the oracle's log-probability,
    and the end is due.
    """
    answer = output.outputs[0]
    prompt = list(output.prompt_token_ids)
    tokens = prompt + list(answer.token_ids)
    scores = oracle(tokens)
    for place, token in enumerate(answer.token_ids):
        row = scores[len(prompt) + place - 1]
        assert token == row.argmax()
        if params.logprobs is not None:
            entry = answer.logprobs[place]
            assert entry[token].logprob == pytest.approx(row[token], abs=1e-4)
            assert entry[token].rank == 1
            best = np.argsort(-row)[: params.logprobs]
            assert {t for t, e in entry.items() if e.rank <= params.logprobs} == set(best.tolist())
    stops = set(params.stop_token_ids or ())
    early = [token in stops for token in answer.token_ids]
    assert not any(early[:-1])
    limit = min(params.max_tokens, LENGTH - len(prompt))
    if answer.finish_reason == "stop":
        assert early[-1]
        assert answer.stop_reason == answer.token_ids[-1]
    elif answer.finish_reason == "length":
        assert len(answer.token_ids) == limit
        assert not early[-1]
    else:
        assert answer.finish_reason == "abort"
        assert len(answer.token_ids) <= limit


def random_mix(rng) -> tuple[dict, dict, dict]:
    arrivals = {}
    aborts = {}
    params = {}
    for index in range(int(rng.integers(1, 8))):
        name = str(index)
        params[name] = SamplingParams(
            temperature=0,
            max_tokens=int(rng.integers(1, 30)),
            stop_token_ids=rng.integers(0, VOCAB, int(rng.integers(0, 6))).tolist(),
            logprobs=int(rng.integers(0, 5)) if rng.random() < 0.5 else None,
            ignore_eos=True,
        )
        start = int(rng.integers(0, 12))
        length = (
            int(rng.integers(1, 50))
            if rng.random() < 0.7
            else int(rng.choice([1, 7, 8, 9, 16, 17, 62, 63]))
        )
        arrivals.setdefault(start, []).append(
            (name, rng.integers(0, VOCAB, length).tolist(), params[name])
        )
        if rng.random() < 0.2:
            aborts.setdefault(start + int(rng.integers(0, 15)), []).append(name)
    return arrivals, aborts, params


@pytest.mark.parametrize("block", thinned(range(10), [0, 1]))
def test_random_mixes_equal_the_naive_decoder(engine, oracle, block):
    """20 mixes of arrivals, lengths, stops and aborts in each block: 200 in all, and nothing is
    compiled.
    """
    rng = np.random.default_rng(block)
    oracle([1])  # its own compilation must not count
    before = engine.runner.compiles.recompiles
    for _ in range(20):
        arrivals, aborts, params = random_mix(rng)
        for name, output in run(engine, arrivals, aborts).items():
            check_greedy(oracle, output, params[name])
        assert all(group.num_free == group.num_pages - 1 for group in engine.tables[0].pools)
    assert engine.runner.compiles.recompiles == before


class Watched:
    """A result of a step that tells how it is fetched."""

    def __init__(self, name: str, array: jax.Array, told: list):
        self.name = name
        self.array = array
        self.told = told

    def copy_to_host_async(self) -> None:
        self.told.append(("begin", self.name))
        self.array.copy_to_host_async()

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        self.told.append(("end", self.name))
        return np.asarray(self.array)


def test_one_array_up_and_one_down_a_step(weights, engine):
    """While the same sequences decode, with tokens that only the device knows; nothing else moves
    or waits.
    """
    engine = make(weights, compiled=engine)
    runner = engine.runner
    told = []
    runner.remote = True

    def watch(compiled):
        def call(weights, state, buffer):
            arrays = jax.tree.leaves((weights, state))
            assert all(isinstance(leaf, jax.Array) for leaf in arrays)
            assert isinstance(buffer, np.ndarray) and buffer.dtype == np.int32
            told.append(("launch", buffer.nbytes))
            sampled, hidden_RD, state = compiled(weights, state, jax.device_put(buffer))
            names = {
                name: Watched(name, leaf, told)
                for name, leaf in vars(sampled).items()
                if leaf is not None
            }
            return sampled.replace(**names), Watched("hidden_RD", hidden_RD, told), state

        return call

    runner.compiled = {size: watch(compiled) for size, compiled in runner.compiled.items()}
    params = SamplingParams(temperature=1, max_tokens=30, ignore_eos=True)
    for index in range(3):
        engine.add(str(index), [index] * 5, params)
    for _ in range(4):
        engine.step()
    told.clear()
    pages = [len(seq.cache.pages[0]) for seq in engine.scheduler.running]
    with jax.transfer_guard("disallow"):  # but for what is asked for by name, as above
        for _ in range(20):
            engine.step()
    step = [("launch", told[0][1]), ("begin", "tokens_R"), ("end", "tokens_R")]
    assert told == step * 20
    assert all(
        len(seq.cache.pages[0]) > before
        for seq, before in zip(engine.scheduler.running, pages, strict=True)
    )
    while engine.busy:
        engine.step()


def test_a_step_made_from_the_last_is_the_one_made_anew(engine, monkeypatch):
    """But for tokens that the host knows by now and the device has too."""
    builder = engine.runner.batch_builder
    build = builder.build
    steps = builder.decode_steps[0]
    advanced = 0

    def both(plan):
        nonlocal advanced
        steady = [*steps]
        size, buffer = build(plan)
        last = [*steps]
        steps.clear()
        advanced += bool(steady and last) and last[0].seqs is steady[0].seqs
        other, fresh = build(plan)
        steps.clear()
        steps.extend(last)
        one, two = (builder.layouts[size].views(x) for x in (buffer, fresh))
        held = one.tokens_T < 0
        np.testing.assert_array_equal(-1 - one.tokens_T[held], one.owners_T[held])
        two.tokens_T[held] = one.tokens_T[held]
        assert size == other
        jax.tree.map(np.testing.assert_array_equal, one, two)
        return size, buffer

    monkeypatch.setattr(builder, "build", both)
    rng = np.random.default_rng(21)
    for _ in range(20):
        arrivals, aborts, _ = random_mix(rng)
        run(engine, arrivals, aborts)
    assert advanced > 100


@pytest.fixture(params=["", "off"], ids=["native", "xla"])
def kernels(request, monkeypatch):
    """With the C++ kernels, where there is a compiler, and with XLA's own."""
    monkeypatch.setenv("QUIRE_NATIVE", request.param)
    jax.clear_caches()  # the choice is no part of a trace's key
    yield request.param
    jax.clear_caches()


@pytest.mark.nightly  # test_speculative.py has those that verify
@pytest.mark.parametrize("kernels", ["off"], indirect=True)
def test_steps_without_branches_draw_the_same(weights, kernels):
    """Those that a device of its own runs while nobody wants more than a temperature and min-p."""
    engine = make(weights)
    engine.runner.remote = True
    engine.runner.warm_up()
    used = []
    answers = []

    def told(size, program):
        def call(*given):
            used.append(size)
            return program(*given)

        return call

    def answer(**more) -> list:
        requests = [
            (
                str(i),
                [i, 7] * 3,
                SamplingParams(
                    temperature=t, min_p=p, seed=i, max_tokens=9, ignore_eos=True, **more
                ),
            )
            for i, (t, p) in enumerate([(0, 0), (1.0, 0), (0.7, 0.1), (0, 0)])
        ]
        return [output.outputs[0].token_ids for output in run(engine, {0: requests}).values()]

    plain = {size: told(size, program) for size, program in engine.runner.plain.items()}
    assert set(plain) == {size for size in engine.runner.compiled if size.samples >= size.rows}
    for engine.runner.plain in ({}, plain):
        answers.append(answer())
    assert answers[0] == answers[1] and len(used) == 8  # each token but that of the prompts' step
    used.clear()
    for more in (
        {"top_k": 3},
        {"top_p": 0.9},
        {"presence_penalty": 1.0},
        {"logit_bias": {3: 1.0}},
        {"logprobs": 1},
    ):
        answer(**more)
    answer(min_tokens=9)
    assert not used
    assert not engine.runner.compiles.recompiles


@pytest.mark.parametrize("kernels", ["off"], indirect=True)
@pytest.mark.slow
def test_random_mixes_without_the_kernels(weights, oracle, kernels):
    engine = make(weights)
    rng = np.random.default_rng(77)
    engine.runner.warm_up()
    for _ in range(10):
        arrivals, aborts, params = random_mix(rng)
        for name, output in run(engine, arrivals, aborts).items():
            check_greedy(oracle, output, params[name])


@pytest.mark.parametrize(
    "kernels", thinned(["", "off"], [""]), indirect=True, ids=["native", "xla"]
)
@pytest.mark.parametrize("dtype", thinned(["int8", "fp8", "bfloat16", "int4"], ["int8", "int4"]))
@pytest.mark.slow
def test_narrow_pages_lose_little_and_nothing_by_company(weights, oracle, kernels, dtype):
    """Keys and values rounded in the cache: near the oracle, and the same bits alone and in a
    batch.
    """
    config = replace(CONFIG, kv_cache_dtype=dtype)
    engine = make(weights, config=config)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.runner.state.pages))
    assert held == sum(40 * page_bytes(config, group, 8) for group in range(2))
    engine.runner.warm_up()
    rng = np.random.default_rng(13)
    params = SamplingParams(
        temperature=0, max_tokens=12, logprobs=0, prompt_logprobs=0, ignore_eos=True
    )
    prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(1, 50, 9)]
    together = run(engine, {0: [(str(i), p, params) for i, p in enumerate(prompts)]})
    worst = 0.0
    for index, prompt in enumerate(prompts):
        (alone,) = run(engine, {0: [("x", prompt, params)]}).values()
        other = together[str(index)]
        assert alone.outputs[0].token_ids == other.outputs[0].token_ids
        # XLA's products of heads this small are not promised to the last bit
        if kernels != "off" and dtype != "fp8":
            assert alone.outputs == other.outputs and alone.prompt_logprobs == other.prompt_logprobs
        tokens = prompt + list(alone.outputs[0].token_ids)
        scores = oracle(tokens)
        entries = [*alone.prompt_logprobs[1:], *alone.outputs[0].logprobs]
        for place, entry in enumerate(entries):
            worst = max(
                worst, abs(entry[tokens[place + 1]].logprob - scores[place, tokens[place + 1]])
            )
    # it is rounded, and not by much
    assert 1e-5 < worst < {"fp8": 0.4, "int4": 0.8}.get(dtype, 0.15)


def test_layers_that_stay_wide(weights, oracle):
    """Each layer's pages have their own type; where all are skipped they are as without int4."""
    every = replace(CONFIG, kv_cache_dtype="int4", kv_cache_skips=CONFIG.kv_layers)
    wide, same = (
        jax.tree.map(lambda x: (x.shape, x.dtype), make(weights, config=c).runner.state)
        for c in (CONFIG, every)
    )
    assert wide == same
    mixed = replace(CONFIG, kv_cache_dtype="int4", kv_cache_skips=CONFIG.kv_layers[:1])
    engine = make(weights, config=mixed)
    first, *others = (engine.runner.state.pages[index] for index in CONFIG.kv_layers)
    assert first.k_PSKH.dtype == jnp.float32 and first.k_scale_PKS is None
    assert all(
        pages.k_PSKH.dtype == jnp.uint8 and pages.v_scale_PKS is not None for pages in others
    )
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.runner.state.pages))
    assert held == sum(40 * page_bytes(mixed, group, 8) for group in range(2))
    engine.runner.warm_up()
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0, prompt_logprobs=0)
    prompt = np.random.default_rng(3).integers(0, VOCAB, 40).tolist()
    (output,) = run(engine, {0: [("x", prompt, params)]}).values()
    scores = oracle(prompt)
    found = [
        entry[token].logprob
        for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    ]
    worst = np.abs(found - scores[np.arange(39), prompt[1:]]).max()
    assert 1e-5 < worst < 0.8


def test_preemption_changes_nothing(weights, oracle, engine):
    """A pool too small for all: sequences give way and come back, with the same tokens."""
    engine = make(weights, compiled=engine)
    engine.tables[0] = engine.scheduler.replicas[0].table = PageTable((14, 40), 8, CONFIG.windows)
    rng = np.random.default_rng(5)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    arrivals = {0: [(str(i), rng.integers(0, VOCAB, 20).tolist(), params) for i in range(6)]}
    outputs = run(engine, arrivals)
    assert sum(output.metrics.num_preemptions for output in outputs.values()) > 0
    for output in outputs.values():
        check_greedy(oracle, output, params)


def test_pages_nobody_owns_may_hold_anything(weights, oracle, engine):
    """Every page starts as NaN, the dummy page too; no row may ever see what it has not been
    given.
    """
    engine = make(weights, compiled=engine)
    pages = jax.tree.map(lambda page: jnp.full_like(page, jnp.nan), engine.runner.state.pages)
    engine.runner.state = engine.runner.state.replace(pages=pages)
    rng = np.random.default_rng(9)
    for _ in range(10):
        arrivals, aborts, params = random_mix(rng)
        for name, output in run(engine, arrivals, aborts).items():
            check_greedy(oracle, output, params[name])


def test_prompt_logprobs(engine, oracle):
    rng = np.random.default_rng(3)
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 2, 17, 50)]
    outputs = run(engine, {0: [(str(i), p, params) for i, p in enumerate(prompts)]})
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        scores = oracle(prompt)
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for place, entry in enumerate(output.prompt_logprobs[1:]):
            row = scores[place]
            token = prompt[place + 1]
            assert entry[token].logprob == pytest.approx(row[token], abs=1e-4)
            assert entry[token].rank == 1 + (row > row[token]).sum()
            assert set(np.argsort(-row)[:2].tolist()) <= set(entry)


def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch(engine):
    rng = np.random.default_rng(11)
    prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(1, 40, 12)]
    params = [
        SamplingParams(
            temperature=1.0, top_p=0.9, top_k=20, seed=100 + i, max_tokens=12, ignore_eos=True
        )
        for i in range(len(prompts))
    ]
    alone = [
        run(engine, {0: [("x", p, s)]})["x"].outputs[0].token_ids
        for p, s in zip(prompts, params, strict=True)
    ]
    for trial in range(3):
        starts = np.random.default_rng(trial).integers(0, 20, len(prompts))
        arrivals: dict[int, list] = {}
        for i, start in enumerate(starts):
            arrivals.setdefault(int(start), []).append((str(i), prompts[i], params[i]))
        outputs = run(engine, arrivals)
        assert [outputs[str(i)].outputs[0].token_ids for i in range(len(prompts))] == alone


def test_n_gives_different_answers_that_a_seed_repeats(engine):
    params = SamplingParams(temperature=1.0, n=4, seed=7, max_tokens=10, ignore_eos=True)
    first = run(engine, {0: [("a", [1, 2, 3], params)]})["a"]
    again = run(engine, {0: [("a", [1, 2, 3], params)]})["a"]
    texts = [tuple(answer.token_ids) for answer in first.outputs]
    assert texts == [tuple(answer.token_ids) for answer in again.outputs]
    assert len(set(texts)) == 4
    assert [answer.index for answer in first.outputs] == [0, 1, 2, 3]


def test_penalties_bias_and_bans_reach_the_tokens(engine, oracle):
    prompt = [5, 6, 7]
    plain = run(
        engine, {0: [("a", prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))]}
    )["a"]
    tokens = plain.outputs[0].token_ids

    def greedy(**settings):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **settings)
        return run(engine, {0: [("a", prompt, params)]})["a"].outputs[0].token_ids

    assert set(greedy(allowed_token_ids=[3, 4])) <= {3, 4}
    assert greedy(logit_bias={9: 100.0}) == [9] * 12
    assert tokens[0] not in greedy(logit_bias={tokens[0]: -100.0})
    unrepeated = greedy(presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=50.0)
    assert len(set(unrepeated)) == 12
    assert not set(unrepeated) & set(prompt)
    # a naive loop with the same rule, token by token
    naive = list(prompt)
    for _ in range(12):
        row = oracle(naive)[-1].copy()
        for token in set(naive[3:]):
            row[token] -= 0.5 + 0.25 * naive[3:].count(token)
        naive.append(int(row.argmax()))
    assert greedy(presence_penalty=0.5, frequency_penalty=0.25) == naive[3:]


def test_min_tokens_hold_off_the_stop(engine):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    free = run(engine, {0: [("a", [8, 9], params)]})["a"].outputs[0].token_ids
    stop = free[2]
    held = SamplingParams(
        temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[stop], min_tokens=6
    )
    answer = run(engine, {0: [("a", [8, 9], held)]})["a"].outputs[0]
    assert stop not in answer.token_ids[:6]
    assert len(answer.token_ids) >= 6


@pytest.mark.parametrize(
    ("tokens", "settings", "words"),
    [
        ([], {}, "empty"),
        ([VOCAB], {}, f"0 to {VOCAB - 1}"),
        ([-1], {}, "-1"),
        ([1] * LENGTH, {}, f"at most {LENGTH - 1}"),
        ([1], {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ([1], {"logit_bias": {VOCAB + 1: 1.0}}, "logit_bias"),
        ([1], {"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
        ([1], {"stop": "x"}, "tokenizer"),
    ],
)
def test_bad_requests_are_refused_and_hurt_nobody(engine, oracle, tokens, settings, words):
    good = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    healthy = engine.add("healthy", [1, 2, 3], good)
    engine.step()
    with pytest.raises(RequestError, match=words):
        engine.add("bad", tokens, SamplingParams(max_tokens=4, **settings))
    while engine.busy:
        engine.step()
    check_greedy(oracle, healthy.output(), good)


def test_what_can_never_fit_is_refused(weights):
    engine = make(weights, num_pages=(4, 4))
    with pytest.raises(RequestError, match="holds 24 at most"):
        engine.add("a", [1] * 20, SamplingParams(max_tokens=20))


def test_a_step_that_raises_fails_its_requests_and_no_others(weights, oracle, engine, monkeypatch):
    engine = make(weights, compiled=engine)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    requests = [engine.add(str(i), [1 + i, 2, 3], params) for i in range(8)]
    engine.step()
    launch = engine.runner.launch

    def explode(plan, moves):
        monkeypatch.setattr(engine.runner, "launch", launch)
        raise RuntimeError("injected")

    monkeypatch.setattr(engine.runner, "launch", explode)
    while engine.busy:
        engine.step()
        engine.scheduler.check()
    reasons = [request.output().outputs[0].finish_reason for request in requests]
    assert reasons == ["error"] * 4 + ["length"] * 4
    for request in requests[4:]:
        check_greedy(oracle, request.output(), params)


def test_a_row_of_nan_fails_alone(oracle, weights):
    """A poisoned embedding row makes the one request that uses it fail; its neighbours go on."""
    broken = weights.replace(
        embed_VD=weights.embed_VD.at[90].set(jnp.nan), head_VD=weights.embed_VD
    )
    engine = make(broken)
    engine.runner.warm_up()
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, allowed_token_ids=list(range(90))
    )
    outputs = run(
        engine,
        {0: [("good", [1, 2, 3], params), ("bad", [4, 90, 5], params), ("also", [7] * 20, params)]},
    )
    assert outputs["bad"].outputs[0].finish_reason == "error"
    for name in ("good", "also"):
        answer = outputs[name].outputs[0]
        assert answer.finish_reason == "length"
        tokens = list(outputs[name].prompt_token_ids) + list(answer.token_ids)
        rows = oracle(tokens)[:, :90].argmax(axis=-1)
        assert rows[len(tokens) - 9 : -1].tolist() == list(answer.token_ids)


@pytest.mark.parametrize("scored", [False, True])
def test_request_that_bans_every_token_leaves_the_cached_prompt_alone(engine, scored):
    """It ends with an error that is its own; only broken logits are a reason to distrust computed
    pages.
    """
    prompt = list(range(50))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = bits(run(engine, {0: [("first", prompt, params)]})["first"])
    banned = SamplingParams(
        max_tokens=8, min_tokens=3, allowed_token_ids=[5], stop_token_ids=[5], ignore_eos=True,
        prompt_logprobs=0 if scored else None,
    )  # fmt: skip
    answer = run(engine, {0: [("banned", prompt, banned)]})["banned"].outputs[0]
    assert (answer.finish_reason, answer.stop_reason, list(answer.token_ids)) == (
        "error",
        NO_TOKEN_ALLOWED,
        [],
    )
    again = run(engine, {0: [("again", prompt, params)]})["again"]
    assert again.num_cached_tokens == 49 and bits(again) == expected


# The prefix cache


def without_cache(weights, compiled: Engine) -> Engine:
    engine = make(weights, compiled=compiled)
    engine.tables[0].keeps_prefixes = False
    return engine


def bits(output) -> list:
    """The tokens of a result and the bits of their log-probabilities."""
    return [
        (
            list(answer.token_ids),
            [{t: e.logprob for t, e in entry.items()} for entry in answer.logprobs or ()],
        )
        for answer in output.outputs
    ]


def turns(rng, count: int) -> list[list[int]]:
    """Prompts that begin with parts of each other, as turns of a chat and users of one system
    prompt do.
    """
    prompts = [rng.integers(0, VOCAB, int(rng.integers(1, 30))).tolist()]
    while len(prompts) < count:
        start = prompts[int(rng.integers(len(prompts)))]
        kept = int(rng.integers(0, len(start) + 1)) if rng.random() < 0.5 else len(start)
        prompts.append(
            (start[:kept] + rng.integers(0, VOCAB, int(rng.integers(1, 20))).tolist())[: LENGTH - 1]
        )
    return prompts


@pytest.mark.parametrize("block", thinned(range(5), [0]))
def test_a_prefix_hit_changes_no_bit(weights, engine, block):
    """Requests that begin alike, greedy and drawn, with penalties or none, also where pages are
    soon taken again.
    """
    rng = np.random.default_rng(100 + block)
    plain = without_cache(weights, engine)
    small = make(weights, compiled=engine)
    small.tables[0] = small.scheduler.replicas[0].table = PageTable((16, 14), 8, CONFIG.windows)
    cached = {"roomy": 0, "small": 0}
    for _ in range(6):
        arrivals: dict[int, list] = {}
        for index, prompt in enumerate(turns(rng, 8)):
            params = SamplingParams(
                temperature=float(rng.choice([0, 1])),
                seed=index,
                max_tokens=int(rng.integers(1, 20)),
                repetition_penalty=float(rng.choice([1, 1.3])),
                frequency_penalty=float(rng.choice([0, 0.7])),
                logprobs=2,
                ignore_eos=True,
            )
            arrivals.setdefault(int(rng.integers(0, 20)), []).append((str(index), prompt, params))
        expected = {name: bits(output) for name, output in run(plain, arrivals).items()}
        for name, other in (("roomy", engine), ("small", small)):
            outputs = run(other, arrivals)
            assert {key: bits(output) for key, output in outputs.items()} == expected
            cached[name] += sum(output.num_cached_tokens for output in outputs.values())
    assert cached["roomy"] > 100 and cached["small"] > 0


def test_the_same_prompt_again_computes_its_last_page_alone(weights, engine):
    engine = make(weights, compiled=engine)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    prompt = list(range(41))
    rows = []
    launch = engine.runner.launch
    engine.runner.launch = lambda plan, moves: rows.append(plan.num_tokens) or launch(plan, moves)
    first = run(engine, {0: [("a", prompt, params)]})["a"]
    rows.clear()
    again = run(engine, {0: [("b", prompt, params)]})["b"]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 40)
    assert rows == [1, 1]
    assert bits(first) == bits(again)
    longer = run(engine, {0: [("c", [*prompt, *again.outputs[0].token_ids, 5], params)]})["c"]
    # the last page is a copy of the one that the second request left
    assert longer.num_cached_tokens == 42


def test_answers_of_one_request_share_its_prompt(weights, engine):
    engine = make(weights, compiled=engine)
    most = 0

    def watch(plan, moves, launch=engine.runner.launch):
        nonlocal most
        most = max(
            most, sum(group.num_pages - 1 - group.num_free for group in engine.tables[0].pools[:1])
        )
        return launch(plan, moves)

    engine.runner.launch = watch
    params = SamplingParams(temperature=1, n=4, seed=1, max_tokens=6, ignore_eos=True)
    run(engine, {0: [("a", list(range(41)), params)]})
    assert most == 5 + 4  # five pages of the prompt, and one of each answer


def test_a_salt_keeps_prompts_apart(weights, engine):
    engine = make(weights, compiled=engine)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    cached = []
    for name, salt in enumerate((None, "a", "b", "a", None)):
        request = engine.add(str(name), list(range(30)), params, terms=Terms(cache_salt=salt))
        while engine.busy:
            engine.step()
        cached.append(request.output().num_cached_tokens)
    assert cached == [0, 0, 0, 29, 29]
    for wrong in ("", 7):
        with pytest.raises(RequestError, match="cache_salt"):
            Terms(cache_salt=wrong)


def test_what_failed_is_not_found_again(weights, engine):
    """Pages of a row that is not a number leave the cache, and a step that raises empties it."""
    engine = make(weights, compiled=engine)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompt = list(range(30))
    engine.runner.weights = weights.replace(embed_VD=weights.embed_VD * jnp.nan)
    assert run(engine, {0: [("a", prompt, params)]})["a"].outputs[0].finish_reason == "error"
    engine.runner.weights = weights
    assert run(engine, {0: [("b", prompt, params)]})["b"].num_cached_tokens == 0
    assert run(engine, {0: [("c", prompt, params)]})["c"].num_cached_tokens == 29
    list(engine.lifecycle.recover(RuntimeError("the device is gone")))
    assert run(engine, {0: [("d", prompt, params)]})["d"].num_cached_tokens == 0


def test_prompt_logprobs_are_computed_whatever_is_cached(weights, engine, oracle):
    engine = make(weights, compiled=engine)
    prompt = list(range(30))
    run(engine, {0: [("a", prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))]})
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    output = run(engine, {0: [("b", prompt, params)]})["b"]
    assert output.num_cached_tokens == 0
    scores = oracle(prompt)
    for place, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry[prompt[place + 1]].logprob == pytest.approx(
            scores[place, prompt[place + 1]], abs=1e-4
        )


# What has no room on the device


def host_cache_for(engine: Engine, host_pages: int, disk: DiskCache | None = None) -> HostCache:
    runner = engine.runner
    sizes = [
        page_bytes(runner.config, group, runner.page_size) for group in range(len(runner.num_pages))
    ]
    return HostCache(sizes, host_pages * max(sizes), disk, b"this model")


def chats(rng, count: int) -> dict[int, list]:
    """Requests whose prompts begin alike, one after the other and some together."""
    arrivals: dict[int, list] = {}
    for index, prompt in enumerate(turns(rng, count)):
        params = SamplingParams(
            temperature=float(rng.choice([0, 1])),
            seed=index,
            max_tokens=8,
            logprobs=1,
            ignore_eos=True,
        )
        arrivals.setdefault(int(rng.integers(0, 60)), []).append((str(index), prompt, params))
    return arrivals


@pytest.mark.parametrize("host_pages", [4, 400])
def test_pages_that_come_back_from_host_and_disk_change_no_bit(
    weights, engine, host_pages, tmp_path
):
    """A pool in which everything has to leave, copies in host memory with room for some or for all,
    and a folder.
    """
    rng = np.random.default_rng(host_pages)
    plain = without_cache(weights, engine)
    disk = DiskCache(tmp_path, 1 << 30)
    host_cache = host_cache_for(engine, host_pages, disk)
    small = make(weights, compiled=engine)
    small.tables[0] = small.scheduler.replicas[0].table = PageTable(
        (16, 14), 8, CONFIG.windows, host_cache=host_cache
    )
    bare = make(weights, compiled=engine)
    bare.tables[0] = bare.scheduler.replicas[0].table = PageTable((16, 14), 8, CONFIG.windows)
    cached = {"host_cache": 0, "none": 0}
    before = engine.runner.compiles.recompiles
    for _ in range(6):
        arrivals = chats(rng, 12)
        expected = {name: bits(output) for name, output in run(plain, arrivals).items()}
        for name, other in (("host_cache", small), ("none", bare)):
            outputs = run(other, arrivals)
            assert {key: bits(output) for key, output in outputs.items()} == expected
            cached[name] += sum(output.num_cached_tokens for output in outputs.values())
    assert cached["host_cache"] > cached["none"]
    assert engine.runner.compiles.recompiles == before
    small.close()
    assert bool(disk.sizes)


def test_pages_as_a_tpu_has_them(weights, oracle, tmp_path, monkeypatch):
    """Keys and values in one array: XLA serves that too, and pages go to host and disk and come
    back.
    """
    monkeypatch.setattr(state_module, "pairs", lambda dtype: True)
    engine = make(weights)
    engine.runner.warm_up()
    assert all(
        pages.k_PSKH is None and pages.v_PSKH is None
        for pages in engine.runner.state.pages.values()
    )
    small = make(weights, compiled=engine)
    host_cache = host_cache_for(engine, 4, DiskCache(tmp_path, 1 << 30))
    small.tables[0] = small.scheduler.replicas[0].table = PageTable(
        (16, 14), 8, CONFIG.windows, host_cache=host_cache
    )
    arrivals = chats(np.random.default_rng(4), 16)
    plain = run(without_cache(weights, engine), arrivals)
    outputs = run(small, arrivals)
    assert {name: bits(output) for name, output in outputs.items()} == {
        n: bits(output) for n, output in plain.items()
    }
    assert sum(output.num_cached_tokens for output in outputs.values())
    for name, _, params in sum(arrivals.values(), []):
        if params.temperature == 0:
            check_greedy(oracle, outputs[name], params)
    small.close()


def test_another_process_goes_on_with_what_the_first_computed(weights, engine, tmp_path):
    prompt = list(range(41))
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)

    def serve(folder) -> tuple[int, list]:
        own = make(
            weights,
            compiled=engine,
            host_cache=host_cache_for(engine, 50, DiskCache(folder, 1 << 30)),
        )
        output = run(own, {0: [("a", prompt, params)]})["a"]
        own.close()
        own.close()  # once more is once too many, and no harm
        with pytest.raises(RequestError, match="closed"):
            own.add("late", [1], params)
        return output.num_cached_tokens, bits(output)

    first = serve(tmp_path)
    assert first[0] == 0
    assert serve(tmp_path) == (40, first[1])
    for path in tmp_path.iterdir():  # every file is damaged, each in its own way
        raw = bytearray(path.read_bytes())
        raw[len(path.name) * 7919 % len(raw)] ^= 1
        path.write_bytes(raw if path.name[0] < "8" else raw[: len(raw) // 2])
    assert serve(tmp_path) == first
    assert serve(tmp_path) == (40, first[1])


def test_names_that_collide_never_lead_to_another_prompt(weights, engine, tmp_path, monkeypatch):
    monkeypatch.setattr(HostCache, "name", lambda self, node, group: f"all.{group}.page")
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
    plain = without_cache(weights, engine)
    for start in (0, 1, 2):
        prompt = list(range(start, start + 41))
        own = make(
            weights,
            compiled=engine,
            host_cache=host_cache_for(engine, 50, DiskCache(tmp_path, 1 << 30)),
        )
        output = run(own, {0: [("a", prompt, params)]})["a"]
        own.close()
        assert bits(output) == bits(run(plain, {0: [("a", prompt, params)]})["a"])


def test_a_disk_that_takes_nothing_hurts_nobody(weights, engine, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(
        disk_module, "open_private", lambda path, flags: os.open("/dev/full", os.O_WRONLY)
    )
    rng = np.random.default_rng(3)
    plain = without_cache(weights, engine)
    small = make(weights, compiled=engine)
    host_cache = host_cache_for(engine, 2, DiskCache(tmp_path, 1 << 30))
    small.tables[0] = small.scheduler.replicas[0].table = PageTable(
        (16, 14), 8, CONFIG.windows, host_cache=host_cache
    )
    arrivals = chats(rng, 12)
    expected = {name: bits(output) for name, output in run(plain, arrivals).items()}
    assert {name: bits(output) for name, output in run(small, arrivals).items()} == expected
    small.close()
    assert "cannot write KV pages" in caplog.text and not list(tmp_path.iterdir())


def test_a_failed_step_leaves_what_the_host_has(weights, engine, tmp_path, monkeypatch):
    own = make(weights, compiled=engine, host_cache=host_cache_for(engine, 400))
    for group in own.tables[0].pools:
        group.free_pages = group.free_pages[:8]  # the second prompt drives the first one out
    monkeypatch.setattr(own.scheduler, "check", lambda: None)
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1, ignore_eos=True)
    first = run(own, {0: [("a", list(range(60)), params)]})["a"]
    run(own, {0: [("b", list(range(30, 90)), params)]})
    list(own.lifecycle.recover(RuntimeError("the device is gone")))
    again = run(own, {0: [("c", list(range(60)), params)]})["c"]
    assert bits(again) == bits(first)
    assert again.num_cached_tokens > 0


# Sleep


@pytest.mark.parametrize(("level", "keep"), [(1, False), (1, True), (2, False), (2, True)])
def test_sleep_frees_the_device_and_loses_no_token(weights, engine, level, keep):
    copies = jax.tree.map(jnp.array, weights)
    own = make(copies, compiled=engine)
    own.runner.load_weights = lambda: jax.tree.map(jnp.array, weights)
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=1, ignore_eos=True)
    prompts = [list(range(start, start + 20)) for start in range(6)]
    expected = [bits(run(engine, {0: [("x", prompt, params)]})["x"]) for prompt in prompts]
    requests = [own.add(str(index), prompt, params) for index, prompt in enumerate(prompts)]
    for _ in range(8):
        own.step()
    held = jax.tree.leaves((own.runner.weights, own.runner.state))
    before = engine.runner.compiles.recompiles
    own.sleep(level, keep)
    assert all(leaf.is_deleted() for leaf in held)
    assert not own.busy and not own.step()
    with pytest.raises(RequestError, match="asleep"):
        own.add("more", [1], params)
    own.scheduler.check()
    own.lifecycle.wake_up()
    while own.busy:
        own.step()
        own.scheduler.check()
    assert [bits(request.output()) for request in requests] == expected
    assert engine.runner.compiles.recompiles == before
    again = run(own, {0: [("again", prompts[0], params)]})["again"]
    assert again.num_cached_tokens == 19 and bits(again) == expected[0]
    with pytest.raises(RequestError, match="level"):
        own.sleep(3)


@pytest.mark.parametrize("level", [1, 2])
def test_wake_up_that_failed_can_be_repeated(weights, engine, level):
    """The part that reached the device before the failure stays there."""
    own = make(jax.tree.map(jnp.array, weights), compiled=engine)
    own.runner.load_weights = lambda: jax.tree.map(jnp.array, weights)
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=1, ignore_eos=True)
    expected = bits(run(engine, {0: [("x", list(range(20)), params)]})["x"])
    request = own.add("waits", list(range(20)), params)
    own.sleep(level)
    make_state = own.runner.make_state

    def fails():
        raise MemoryError("the device is full")

    own.runner.make_state = fails
    with pytest.raises(MemoryError):
        own.lifecycle.wake_up()
    assert own.lifecycle.is_asleep
    own.runner.make_state = make_state
    own.lifecycle.wake_up()
    while own.busy:
        own.step()
    assert bits(request.output()) == expected


def test_sleep_survives_a_step_that_fails(weights, engine):
    copies = jax.tree.map(jnp.array, weights)
    own = make(copies, compiled=engine)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    request = own.add("hit", list(range(20)), params)
    own.step()
    collect = own.runner.collect

    def fails(launched):
        raise RuntimeError("the device is not well")

    own.runner.collect = fails
    assert own.sleep() == [request] and request.output().outputs[0].finish_reason == "error"
    own.runner.collect = collect
    own.lifecycle.wake_up()
    own.scheduler.check()
    assert (
        len(run(own, {0: [("canary", list(range(20)), params)]})["canary"].outputs[0].token_ids)
        == 20
    )


# What it did when


def test_a_trace_tells_every_step_and_every_request(weights, engine, tmp_path):
    own = make(weights, compiled=engine)
    own.observers.append(Trace(tmp_path / "trace.json"))
    rng = np.random.default_rng(0)
    arrivals, _, _ = random_mix(rng)
    plans = []
    launch = own.runner.launch
    own.runner.launch = lambda plan, moves: plans.append(plan) or launch(plan, moves)
    outputs = run(own, arrivals)
    own.close()
    events = [event for event in json.loads((tmp_path / "trace.json").read_text()) if event]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X"]
    steps = [event for event in spans if names[event["tid"]] == "device"]
    assert [event["name"] for event in steps] == [f"step {number}" for number in range(len(plans))]
    assert [event["args"]["rows"] for event in steps] == [plan.num_tokens for plan in plans]
    for lane in names:
        own_spans = [event for event in spans if event["tid"] == lane]
        assert all(event["dur"] >= 0 for event in own_spans)
        assert all(
            a["ts"] + a["dur"] <= b["ts"] for a, b in zip(own_spans, own_spans[1:], strict=False)
        )
    host = [event["name"] for event in spans if names[event["tid"]] == "host"]
    assert {"schedule", "launch", "collect", "update"} == set(host)
    requests = [event for event in events if event.get("cat") == "request"]
    for name, output in outputs.items():
        mine = [event for event in requests if event["id"] == name]
        assert [(event["name"], event["ph"]) for event in mine] == [
            (part, phase) for part in ("wait", "read", "write") for phase in "be"
        ]
        assert mine[-2]["args"]["tokens"] == len(output.outputs[0].token_ids)
        assert mine[0]["args"]["prompt_tokens"] == len(output.prompt_token_ids)
        times = [event["ts"] for event in mine]
        assert times == sorted(times)


def test_a_trace_that_cannot_be_written_hurts_no_request(weights, engine, caplog):
    own = make(weights, compiled=engine)
    own.observers.append(Trace(Path("/dev/full")))
    output = run(own, {0: [("a", [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))]})["a"]
    own.close()
    assert output.outputs[0].finish_reason == "length"
    assert caplog.text.count("the trace /dev/full ends here") == 1


# The likeliest of several


def test_best_of_gives_the_likeliest(weights, engine):
    prompt = [5, 6, 7]
    every = SamplingParams(temperature=1, seed=3, n=6, max_tokens=7, logprobs=0, ignore_eos=True)
    answers = run(engine, {0: [("all", prompt, every)]})["all"].outputs
    best = sorted(answers, key=lambda answer: answer.cumulative_logprob, reverse=True)[:2]
    params = SamplingParams(temperature=1, seed=3, n=2, best_of=6, max_tokens=7, ignore_eos=True)
    chosen = run(engine, {0: [("best", prompt, params)]})["best"].outputs
    assert [answer.token_ids for answer in chosen] == [answer.token_ids for answer in best]
    assert [answer.index for answer in chosen] == [0, 1]
    assert [answer.cumulative_logprob for answer in chosen] == [
        answer.cumulative_logprob for answer in best
    ]
    assert all(answer.logprobs is None for answer in chosen)
    for wrong in (1, 0, "x", 1000):
        with pytest.raises(RequestError, match="best_of"):
            SamplingParams(n=2, best_of=wrong)


# The order of the queue, and its ends


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_priorities_go_first_and_waiting_makes_up_for_them(weights, engine):
    engine = make(weights, compiled=engine)
    clock = Clock()
    engine.clock = clock
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    first = [engine.add(f"busy {i}", [i + 1], params) for i in range(4)]  # all slots
    engine.step()
    waiting = [engine.add("calm", [5], params)]
    clock.now += 1
    waiting.append(engine.add("urgent", [6], params, terms=Terms(priority=-1)))
    waiting.append(engine.add("late", [7], params, terms=Terms(priority=1)))
    clock.now += 1.5 * POINT
    waiting.append(engine.add("urgent but new", [8], params, terms=Terms(priority=-1)))
    assert [seq.request.request_id for seq in engine.scheduler.waiting] == [
        "urgent", "calm", "urgent but new", "late",
    ]  # fmt: skip
    while engine.busy:
        engine.step()
    assert all(request.finished for request in first + waiting)


def test_who_is_least_urgent_gives_way(weights, engine):
    engine = make(weights, compiled=engine)
    engine.tables[0] = engine.scheduler.replicas[0].table = PageTable((14, 40), 8, CONFIG.windows)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    requests = [
        engine.add(str(i), [i] * 20, params, terms=Terms(priority=priority))
        for i, priority in enumerate((3, -3, 2, -2))
    ]
    while engine.busy:
        engine.step()
    preemptions = [request.output().metrics.num_preemptions for request in requests]
    assert preemptions[0] > 0 and preemptions[1] == preemptions[3] == 0


def test_a_timeout_ends_a_request_with_what_it_has(weights, oracle, engine):
    engine = make(weights, compiled=engine)
    clock = Clock()
    engine.clock = clock
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    slow = engine.add("slow", [1, 2, 3], params, terms=Terms(timeout=5))
    patient = engine.add("patient", [4, 5, 6], params, terms=Terms(timeout=500))
    other = [engine.add(str(i), [i], params) for i in range(2)]
    queued = engine.add("queued", [9], params, terms=Terms(timeout=2))
    for _ in range(8):
        engine.step()
    clock.now += 3
    assert queued in engine.step() and queued.output().outputs[0].finish_reason == "timeout"
    assert not queued.output().outputs[0].token_ids
    clock.now += 3
    assert slow in engine.step()
    answer = slow.output().outputs[0]
    assert answer.finish_reason == "timeout" and 5 < len(answer.token_ids) < 20
    engine.scheduler.check()
    while engine.busy:
        engine.step()
    for request in (patient, *other):
        check_greedy(oracle, request.output(), params)
    assert len(engine.deadlines.heap) <= 1  # that of who was done in time stays until it is due


def test_each_key_gets_an_equal_share(weights, engine):
    """One caller with a hundred requests, and one who comes later with four: these wait for no more
    than their turn.
    """
    engine = make(weights, compiled=engine)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for index in range(100):
        engine.add(f"many {index}", [index % VOCAB] * 10, params, terms=Terms(share_key="many"))
    ended: list[str] = []

    def step() -> None:
        ended.extend(request.request_id for request in engine.step() if request.finished)
        engine.scheduler.check()

    for _ in range(5):
        step()
    few = [engine.add(f"few {i}", [i] * 10, params, terms=Terms(share_key="few")) for i in range(4)]
    before = len(ended)
    while engine.busy:
        step()
    assert all(request.finished for request in few) and len(ended) == 104
    last = max(ended.index(request.request_id) for request in few)
    assert 4 <= last - before < 16  # about every second one is theirs until they are done
    assert not engine.scheduler.waiting.present and not engine.scheduler.waiting.served
    with pytest.raises(RequestError, match="share_key"):
        Terms(share_key="")


def test_a_full_queue_refuses(weights, engine):
    engine = make(weights, compiled=engine)
    engine.max_queued = 2
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine.add("a", [1], params)
    engine.add("b", [1], params)
    with pytest.raises(RequestError, match=r"queue.*full.*try again"):
        engine.add("c", [1], params)
    engine.step()
    engine.add("c", [1], params)
    while engine.busy:
        engine.step()


@pytest.mark.parametrize(
    ("terms", "field"),
    [
        ({"priority": 1.5}, "priority"),
        ({"priority": 10**6}, "priority"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": "1"}, "timeout"),
    ],
)
def test_terms_that_make_no_sense_are_refused(terms, field):
    with pytest.raises(RequestError, match=field):
        Terms(**terms)
